"""Loopback addresses, and TLS for connections that leave this machine.

The listener makes a certificate for its own lifetime; a client receives it with the address, in
Ray's calls, and trusts no other. This module is independent of Ray.
"""

from __future__ import annotations

import ipaddress
import ssl
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

# Always valid: the clocks of two nodes may differ, and the key disappears with its process.
_FROM, _UNTIL = datetime(2000, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC)


def is_loopback(host: str) -> bool:
    """Returns True if only this machine reaches `host`, an address or a host name."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # another host name, which may resolve to any address
        return False


def server_tls() -> tuple[ssl.SSLContext, str]:
    """Returns a context with a new key, and its certificate as PEM."""
    # Imported here: neither the CLI nor a server on one machine needs them.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "loraplex ingress")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_FROM)
        .not_valid_after(_UNTIL)
        .sign(key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    secret = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    with TemporaryDirectory() as folder:  # private to this user; OpenSSL reads paths only
        path = Path(folder) / "key.pem"
        path.write_bytes(pem + secret)
        context.load_cert_chain(path)
    return context, pem.decode()


def client_tls(certificate: str) -> ssl.SSLContext:
    """Returns a context that trusts only the holder of this certificate's key, under any name."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.load_verify_locations(cadata=certificate)
    return context

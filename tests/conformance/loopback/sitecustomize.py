"""Loaded by each Python process of a client: connections to other machines fail as if the network
were down, and their addresses are appended to the file that CONFORMANCE_CALLS names.

Clients call out for price lists, tokenizers and telemetry; none of that may change a result.
"""

import errno
import ipaddress
import os
import socket

_LOOPBACK_NAMES = {None, "", "localhost", "0.0.0.0", "::", socket.gethostname()}


def _is_local(host: object) -> bool:
    if isinstance(host, bytes):
        host = host.decode()
    if host in _LOOPBACK_NAMES:
        return True
    try:
        return ipaddress.ip_address(str(host)).is_loopback
    except ValueError:
        return False


def _record(host: object) -> None:
    if path := os.environ.get("CONFORMANCE_CALLS"):
        with open(path, "a") as file:
            file.write(f"{host}\n")


_getaddrinfo = socket.getaddrinfo


def _guarded_getaddrinfo(host, *args, **kwargs):
    if not _is_local(host):
        _record(host)
        raise socket.gaierror(socket.EAI_AGAIN, "the conformance run allows loopback only")
    return _getaddrinfo(host, *args, **kwargs)


class _GuardedSocket(socket.socket):
    def connect(self, address):
        self._check(address)
        return super().connect(address)

    def connect_ex(self, address):
        self._check(address)
        return super().connect_ex(address)

    def _check(self, address):
        # A datagram socket's connect sends nothing: clients learn their own address so.
        is_internet = self.family in (socket.AF_INET, socket.AF_INET6)
        if is_internet and self.type == socket.SOCK_STREAM and not _is_local(address[0]):
            _record(address[0])
            raise OSError(errno.ENETUNREACH, "the conformance run allows loopback only")


socket.getaddrinfo = _guarded_getaddrinfo
socket.socket = _GuardedSocket

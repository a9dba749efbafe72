"""Salts of the prefix cache: two requests share KV blocks only if their tenants and the salts that
their clients sent are equal.

The hash is keyed, so that a client cannot compute the salt of another tenant and with it the
digests of its prompts' prefixes. The manager keeps the key and sends it to the ingresses; clients
never see it. A different key changes no response; earlier prompts are computed again.
"""

from __future__ import annotations

import logging
import secrets
from hashlib import blake2b
from pathlib import Path

from serve_app.home import create_secret

logger = logging.getLogger(__name__)

KEY_FILE = "prefix_cache_key"  # in the home folder, readable by its owner only
_KEY_BYTES = 32
_SALT_BYTES = 16


def cache_salt(key: bytes, tenant: str, client_salt: str) -> str:
    """Returns the salt as hexadecimal digits. Each part is hashed with its length, so that no two
    pairs are the same bytes."""
    parts = [part.encode() for part in (tenant, client_salt)]
    text = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return blake2b(text, key=key, digest_size=_SALT_BYTES).hexdigest()


def kept_key(home: Path | None) -> bytes:
    """Returns the key stored in `home`, created if missing; processes that start at the same time
    agree on it. Without a home, or if it cannot be written, the key lasts as long as this process.
    """
    if home is None:
        return secrets.token_bytes(_KEY_BYTES)
    try:
        home.mkdir(parents=True, exist_ok=True)
        path = home / KEY_FILE
        key = _read(path)
        if key is None:
            create_secret(path, secrets.token_hex(_KEY_BYTES))
            key = _read(path)
        if key is None:  # a link whose target is away, or a file that others damage
            raise OSError("it cannot be read after it was written")
        return key
    except OSError as error:
        logger.warning(
            "cannot store the key of the prefix-cache salts in %s: %s; a temporary key is used, "
            "so a restarted manager computes cached prompts again; make the folder writable",
            home / KEY_FILE,
            error,
        )
        return secrets.token_bytes(_KEY_BYTES)


def _read(path: Path) -> bytes | None:
    """Returns the stored key; None if there is no file or its content is damaged."""
    try:
        key = bytes.fromhex(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError:
        key = b""
    if len(key) != _KEY_BYTES:
        logger.warning("%s does not hold a key of %d bytes; it is replaced", path, _KEY_BYTES)
        path.unlink(missing_ok=True)
        return None
    return key

"""Salts of the prefix cache: two requests share KV blocks only if both their tenant and the salt
that the client sent are equal.

The hash is keyed, so that no client can compute another tenant's salt and with it the names of its
prompts' prefixes. The manager holds the key and sends it to the ingresses; clients never see it.
With another key the answers are the same, only earlier prompts are computed again.
"""

from __future__ import annotations

import logging
import os
import secrets
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

logger = logging.getLogger(__name__)

KEY_FILE = "prefix_cache_key"  # in the home, readable by its owner alone
_KEY_BYTES = 32
_SALT_BYTES = 16


def cache_salt(key: bytes, tenant: str, client_salt: str) -> str:
    """Each part goes in with its length: no two pairs are the same bytes."""
    parts = [part.encode() for part in (tenant, client_salt)]
    text = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return blake2b(text, key=key, digest_size=_SALT_BYTES).hexdigest()


def kept_key(home: Path | None) -> bytes:
    """The key in `home`, made where there is none; two processes that start at once agree on it.
    Without a home, or one that cannot be written, a key that ends with this process."""
    if home is None:
        return secrets.token_bytes(_KEY_BYTES)
    try:
        home.mkdir(parents=True, exist_ok=True)
        return _read(home / KEY_FILE) or _make(home / KEY_FILE)
    except OSError as error:
        logger.warning("the key of the prefix cache's salts cannot be kept: %s", error)
        return secrets.token_bytes(_KEY_BYTES)


def _read(path: Path) -> bytes | None:
    """None where there is none."""
    try:
        key = bytes.fromhex(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError:
        key = b""
    if len(key) != _KEY_BYTES:
        logger.warning("%s holds no key of %d bytes; a new one replaces it", path, _KEY_BYTES)
        path.unlink(missing_ok=True)
        return None
    return key


def _make(path: Path) -> bytes:
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    temporary.touch(mode=0o600, exist_ok=False)
    try:
        temporary.write_text(secrets.token_hex(_KEY_BYTES))
        with suppress(FileExistsError):  # another process was first: its key counts
            os.link(temporary, path)
    finally:
        temporary.unlink()
    key = _read(path)
    if key is None:
        raise OSError(f"{path} was removed while it was made")
    return key

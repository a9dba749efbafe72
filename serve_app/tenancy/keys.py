"""API keys: their text, their hash, and the server's pepper.

A key is `lpx_<id>_<secret>`. The id is public: it is in rows, logs and metrics. The secret has 256
random bits, so that a fast hash protects it; a slow one, as for passwords of people, would only
cost every request milliseconds. At rest a key is its HMAC-SHA256 under the pepper, which is not in
the database: a copy of the database neither contains a key nor accepts a forged row.
"""

from __future__ import annotations

import hmac
import re
import secrets
import string
from pathlib import Path

from serve_app.home import create_secret

PEPPER_FILE = "key_pepper"  # in the home folder, readable by its owner only
MIN_PEPPER_CHARS = 32
KEY_PREFIX = "lpx_"
_ID_CHARS = 10
_ALPHABET = string.ascii_lowercase + string.digits
_SECRET_BYTES = 32  # 43 characters
_ID_END = len(KEY_PREFIX) + _ID_CHARS
_NUM_CHARS = _ID_END + 1 + 43
_ID = re.compile(rf"[a-z0-9]{{{_ID_CHARS}}}")


class PepperError(Exception):
    """The pepper cannot be used; the message has its place and the reason."""


def new_id() -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(_ID_CHARS))


def new_key(key_id: str) -> str:
    """Returns the text of a new key with this id, which is shown once and never stored."""
    return f"{KEY_PREFIX}{key_id}_{secrets.token_urlsafe(_SECRET_BYTES)}"


def id_of(text: str) -> str | None:
    """Returns the id in the text of a key, or None if the text has another form."""
    is_key = len(text) == _NUM_CHARS and text.startswith(KEY_PREFIX) and text[_ID_END] == "_"
    return text[len(KEY_PREFIX) : _ID_END] if is_key else None


def is_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


def digest(pepper: bytes, text: str) -> bytes:
    """Returns the hash of a whole key, 32 bytes. The id is part of it, so that no row can take the
    hash of another row."""
    return hmac.digest(pepper, text.encode(), "sha256")


def kept_pepper(given: str | None, home: Path | None) -> bytes:
    """Returns the pepper: `given` if set, otherwise the one stored in `home`, created if missing.
    Processes that start at the same time agree on it.

    Raises PepperError, also if there is neither of both: a pepper that ends with its process would
    silently turn every key away.
    """
    if given is not None:
        if len(given) < MIN_PEPPER_CHARS:
            raise PepperError(
                f"the pepper of the keys has {len(given)} characters; use at least "
                f"{MIN_PEPPER_CHARS} random ones"
            )
        return given.encode()
    if home is None:
        raise PepperError("there is no home for the pepper of the keys; set LORAPLEX_KEY_PEPPER")
    path = home / PEPPER_FILE
    try:
        home.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            create_secret(path, secrets.token_hex(32))
        pepper = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise PepperError(f"{path} cannot be read or created: {error}") from error
    if len(pepper) < MIN_PEPPER_CHARS:
        raise PepperError(
            f"{path} is damaged: it holds {len(pepper)} characters; restore it, or remove it and "
            "create every key again"
        )
    return pepper.encode()

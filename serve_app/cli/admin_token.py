"""The operator's token of a home, in a file that only its owner can read."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from serve_app.config import admin_token

_FILE = "admin_token"


def kept_token(home: Path) -> str | None:
    """Returns the token of the environment, otherwise that of `home`, or None."""
    if token := admin_token():
        return token
    try:
        return (home / _FILE).read_text().strip() or None
    except FileNotFoundError:
        return None


def ensure_token(home: Path) -> str:
    """Returns the token of `home`, made if it is missing; concurrent starts agree on it."""
    home.mkdir(parents=True, exist_ok=True)
    token = kept_token(home)
    while token is None:
        temporary = home / f"{_FILE}.{secrets.token_hex(4)}"
        temporary.touch(mode=0o600)
        temporary.write_text(secrets.token_urlsafe(32))
        try:
            os.link(temporary, home / _FILE)
        except FileExistsError:
            pass
        finally:
            temporary.unlink()
        token = kept_token(home)
    return token

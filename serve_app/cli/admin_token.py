"""The operator's token of a home, in a file that only its owner can read."""

from __future__ import annotations

import secrets
from pathlib import Path

from serve_app.config import ADMIN_TOKEN, secret
from serve_app.home import create_secret

_FILE = "admin_token"


def kept_token(home: Path) -> str | None:
    """Returns the token of the environment, otherwise that of `home`, or None."""
    if token := secret(ADMIN_TOKEN):
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
        create_secret(home / _FILE, secrets.token_urlsafe(32))
        token = kept_token(home)
    return token

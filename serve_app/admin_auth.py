"""The operator of the server: the bearer of LORAPLEX_ADMIN_TOKEN. Without the variable nobody may;
`loraplex serve` makes a token a home, in a file that only its owner can read.
"""

from __future__ import annotations

import hmac
import os
import secrets
from pathlib import Path

from fastapi import Request

from serve_app.config import ADMIN_TOKEN, admin_token
from serve_app.errors import ApiError

_FILE = "admin_token"


def require_admin(request: Request) -> None:
    """For a route's dependencies: 403 where no token is set, 401 without it or with another."""
    expected = admin_token()
    if not expected:
        raise ApiError(
            403, f"Administration is off: the server runs without {ADMIN_TOKEN}.", code="admin_off"
        )
    if not is_admin(request):
        raise ApiError(401, "The admin token is missing or wrong.", code="invalid_admin_token")


def is_admin(request: Request) -> bool:
    """Whether the request bears the admin token; never where none is set."""
    expected = admin_token()
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    return (
        expected is not None
        and scheme.lower() == "bearer"
        and hmac.compare_digest(given.encode(), expected.encode())
    )


def kept_token(home: Path) -> str | None:
    """The environment's, else the one in `home`; None where there is neither."""
    if token := admin_token():
        return token
    try:
        return (home / _FILE).read_text().strip() or None
    except FileNotFoundError:
        return None


def ensure_token(home: Path) -> str:
    """Makes one where there is none yet; two that start at once agree on it."""
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

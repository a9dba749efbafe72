"""The operator of the server: the bearer of LORAPLEX_ADMIN_TOKEN. Without the variable nobody may;
`loraplex serve` makes a token a home, in a file that only its owner can read.
"""

from __future__ import annotations

import hmac

from fastapi import Request

from serve_app.config import ADMIN_TOKEN, admin_token
from serve_app.errors import ApiError


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

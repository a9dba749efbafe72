"""Access to the administration, for bearers of LORAPLEX_ADMIN_TOKEN; without the variable it is
off. `loraplex serve` makes one token per home, in a file that only its owner can read. Where
requests need keys, the authentication layer has checked the caller's scope already, and the token
is a key with every scope.
"""

from __future__ import annotations

import hmac
from collections.abc import Set

from fastapi import Depends, Request
from fastapi.routing import APIRoute

from engine.errors import InvalidRequestError
from serve_app.config import ADMIN_TOKEN, secret
from serve_app.errors import ApiError
from serve_app.tenancy.caller import Caller


def require_admin(request: Request) -> None:
    """A dependency of routes: raises ApiError with 403 if no token is set, 401 for a wrong one."""
    if caller_of(request) is not None:
        return
    if not secret(ADMIN_TOKEN):
        raise ApiError(
            403, f"Administration is off: set {ADMIN_TOKEN} for the server.", code="admin_off"
        )
    if not is_admin(request):
        raise ApiError(
            401,
            "The admin token is missing or wrong; send authorization: Bearer <token>.",
            code="invalid_admin_token",
        )


def known_parameters(request: Request) -> None:
    """A dependency of routes: raises InvalidRequestError for a parameter of the URL that the route
    does not declare. One with a typing error would be no filter at all."""
    route = request.scope["route"]
    assert isinstance(route, APIRoute)
    refuse_unknown(request, {field.alias for field in route.dependant.query_params})


# The dependencies of all routers whose routes are the administration alone.
ADMIN_DEPENDENCIES = (Depends(require_admin), Depends(known_parameters))


def refuse_unknown(request: Request, known: Set[str]) -> None:
    if unknown := sorted(set(request.query_params) - known):
        remedy = f"use {', '.join(sorted(known))}" if known else "there are none here"
        raise InvalidRequestError(f"{unknown[0]}: unknown; {remedy}.", unknown[0])


def is_admin(request: Request) -> bool:
    """Returns True if the request carries the admin token, or a key that may read all of the
    administration; always False if there is neither."""
    caller = caller_of(request)
    if caller is not None:
        return "admin:read" in caller.policy.scopes
    expected = secret(ADMIN_TOKEN)
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    return (
        expected is not None
        and scheme.lower() == "bearer"
        and hmac.compare_digest(given.encode(), expected.encode())
    )


def caller_of(request: Request) -> Caller | None:
    """Returns the authenticated caller; None where requests need no key."""
    caller: Caller | None = (request.scope.get("state") or {}).get("caller")
    return caller

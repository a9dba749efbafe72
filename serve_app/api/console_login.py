"""/console/session, /console/login and /console/logout: the rights of the console's user.

A login checks a key as any request does, by a keyed hash and without I/O, so that guessing here is
neither cheaper nor dearer than at another route.
"""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request, Response

from engine.errors import InvalidRequestError
from serve_app.api.admin_auth import is_admin
from serve_app.api.state import state_of
from serve_app.config import ADMIN_TOKEN, secret
from serve_app.console.cookie import MAX_KEY_BYTES, is_own, set_cookie
from serve_app.errors import ApiError
from serve_app.http.asgi import json_response, read_body
from serve_app.tenancy.authentication import ADMIN
from serve_app.tenancy.caller import Caller

router = APIRouter(prefix="/console", include_in_schema=False)

_MAX_BODY_BYTES = 16 * 1024


class LoginBody(msgspec.Struct, forbid_unknown_fields=True):
    key: str


class Session(msgspec.Struct):
    """The answer of GET /console/session."""

    scopes: list[str]  # of the user, sorted
    tenant: str
    key_id: str  # empty without a login
    needs_login: bool  # a key or the admin token would give further rights
    tenancy_enabled: bool


@router.get("/session")
async def session(request: Request) -> Response:
    """Returns the rights of the caller."""
    caller: Caller | None = None
    try:
        caller = await _caller(request)
    except ApiError:
        if state_of(request).authenticator is not None:
            return _no_store(Session([], "", "", needs_login=True, tenancy_enabled=True))
    return _session_of(request, caller)


@router.post("/login")
async def login(request: Request) -> Response:
    """Stores a valid key in the cookie. Raises ApiError: 401 for an invalid key, 403 if another
    site's page may have made the request: it would log the user in as somebody else."""
    _check_own(request)
    raw = await read_body(request, _MAX_BODY_BYTES)
    try:
        key = msgspec.json.decode(raw, type=LoginBody).key.strip()
    except (msgspec.DecodeError, UnicodeDecodeError):  # their words may have parts of the key
        words = 'The body is not a login: it must be {"key": "KEY"}.'
        raise ApiError(400, words, code="invalid_body") from None
    if not key.isprintable() or not 0 < len(key.encode()) <= MAX_KEY_BYTES:
        raise InvalidRequestError(
            f"key: must be printable text of 1 to {MAX_KEY_BYTES} bytes.", "key"
        )
    headers = [one for one in request.scope["headers"] if one[0] != b"authorization"]
    headers.append((b"authorization", b"Bearer " + key.encode()))
    probe = Request({**request.scope, "headers": headers})
    caller = await _caller(probe)
    response = _session_of(probe, caller)
    response.headers["set-cookie"] = set_cookie(request.scope, key)
    return response


@router.post("/logout")
async def logout(request: Request) -> Response:
    """Removes the cookie."""
    _check_own(request)
    response = _no_store({"logged_out": True})
    response.headers["set-cookie"] = set_cookie(request.scope, None)
    return response


async def _caller(request: Request) -> Caller:
    """Returns the owner of the request's key. Raises ApiError with 401 without a valid one."""
    authenticator = state_of(request).authenticator
    if authenticator is not None:
        return await authenticator.find(request.scope["headers"])
    if not is_admin(request):
        raise ApiError(401, "This is not the admin token.", code="invalid_admin_token")
    return ADMIN


def _session_of(request: Request, caller: Caller | None) -> Response:
    has_keys = state_of(request).authenticator is not None
    if caller is None:  # without keys every client may use the models
        needs_login = bool(secret(ADMIN_TOKEN))
        return _no_store(Session(["infer"], "", "", needs_login, has_keys))
    policy = caller.policy
    return _no_store(Session(sorted(policy.scopes), policy.tenant, caller.key_id, False, has_keys))


def _check_own(request: Request) -> None:
    if not is_own(request.scope["headers"]):
        raise ApiError(
            403, "This request does not come from a page of the console.", code="cross_site"
        )


def _no_store(value: object) -> Response:
    response = json_response(value)
    response.headers["cache-control"] = "no-store"
    return response

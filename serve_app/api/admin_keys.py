"""The keys of clients, under LiteLLM's paths and names where these mean the same, and the audit
log. This is only the HTTP side: the manager has the keys and carries out the orders.
"""

from __future__ import annotations

import math
import re
import time
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Request, Response
from msgspec.structs import asdict
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, JsonValue

from engine.errors import InvalidRequestError
from serve_app.admin_api import KeyInfo, KeyLine, KeyLines, NewKey
from serve_app.api.admin_auth import ADMIN_DEPENDENCIES, caller_of
from serve_app.api.state import state_of
from serve_app.errors import ApiError, shown
from serve_app.http.asgi import json_response, read_body
from serve_app.openai.json_body import parse_body
from serve_app.ray_calls import ask_manager
from serve_app.tenancy.authentication import ADMIN
from serve_app.tenancy.caller import Scope
from serve_app.tenancy.keys import id_of, is_id
from serve_app.tenancy.orders import KeyOrder

router = APIRouter(dependencies=ADMIN_DEPENDENCIES, include_in_schema=False)

T = TypeVar("T", bound=BaseModel)

_MAX_BODY_BYTES = 256 * 1024
_MAX_COUNT = 2**53
_MAX_METADATA = 64
# Durations as LiteLLM writes them: `30s`, `15m`, `12h`, `30d`, `2w`, `1mo` of 30 days.
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400, "mo": 30 * 86_400}
_DURATION = re.compile(r"([0-9]{1,9})(s|mo|m|h|d|w)")
_MAX_S = 100 * 365 * 86_400


def _is_printable(value: str) -> str:
    if not value.isprintable():
        raise ValueError("must be printable")
    return value


def _seconds(value: object) -> object:
    """Returns a duration in seconds. Raises ValueError with the form that a text must have."""
    if not isinstance(value, str):
        return value
    found = _DURATION.fullmatch(value)
    if found is None:
        raise ValueError("must be a number with s, m, h, d, w or mo, such as 30d")
    seconds = int(found[1]) * _UNITS_S[found[2]]
    if seconds > _MAX_S:
        raise ValueError("must be 100 years at most")
    return float(seconds)


Name = Annotated[str, Field(min_length=1, max_length=128), AfterValidator(_is_printable)]
Glob = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_is_printable)]
Count = Annotated[int, Field(ge=1, le=_MAX_COUNT)]
Duration = Annotated[float, BeforeValidator(_seconds), Field(ge=0, le=_MAX_S)]


class _Fields(BaseModel):
    """The fields of a key, as `KeyOrder.changes` names them. null: not limited, or as at the
    creation."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    alias: Name | None = Field(None, validation_alias="key_alias")
    tenant: Name | None = Field(None, validation_alias="team_id")  # by default ""
    models: list[Glob] | None = Field(None, max_length=1000)  # globs; by default all
    scopes: list[Scope] | None = Field(None, max_length=8)  # by default infer
    duration: Duration | None = None  # from now until it expires
    requests_per_minute: Count | None = Field(None, validation_alias="rpm_limit")
    tokens_per_minute: Count | None = Field(None, validation_alias="tpm_limit")
    max_parallel_requests: Count | None = None
    tokens_per_day: Count | None = None
    tokens_per_month: Count | None = None
    max_tokens: Count | None = None
    lowest_priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    metadata: dict[str, JsonValue] | None = Field(None, max_length=_MAX_METADATA)


class _Update(_Fields):
    key: str  # the key itself, its id or its alias


class _Regenerate(_Update):
    grace_period: Duration | None = None  # the former secret counts for so long; by default not


class _Delete(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    keys: list[str] = Field([], max_length=1000)
    key_aliases: list[str] = Field([], max_length=1000)


_DEFAULTS: dict[str, Any] = {
    "tenant": "",
    "models": ("*",),
    "scopes": frozenset({"infer"}),
    "metadata": {},
}


@router.post("/key/generate")
async def generate(request: Request) -> Response:
    """Makes a key. Its secret is in this answer and nowhere else."""
    body = await _read(request, _Fields)
    return await _order(request, "generate", "", body)


@router.post("/key/update")
async def update(request: Request) -> Response:
    """Changes the fields that the body has; null removes a limit."""
    body = await _read(request, _Update)
    return await _order(request, "update", body.key, body)


@router.post("/key/regenerate")
async def regenerate(request: Request) -> Response:
    """Gives a key a new secret. The former one counts until the end of `grace_period`."""
    body = await _read(request, _Regenerate)
    return await _order(request, "rotate", body.key, body, body.grace_period or 0.0)


@router.post("/key/delete")
async def delete(request: Request) -> Response:
    """Revokes keys. None is revoked if one of them is unknown."""
    body = await _read(request, _Delete)
    manager = state_of(request).gateway.manager
    named = [reference(one) for one in (*body.keys, *body.key_aliases)]
    if not named:
        raise InvalidRequestError("keys: must name a key, or key_aliases must.", "keys")
    ids = await ask_manager(manager.revoke_keys, _actor(request), named)
    return json_response({"deleted_keys": ids})


@router.get("/key/info")
async def info(request: Request, key: str | None = None) -> Response:
    """Returns a key: that of the caller, or another one for callers that may read the
    administration."""
    caller = caller_of(request) or ADMIN
    wanted = caller.key_id if key is None else reference(key)
    if wanted != caller.key_id and "admin:read" not in caller.policy.scopes:
        raise ApiError(403, "This API key lacks the scope admin:read.", code="missing_scope")
    if wanted == caller.key_id and not is_id(wanted):  # a key may have it as its alias
        raise ApiError(404, "The caller has no key of its own.", code="key_not_found")
    line = await ask_manager(state_of(request).gateway.manager.key_line, wanted)
    assert isinstance(line, KeyLine)
    return json_response(KeyInfo(line.token_id, line))


@router.get("/key/list")
async def list_keys(
    request: Request,
    page: int = 1,
    size: int = 100,
    team_id: str | None = None,
    key_alias: str | None = None,
    return_full_object: bool = False,
) -> Response:
    """Returns ids of keys, the oldest first, or the keys with `return_full_object`."""
    for name, value, most in (("page", page, 1_000_000), ("size", size, 10_000)):
        if not 1 <= value <= most:
            raise InvalidRequestError(f"{name}: must be from 1 to {most}, got {value}.", name)
    lines = await ask_manager(state_of(request).gateway.manager.key_lines)
    assert isinstance(lines, list)
    found: list[KeyLine] = [
        line
        for line in lines
        if team_id in (None, line.team_id) and key_alias in (None, line.key_alias)
    ]
    shown = found[(page - 1) * size : page * size]
    pages = math.ceil(len(found) / size)
    if return_full_object:
        return json_response(KeyLines(shown, len(found), page, pages))
    ids = [line.token_id for line in shown]
    return json_response(
        {"keys": ids, "total_count": len(found), "current_page": page, "total_pages": pages}
    )


@router.get("/admin/audit")
async def audit(request: Request, limit: int = 100, before: int | None = None) -> Response:
    """Returns acts of operators, the latest first: at most `limit`, older than the id `before`."""
    if not 1 <= limit <= 1000:
        raise InvalidRequestError(f"limit: must be from 1 to 1000, got {limit}.", "limit")
    if before is not None and not 0 <= before <= _MAX_COUNT:
        raise InvalidRequestError(f"before: must be an id, got {shown(before)}.", "before")
    acts = await ask_manager(state_of(request).gateway.manager.acts, limit, before)
    return json_response({"acts": acts})


def reference(text: str) -> str:
    """Returns the id of a whole key; ids and aliases stay as they are."""
    return id_of(text) or text


async def _read(request: Request, kind: type[T]) -> T:
    return parse_body(kind, await read_body(request, _MAX_BODY_BYTES))


async def _order(
    request: Request, kind: Any, key: str, body: _Fields, grace_s: float = 0.0
) -> Response:
    order = KeyOrder(kind, _actor(request), reference(key), changes_of(body), grace_s)
    answer = await ask_manager(state_of(request).gateway.manager.order_key, order)
    assert isinstance(answer, tuple)
    line, text = answer
    return json_response(NewKey(key=text, **asdict(line)) if text else line)


def changes_of(body: _Fields) -> dict[str, Any]:
    """Returns the fields of a key that a body sets."""
    changes: dict[str, Any] = {}
    for name in body.model_fields_set & _Fields.model_fields.keys():
        value = getattr(body, name)
        if name == "duration":
            name, value = "expires_s", None if value is None else time.time() + value
        elif value is None:
            value = _DEFAULTS.get(name)
        elif name == "models":
            value = tuple(value)
        elif name == "scopes":
            value = frozenset(value)
        changes[name] = value
    return changes


def _actor(request: Request) -> str:
    return (caller_of(request) or ADMIN).key_id

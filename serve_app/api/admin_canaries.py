"""/admin/canaries: the split adapters, the numbers of their arms, and the operator's changes. This
is only the HTTP side: the manager has the state and applies the changes.
"""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from serve_app.api.admin_auth import ADMIN_DEPENDENCIES
from serve_app.api.state import state_of
from serve_app.errors import ApiError
from serve_app.http.asgi import json_response, read_body
from serve_app.messages import CanaryChange
from serve_app.openai.json_body import parse_body
from serve_app.ray_calls import ask_manager

router = APIRouter(
    prefix="/admin/canaries",
    dependencies=ADMIN_DEPENDENCIES,
    include_in_schema=False,
)


class _Promote(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    version: int | None = Field(None, ge=1)


class _Start(_Promote):
    alias: str | None = Field(None, min_length=1, max_length=64)
    weight: float | None = Field(None, ge=0, le=1)
    shadow: float | None = Field(None, ge=0, le=1)


@router.get("")
async def canaries(request: Request) -> Response:
    statuses = await ask_manager(state_of(request).gateway.manager.canaries)
    return json_response({"canaries": statuses})


@router.post("/{adapter}")
async def start(request: Request, adapter: str) -> Response:
    """Sends `weight` of the requests to a version, or copies of `shadow` of them, or both."""
    body = parse_body(_Start, await read_body(request, state_of(request).args.max_body_bytes))
    if body.version is not None and body.alias is not None:
        raise ApiError(
            400,
            f"alias: cannot be combined with version, got {body.alias!r} and {body.version}.",
            param="alias",
        )
    version = body.version if body.version is not None else body.alias
    return await _change(request, CanaryChange("start", adapter, version, body.weight, body.shadow))


@router.post("/{adapter}/promote")
async def promote(request: Request, adapter: str) -> Response:
    """Makes the name resolve to the canary's version. `version` in the body: the expected canary;
    the order is refused if another version is the canary by then."""
    version = None
    if request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers:
        raw = await read_body(request, state_of(request).args.max_body_bytes)
        version = parse_body(_Promote, raw).version
    return await _change(request, CanaryChange("promote", adapter, version))


@router.post("/{adapter}/abort")
async def abort(request: Request, adapter: str) -> Response:
    """Ends canary and shadow."""
    return await _change(request, CanaryChange("abort", adapter))


async def _change(request: Request, change: CanaryChange) -> Response:
    status = await ask_manager(state_of(request).gateway.manager.change_canary, change)
    return json_response({"canary": status})

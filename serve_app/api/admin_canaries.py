"""/admin/canaries: which adapters are split, how their arms do, and the operator's orders. The
manager knows and acts; here is only the HTTP side.
"""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from serve_app.api.admin_auth import require_admin
from serve_app.api.state import state_of
from serve_app.canary.status import CanaryStatus
from serve_app.errors import ApiError
from serve_app.http.asgi import json_response, read_body
from serve_app.openai.json_body import parse_body
from serve_app.ray_calls import ask_manager

router = APIRouter(
    prefix="/admin/canaries", dependencies=[Depends(require_admin)], include_in_schema=False
)


class _Start(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    version: int | None = Field(None, ge=1)
    alias: str | None = Field(None, min_length=1, max_length=64)
    weight: float | None = Field(None, ge=0, le=1)
    shadow: float | None = Field(None, ge=0, le=1)


class _Promote(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    version: int | None = Field(None, ge=1)


@router.get("")
async def canaries(request: Request) -> Response:
    statuses = await ask_manager(state_of(request).gateway.manager.canaries)
    return json_response({"canaries": statuses})


@router.post("/{adapter}")
async def start(request: Request, adapter: str) -> Response:
    """Sends `weight` of the requests to a version, or copies of `shadow` of them, or both."""
    state = state_of(request)
    body = parse_body(_Start, await read_body(request, state.args.max_body_bytes))
    if body.version is not None and body.alias is not None:
        raise ApiError(
            400, f"alias: not beside version, got {body.alias!r} and {body.version}.", param="alias"
        )
    version = body.version if body.version is not None else body.alias
    order = state.gateway.manager.start_canary
    return _one(await ask_manager(order, adapter, version, body.weight, body.shadow))


@router.post("/{adapter}/promote")
async def promote(request: Request, adapter: str) -> Response:
    """The name means the canary's version from now on. `version` in the body: the canary that is
    meant; the order is refused where another version is the canary by then."""
    state = state_of(request)
    version = None
    if request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers:
        raw = await read_body(request, state.args.max_body_bytes)
        version = parse_body(_Promote, raw).version
    order = state.gateway.manager.promote_canary
    return _one(await ask_manager(order, adapter, version))


@router.post("/{adapter}/abort")
async def abort(request: Request, adapter: str) -> Response:
    """No canary and no shadow any more."""
    return _one(await ask_manager(state_of(request).gateway.manager.abort_canary, adapter))


def _one(status: object) -> Response:
    assert isinstance(status, CanaryStatus)
    return json_response({"canary": status})

"""/v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them, for those who have scripts.

Off unless the configuration allows it, and only for the bearer of the admin token: a path on the
server's disk comes from outside. The registry stays the truth: a folder is checked and registered
as by `loraplex register adapter`, under the name that the caller gives.
"""

from __future__ import annotations

import logging
from typing import TypeVar

import msgspec
from fastapi import APIRouter, Depends, Request, Response

from registry.entities import AdapterVersion
from registry.errors import NotFoundError, RegistryError
from serve_app.api.admin_adapters import check_outcomes, find_adapter
from serve_app.api.admin_auth import require_admin
from serve_app.api.engine_calls import change, evict, preload, view_follows
from serve_app.api.state import state_of
from serve_app.dispatch.base_handle import BaseHandle
from serve_app.dispatch.gateway import Gateway
from serve_app.errors import ApiError, ServiceUnavailableError
from serve_app.http.asgi import read_body
from serve_app.messages import AdapterChange

logger = logging.getLogger(__name__)

T = TypeVar("T")


def _require_allowed(request: Request) -> None:
    if not state_of(request).args.allow_runtime_lora_updating:
        raise ApiError(
            404, "Off: the setting ingress.allow_runtime_lora_updating is false.", code="not_found"
        )


router = APIRouter(prefix="/v1", dependencies=[Depends(_require_allowed), Depends(require_admin)])


class LoadBody(msgspec.Struct):
    """Fields of vLLM that mean nothing here are ignored: lora_int_id is one."""

    lora_name: str = ""
    lora_path: str = ""  # empty: what the registry has under the name is brought into memory
    base_model_name: str | None = None
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


class UnloadBody(msgspec.Struct):
    lora_name: str = ""


@router.post("/load_lora_adapter")
async def load_lora_adapter(request: Request) -> Response:
    gateway, body = state_of(request).gateway, await _parse(request, LoadBody)
    name = body.lora_name
    if body.is_3d_lora_weight:
        raise _bad_request("is_3d_lora_weight: only two-dimensional adapters are supported.")
    if not name or not (body.lora_path or _is_known(gateway, name)):
        raise _bad_request("Both 'lora_name' and 'lora_path' must be provided.")
    undo = None
    if body.lora_path:
        base = _base(gateway, body.base_model_name).base
        wanted = AdapterChange(
            "load", name, body.lora_path, f"{base.name}@{base.version}", body.load_inplace
        )
        loaded = await _register(gateway, wanted)
        undo = AdapterChange(
            "undo_load", name, may_replace=body.load_inplace, version=loaded.version
        )
    await _preload(gateway, name, undo)
    return _text(f"Success: LoRA adapter '{name}' added successfully.")


@router.post("/unload_lora_adapter")
async def unload_lora_adapter(request: Request) -> Response:
    """One of the registry's own leaves memory and comes back at its next use; one that came by
    `load_lora_adapter` is unknown from now on. Requests in flight finish."""
    gateway, body = state_of(request).gateway, await _parse(request, UnloadBody)
    name = body.lora_name
    if not name:
        raise _bad_request("'lora_name' needs to be provided to unload a LoRA adapter.")
    if not _is_known(gateway, name):
        raise _unknown(name)
    front, adapter = find_adapter(gateway, name)
    try:
        left = await change(gateway, AdapterChange("unload", adapter.name))
    except NotFoundError:
        raise _unknown(name) from None
    if left is None:  # out of memory it goes by the plan, after its last request
        await view_follows(gateway, adapter.name, None)
    else:
        await evict(front, adapter)  # in use or pinned: it stays
    return _text(f"Success: LoRA adapter '{name}' removed successfully.")


async def _register(gateway: Gateway, wanted: AdapterChange) -> AdapterVersion:
    try:
        adapter = await change(gateway, wanted)
    except NotFoundError as error:
        raise ApiError(404, str(error), param="lora_path", code="not_found") from None
    assert adapter is not None  # a load says what the name means now
    await view_follows(gateway, wanted.name, adapter)
    return adapter


async def _preload(gateway: Gateway, name: str, undo: AdapterChange | None) -> None:
    """`undo`: the order that takes a load back which the engines could not follow."""
    try:
        front, adapter = find_adapter(gateway, name)
        check_outcomes(name, "is not loaded", await preload(front, adapter), 400)
    except Exception:
        if undo is not None:
            await _undo(gateway, undo)
        raise


async def _undo(gateway: Gateway, undo: AdapterChange) -> None:
    """A second failure must not hide the first."""
    try:
        await view_follows(gateway, undo.name, await change(gateway, undo))
    except Exception as error:
        logger.warning("the load of %s was not undone: %s", undo.name, error)


def _base(gateway: Gateway, name: str | None) -> BaseHandle:
    if name is not None:
        return gateway.resolve(name)[0]
    fronts = gateway.handles
    if not fronts:
        raise ServiceUnavailableError("The models are loading.", 2)
    if len(fronts) > 1:
        raise _bad_request("base_model_name: required, more than one base is served.")
    return fronts[0]


def _is_known(gateway: Gateway, name: str) -> bool:
    if gateway.view is None:
        raise ServiceUnavailableError("The server is starting.", 2)
    try:
        return gateway.view.catalog.resolve(name).adapter is not None
    except RegistryError:
        return False


async def _parse(request: Request, kind: type[T]) -> T:
    raw = await read_body(request, state_of(request).args.max_body_bytes)
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _bad_request(f"The body cannot be read: {error}") from None


def _unknown(name: str) -> ApiError:
    return ApiError(404, f"The lora adapter '{name}' cannot be found.", code="not_found")


def _bad_request(words: str) -> ApiError:
    return ApiError(400, words, code="invalid_value")


def _text(words: str) -> Response:
    return Response(words, media_type="text/plain")

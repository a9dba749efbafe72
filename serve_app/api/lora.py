"""/v1/load_lora_adapter and /v1/unload_lora_adapter, as in vLLM, for existing scripts.

Off unless the configuration allows it, and only for bearers of the admin token, because the caller
names a path on the server's disk. The registry stays the source of truth: a folder is checked and
registered as by `loraplex register adapter`, under the caller's name for it.
"""

from __future__ import annotations

import logging
from typing import TypeVar

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, ConfigDict

from engine.errors import InvalidRequestError
from registry.entities import AdapterVersion
from registry.errors import (
    InvalidNameError,
    NameTakenError,
    NotFoundError,
    RegistrationError,
    RegistryError,
)
from registry.names import check_name
from serve_app.api.admin_adapters import (
    call_engines,
    change_adapter,
    check_outcomes,
    find_adapter,
    wait_for_view,
)
from serve_app.api.admin_auth import caller_of, require_admin
from serve_app.api.model_access import check_adapter, check_model
from serve_app.api.state import state_of, view_of
from serve_app.dispatch.base_handle import BaseHandle
from serve_app.dispatch.gateway import Gateway
from serve_app.errors import ApiError, ServiceUnavailableError
from serve_app.http.asgi import read_body
from serve_app.messages import AdapterChange
from serve_app.openai.json_body import parse_body
from serve_app.tenancy.caller import Caller

logger = logging.getLogger(__name__)

Body = TypeVar("Body", bound=BaseModel)


def _require_allowed(request: Request) -> None:
    if not state_of(request).args.allow_runtime_lora_updating:
        raise ApiError(
            404,
            "This endpoint is off: set ingress.allow_runtime_lora_updating to true.",
            code="not_found",
        )


router = APIRouter(prefix="/v1", dependencies=[Depends(_require_allowed), Depends(require_admin)])


class _Body(BaseModel):
    """vLLM's fields that have no meaning here are ignored, such as lora_int_id."""

    model_config = ConfigDict(strict=True)


class LoadBody(_Body):
    lora_name: str = ""
    lora_path: str = ""  # empty: the registered adapter of that name is loaded into memory
    base_model_name: str | None = None
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


class UnloadBody(_Body):
    lora_name: str = ""


@router.post("/load_lora_adapter")
async def load_lora_adapter(request: Request) -> Response:
    gateway, body = state_of(request).gateway, await _parse(request, LoadBody)
    caller, name = caller_of(request), body.lora_name
    if body.is_3d_lora_weight:
        raise InvalidRequestError(
            "is_3d_lora_weight: only two-dimensional adapters are supported, got true.",
            "is_3d_lora_weight",
        )
    if name and not body.lora_path:
        check_model(gateway, caller, name)  # first: a key gets the same answer for all other names
    if not name or not (body.lora_path or _is_known(gateway, name)):
        raise InvalidRequestError(
            "Both 'lora_name' and 'lora_path' must be provided.",
            "lora_path" if name else "lora_name",
        )
    undo = None
    if body.lora_path:
        base = _find_base(gateway, caller, body.base_model_name, name).base
        if _is_known(gateway, name):
            check_model(gateway, caller, name)
        change = AdapterChange(
            "load", name, body.lora_path, f"{base.name}@{base.version}", body.load_inplace
        )
        loaded = await _register(gateway, change)
        undo = AdapterChange(
            "undo_load", name, may_replace=body.load_inplace, version=loaded.version
        )
    await _preload(gateway, name, undo)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


@router.post("/unload_lora_adapter")
async def unload_lora_adapter(request: Request) -> Response:
    """Evicts a registered adapter from memory until its next use, and removes an adapter that
    `load_lora_adapter` registered. Requests in flight finish."""
    gateway, body = state_of(request).gateway, await _parse(request, UnloadBody)
    name = body.lora_name
    if not name:
        raise InvalidRequestError(
            "'lora_name' needs to be provided to unload a LoRA adapter.", "lora_name"
        )
    check_model(gateway, caller_of(request), name)
    if not _is_known(gateway, name):
        raise _unknown(name)
    base, adapter = find_adapter(gateway, name)
    try:
        remaining = await change_adapter(gateway, AdapterChange("unload", adapter.name))
    except NotFoundError:
        raise _unknown(name) from None
    if remaining is None:  # the manager's plan evicts it after its last request
        await wait_for_view(gateway, adapter.name, None)
    else:
        # Fails if the adapter is in use or pinned, which is no error here.
        await call_engines(base, "evict", adapter)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


async def _register(gateway: Gateway, change: AdapterChange) -> AdapterVersion:
    try:
        check_name(change.name)
        adapter = await change_adapter(gateway, change)
    except NotFoundError as error:
        raise ApiError(404, str(error), param="lora_path", code="not_found") from None
    except InvalidNameError as error:
        message = f"lora_name: {error}"
        raise ApiError(400, message, param="lora_name", code="invalid_model_name") from None
    except RegistrationError as error:
        param = "lora_name" if isinstance(error, NameTakenError) else "lora_path"
        raise ApiError(400, str(error), param=param, code="registration_refused") from None
    assert adapter is not None  # the version that was loaded
    await wait_for_view(gateway, change.name, adapter)
    return adapter


async def _preload(gateway: Gateway, name: str, undo: AdapterChange | None) -> None:
    """Loads the adapter on every engine. If one fails, applies `undo`, which reverts the load."""
    try:
        base, adapter = find_adapter(gateway, name)
        check_outcomes(name, "is not loaded", await call_engines(base, "preload", adapter), 400)
    except Exception:
        if undo is not None:
            await _undo(gateway, undo)
        raise


async def _undo(gateway: Gateway, undo: AdapterChange) -> None:
    """Reverts a load. An error is only logged: it must not hide the error of the load."""
    try:
        await wait_for_view(gateway, undo.name, await change_adapter(gateway, undo))
    except Exception as error:
        logger.warning("the load of adapter %s could not be reverted: %s", undo.name, error)


def _find_base(
    gateway: Gateway, caller: Caller | None, name: str | None, adapter: str
) -> BaseHandle:
    """Returns the base of an adapter of this name, if the caller may load an adapter for it."""
    if name is not None:
        catalog = view_of(gateway).catalog
        try:
            base = catalog.resolve(catalog.registered(name)).base.name
        except RegistryError:
            base = name  # a key gets the same answer for it as for a base that it may not use
        check_adapter(caller, base, adapter)
        return gateway.resolve(name)[0]
    bases = gateway.handles
    if not bases:
        raise ServiceUnavailableError("The models are loading.", 2)
    if len(bases) > 1:
        raise InvalidRequestError(
            "base_model_name: is required, because several bases are served.", "base_model_name"
        )
    check_adapter(caller, bases[0].base.name, adapter)
    return bases[0]


def _is_known(gateway: Gateway, name: str) -> bool:
    try:
        return view_of(gateway).catalog.resolve(name).adapter is not None
    except RegistryError:
        return False


async def _parse(request: Request, kind: type[Body]) -> Body:
    return parse_body(kind, await read_body(request, state_of(request).args.max_body_bytes))


def _unknown(name: str) -> ApiError:
    return ApiError(
        404, f"The lora adapter '{name}' cannot be found.", param="lora_name", code="not_found"
    )

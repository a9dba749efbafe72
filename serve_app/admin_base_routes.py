"""/admin/bases: what is served and how it stands; bases that come and go while the server runs."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from pydantic import ValidationError
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException

from engine.errors import InvalidRequestError
from registry.names import check_name
from serve_app.admin_auth import require_admin
from serve_app.asgi import read_body
from serve_app.base_admin import BaseChange
from serve_app.config import ModelArgs, in_words
from serve_app.errors import ServiceUnavailableError
from serve_app.ray_errors import root_cause
from serve_app.state import state_of

router = APIRouter(prefix="/admin/bases", dependencies=[Depends(require_admin)])


@router.get("")
async def list_bases(request: Request) -> Response:
    gateway = state_of(request).gateway
    try:
        lines = await gateway.manager.bases.remote()
    except (RayError, RayServeException) as error:
        raise ServiceUnavailableError("The manager does not answer.", 2) from error
    return _json({"bases": lines})


@router.post("")
async def add_base(request: Request) -> Response:
    """Body: a model as the file has it. It is kept in the registry."""
    raw = await read_body(request, state_of(request).args.max_body_bytes)
    try:
        model = ModelArgs.model_validate_json(raw)
    except ValidationError as error:
        raise InvalidRequestError(in_words(error), _field(error)) from None
    check_name(model.name)
    setting = model.model_dump_json(exclude={"name"}, exclude_unset=True)
    await _change(request, BaseChange("add", model.name, setting))
    return _json({"name": model.name, "serve": msgspec.Raw(setting.encode())}, 202)


@router.delete("/{name}")
async def remove_base(request: Request, name: str) -> Response:
    """Requests in flight finish; new ones are told that it is not served."""
    await _change(request, BaseChange("remove", name))
    return _json({"name": name}, 202)


@router.post("/{name}/sleep")
async def sleep_base(request: Request, name: str) -> Response:
    await _change(request, BaseChange("sleep", name))
    return _json({"name": name}, 202)


@router.post("/{name}/wake")
async def wake_base(request: Request, name: str) -> Response:
    await _change(request, BaseChange("wake", name))
    return _json({"name": name}, 202)


async def _change(request: Request, change: BaseChange) -> None:
    try:
        await state_of(request).gateway.manager.change_base.remote(change)
    except RayTaskError as error:
        raise root_cause(error) from None
    except (RayError, RayServeException) as error:
        raise ServiceUnavailableError("The manager does not answer.", 2) from error


def _field(error: ValidationError) -> str:
    return ".".join(str(part) for part in error.errors()[0]["loc"])


def _json(value: dict[str, object], status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")

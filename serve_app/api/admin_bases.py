"""/admin/bases: what is served and how it stands; bases that come and go while the server runs."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from pydantic import ValidationError

from engine.errors import InvalidRequestError
from registry.names import check_name
from serve_app.api.admin_auth import require_admin
from serve_app.api.state import state_of
from serve_app.config import ModelArgs, in_words
from serve_app.control.base_plan import check_added
from serve_app.http.asgi import json_response, read_body
from serve_app.messages import BaseChange
from serve_app.ray_calls import ask_manager

router = APIRouter(
    prefix="/admin/bases", dependencies=[Depends(require_admin)], include_in_schema=False
)


@router.get("")
async def list_bases(request: Request) -> Response:
    lines = await ask_manager(state_of(request).gateway.manager.bases)
    return json_response({"bases": lines})


@router.post("")
async def add_base(request: Request) -> Response:
    """Body: a model as the file has it. It is kept in the registry."""
    raw = await read_body(request, state_of(request).args.max_body_bytes)
    try:
        model = ModelArgs.model_validate_json(raw)
    except ValidationError as error:
        raise InvalidRequestError(in_words(error), _field(error)) from None
    check_name(model.name)
    try:
        check_added(model)
    except ValueError as error:
        raise InvalidRequestError(str(error), str(error).partition(":")[0]) from None
    setting = model.model_dump_json(exclude={"name"}, exclude_unset=True)
    await _change(request, BaseChange("add", model.name, setting))
    return json_response({"name": model.name, "serve": msgspec.Raw(setting.encode())}, 202)


@router.delete("/{name}")
async def remove_base(request: Request, name: str) -> Response:
    """Requests in flight finish; new ones are told that it is not served."""
    await _change(request, BaseChange("remove", name))
    return json_response({"name": name}, 202)


@router.post("/{name}/sleep")
async def sleep_base(request: Request, name: str) -> Response:
    await _change(request, BaseChange("sleep", name))
    return json_response({"name": name}, 202)


@router.post("/{name}/wake")
async def wake_base(request: Request, name: str) -> Response:
    await _change(request, BaseChange("wake", name))
    return json_response({"name": name}, 202)


async def _change(request: Request, change: BaseChange) -> None:
    await ask_manager(state_of(request).gateway.manager.change_base, change)


def _field(error: ValidationError) -> str:
    return ".".join(str(part) for part in error.errors()[0]["loc"])

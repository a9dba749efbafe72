"""/admin/bases: the state of every base; adds, removes, wakes and puts to sleep bases."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import ValidationError

from engine.errors import InvalidRequestError
from registry.names import check_name
from serve_app.api.admin_auth import ADMIN_DEPENDENCIES
from serve_app.api.state import state_of
from serve_app.config import ModelArgs, in_words
from serve_app.control.base_plan import check_added
from serve_app.http.asgi import json_response, read_body
from serve_app.messages import BaseChange
from serve_app.openai.json_body import json_error
from serve_app.ray_calls import ask_manager

router = APIRouter(
    prefix="/admin/bases",
    dependencies=ADMIN_DEPENDENCIES,
    include_in_schema=False,
)


@router.get("")
async def list_bases(request: Request) -> Response:
    lines = await ask_manager(state_of(request).gateway.manager.bases)
    return json_response({"bases": lines})


@router.post("")
async def add_base(request: Request) -> Response:
    """Adds a base and keeps it in the registry. The body is a model as in the configuration."""
    raw = await read_body(request, state_of(request).args.max_body_bytes)
    try:
        model = ModelArgs.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            raise json_error(first["ctx"]["error"]) from None
        field = ".".join(str(part) for part in first["loc"])
        raise InvalidRequestError(in_words(error, schema=ModelArgs), field) from None
    check_name(model.name)
    try:
        check_added(model)
    except ValueError as error:
        raise InvalidRequestError(str(error), str(error).partition(":")[0]) from None
    setting = model.model_dump_json(exclude={"name"}, exclude_unset=True)
    await _change_base(request, BaseChange("add", model.name, setting))
    return json_response({"name": model.name, "serve": msgspec.Raw(setting.encode())}, 202)


@router.delete("/{name}")
async def remove_base(request: Request, name: str) -> Response:
    """Removes a base. Requests in flight finish; new requests get an error, unless another base
    serves the same files: then the answer names it."""
    change = BaseChange("remove", name)
    other = await ask_manager(state_of(request).gateway.manager.change_base, change)
    return json_response({"name": name, "still_served_as": other}, 202)


@router.post("/{name}/sleep")
async def sleep_base(request: Request, name: str) -> Response:
    return await _change_base(request, BaseChange("sleep", name))


@router.post("/{name}/wake")
async def wake_base(request: Request, name: str) -> Response:
    return await _change_base(request, BaseChange("wake", name))


async def _change_base(request: Request, change: BaseChange) -> Response:
    await ask_manager(state_of(request).gateway.manager.change_base, change)
    return json_response({"name": change.name}, 202)

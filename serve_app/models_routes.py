"""/v1/models: the bases served here and every adapter of theirs, as OpenAI lists models."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from registry.catalog import Catalog, Resolution
from registry.errors import NotFoundError, RegistryError
from serve_app.asgi import json_response
from serve_app.errors import ServiceUnavailableError
from serve_app.gateway import Gateway
from serve_app.state import state_of
from serve_app.topology import PlatformView

router = APIRouter()
Entry = dict[str, str | int | None]


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    gateway = state_of(request).gateway
    view = _view(gateway)
    resolutions = ((e.name, _resolve(view.catalog, e.name)) for e in view.catalog.entries())
    data = [
        _entry(gateway, name, resolution)
        for name, resolution in resolutions
        if resolution is not None and _is_served(view, resolution)
    ]
    return json_response({"object": "list", "data": data})


@router.get("/v1/models/{model:path}")
async def get_model(request: Request, model: str) -> Response:
    gateway = state_of(request).gateway
    view = _view(gateway)
    resolution = view.catalog.resolve(model)
    if not _is_served(view, resolution):
        raise NotFoundError(f"the base model of {model!r} is registered but not served here")
    return json_response(_entry(gateway, model, resolution))


def _view(gateway: Gateway) -> PlatformView:
    if gateway.view is None:
        raise ServiceUnavailableError("The server is starting.", 2)
    return gateway.view


def _resolve(catalog: Catalog, name: str) -> Resolution | None:
    """None for an adapter whose version of the base is gone."""
    try:
        return catalog.resolve(name)
    except RegistryError:
        return None


def _is_served(view: PlatformView, resolution: Resolution) -> bool:
    return any(base.base.digest == resolution.base.digest for base in view.bases)


def _entry(gateway: Gateway, model: str, resolution: Resolution) -> Entry:
    base, adapter = resolution.base, resolution.adapter
    version = base if adapter is None else adapter
    return {
        "id": model,
        "object": "model",
        "created": version.created_s,
        "owned_by": "loraplex",
        "root": f"{version.name}@{version.version}",
        "parent": None if adapter is None else base.name,
        "max_model_len": gateway.max_model_len(base.digest),
    }

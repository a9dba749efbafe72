"""/v1/models: the bases served here and their adapters, as OpenAI lists models."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from registry.errors import NotFoundError
from serve_app.api.admin_auth import caller_of
from serve_app.api.model_access import check_model
from serve_app.api.model_list import entry_of
from serve_app.api.state import state_of, view_of
from serve_app.http.asgi import json_response

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    state = state_of(request)
    caller = caller_of(request)
    globs = None if caller is None else caller.policy.models
    body = await state.model_list.encoded(state.gateway, view_of(state.gateway), globs)
    return Response(body, media_type="application/json")


@router.get("/v1/models/{model:path}")
async def get_model(request: Request, model: str) -> Response:
    """Describes a name that requests may use, also one of several adapters with weights."""
    gateway = state_of(request).gateway
    check_model(gateway, caller_of(request), model)
    _, resolution = gateway.find(model)
    digest = resolution.base.digest
    if gateway.served(digest) is None:
        raise NotFoundError(f"the base model of {model!r} is registered but not served here")
    return json_response(entry_of(model, resolution, gateway.max_model_len(digest)))

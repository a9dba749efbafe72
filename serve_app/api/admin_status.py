"""/admin/drain and /admin/status: the state of the whole server, for operators with the token."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request, Response

from serve_app.api.admin_auth import require_admin
from serve_app.api.state import state_of
from serve_app.http.asgi import json_response
from serve_app.ray_calls import ask_manager

router = APIRouter(prefix="/admin", dependencies=[Depends(require_admin)], include_in_schema=False)


@router.post("/drain")
async def drain(request: Request) -> Response:
    """Makes the server refuse new requests, and /ready, with 503 from now on. Returns the number of
    open requests; `null` until every ingress refuses new ones. Repeat to follow the number."""
    num_open = await ask_manager(state_of(request).gateway.manager.drain)
    return json_response({"open_requests": num_open})


@router.get("/status")
async def status(request: Request) -> Response:
    """Returns this ingress's view of the platform: revision, bases, the error of the registry."""
    view = state_of(request).gateway.view
    if view is None:
        return json_response({"revision": None, "bases": [], "registry_error": None})
    bases = [
        {
            "name": base.base.name,
            "version": base.base.version,
            "digest": base.base.digest,
            "application": base.app_name,
            "is_running": base.is_running,
            "message": base.message,
        }
        for base in view.bases
    ]
    return json_response(
        {
            "revision": view.revision,
            "registry_error": view.registry_error,
            "missing": view.missing,
            "bases": bases,
        }
    )

"""/admin: for whoever operates the server, with the admin token. What lasts is kept in the
registry, so that it survives every process; the rest is asked of the manager and of the engines.
"""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Depends, Request, Response

from serve_app.api.admin_auth import require_admin
from serve_app.api.state import state_of
from serve_app.ray_calls import ask_manager

router = APIRouter(prefix="/admin", dependencies=[Depends(require_admin)], include_in_schema=False)


@router.post("/drain")
async def drain(request: Request) -> Response:
    """The server takes no new requests from now on: they get 503, and so does /ready. Ask again to
    see how many are still open; `null`: not every ingress refuses new ones yet."""
    num_open = await ask_manager(state_of(request).gateway.manager.drain)
    return Response(msgspec.json.encode({"open_requests": num_open}), media_type="application/json")


@router.get("/status")
async def status(request: Request) -> Response:
    """What this ingress knows: the view's revision, each base, the registry's state."""
    view = state_of(request).gateway.view
    body: dict[str, object] = {"revision": None, "bases": [], "registry_error": None}
    if view is not None:
        body = {
            "revision": view.revision,
            "registry_error": view.registry_error,
            "missing": view.missing,
            "bases": [
                {
                    "name": base.base.name,
                    "version": base.base.version,
                    "digest": base.base.digest,
                    "application": base.app_name,
                    "is_running": base.is_running,
                    "message": base.message,
                }
                for base in view.bases
            ],
        }
    return Response(msgspec.json.encode(body), media_type="application/json")

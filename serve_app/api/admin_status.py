"""/admin/status, /admin/drain, /admin/series and /admin/registry: the state of the whole server.

No route here calls an engine or MLflow: the manager keeps the series from reports that come anyway,
and the registry is the catalog that this ingress serves by.
"""

from __future__ import annotations

from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response

from registry.entities import AdapterVersion, BaseVersion
from serve_app.admin_api import RefusedVersion, RegisteredAdapter, RegisteredBase, RegistryAnswer
from serve_app.api.admin_auth import ADMIN_DEPENDENCIES
from serve_app.api.state import state_of, view_of
from serve_app.http.asgi import json_response
from serve_app.ray_calls import ask_manager

router = APIRouter(
    prefix="/admin",
    dependencies=ADMIN_DEPENDENCIES,
    include_in_schema=False,
)

Line = TypeVar("Line", RegisteredBase, RegisteredAdapter)


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


@router.get("/series")
async def series(request: Request) -> Response:
    """Returns rates and loads of each base, by intervals of the last quarter of an hour."""
    return json_response(await ask_manager(state_of(request).gateway.manager.series))


@router.get("/registry")
async def registry(request: Request) -> Response:
    """Returns all versions with their aliases, settings and the results of their checks."""
    view = view_of(state_of(request).gateway)
    catalog = view.catalog
    defaults = {(entry.name, entry.version) for entry in catalog.entries()}
    settings: dict[str, dict[str, str]] = {}
    for one in catalog.settings:
        settings.setdefault(one.name, {})[one.key] = one.value
    adapters = [
        _line(
            RegisteredAdapter,
            adapter,
            defaults,
            base=adapter.base_name,
            effect_figures=dict(adapter.effect_figures),
            settings=settings.get(adapter.name, {}),
        )
        for adapter in catalog.adapters
    ]
    return json_response(
        RegistryAnswer(
            view.revision,
            view.registry_error,
            [_line(RegisteredBase, base, defaults) for base in catalog.bases],
            adapters,
            [RefusedVersion(one.name, one.version, one.reason) for one in catalog.rejected],
            [str(one) for one in catalog.dangling],
        )
    )


def _line(
    kind: type[Line],
    version: BaseVersion | AdapterVersion,
    defaults: set[tuple[str, int]],
    **own: Any,
) -> Line:
    """Returns a version as the answer shows it: `own` fields, and the version's of the same names.
    `defaults`: the versions that bare names mean."""
    own["is_default"] = (version.name, version.version) in defaults
    own["tags"] = dict(version.tags)
    same = {name: getattr(version, name) for name in kind.__struct_fields__ if name not in own}
    return kind(**own, **same)

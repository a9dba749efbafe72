"""/admin/series and /admin/registry: the data of the console's charts and of its registry page.

Neither route calls an engine or MLflow: the manager keeps the series from reports that come anyway,
and the registry is the catalog that this ingress serves by.
"""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request, Response

from registry.catalog import Catalog
from registry.entities import AdapterVersion, BaseVersion
from serve_app.admin_api import (
    RefusedVersion,
    RegisteredAdapter,
    RegisteredBase,
    RegistryAnswer,
)
from serve_app.api.admin_auth import require_admin
from serve_app.api.state import state_of, view_of
from serve_app.http.asgi import json_response
from serve_app.ray_calls import ask_manager

router = APIRouter(prefix="/admin", dependencies=[Depends(require_admin)], include_in_schema=False)


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
    return json_response(
        RegistryAnswer(
            view.revision,
            view.registry_error,
            [_base(base, defaults) for base in catalog.bases],
            [_adapter(one, defaults, settings.get(one.name, {})) for one in catalog.adapters],
            _rejected(catalog),
            [str(one) for one in catalog.dangling],
        )
    )


def _base(base: BaseVersion, defaults: set[tuple[str, int]]) -> RegisteredBase:
    return RegisteredBase(
        base.name,
        base.version,
        base.digest,
        base.aliases,
        (base.name, base.version) in defaults,
        base.architecture,
        base.num_parameters,
        base.max_model_len,
        base.created_s,
        dict(base.tags),
    )


def _adapter(
    adapter: AdapterVersion, defaults: set[tuple[str, int]], settings: dict[str, str]
) -> RegisteredAdapter:
    return RegisteredAdapter(
        adapter.name,
        adapter.version,
        adapter.digest,
        adapter.base_name,
        adapter.aliases,
        (adapter.name, adapter.version) in defaults,
        adapter.rank,
        adapter.targets,
        adapter.num_parameters,
        adapter.is_noop,
        adapter.effect,
        dict(adapter.effect_figures),
        adapter.refused,
        adapter.text,
        settings,
        adapter.created_s,
        dict(adapter.tags),
    )


def _rejected(catalog: Catalog) -> list[RefusedVersion]:
    return [RefusedVersion(one.name, one.version, one.reason) for one in catalog.rejected]

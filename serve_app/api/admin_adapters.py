"""/admin/adapters: where each version of each adapter is, and what an operator may do about it.

A pin is a wish kept in the registry, of a name: it follows what the name means. Preload and evict
are of the moment, of one version (`name`, `name@alias`, `name@version`), on all engines of its
base.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from fastapi import APIRouter, Depends, Request, Response

from registry.entities import AdapterVersion
from registry.errors import InvalidNameError, NotFoundError
from registry.names import parse_reference
from serve_app.api.admin_auth import require_admin
from serve_app.api.engine_calls import change, evict, list_replicas, preload
from serve_app.api.state import state_of
from serve_app.dispatch.base_handle import BaseHandle
from serve_app.dispatch.gateway import Gateway
from serve_app.errors import SERVER_ERROR, ApiError, ServiceUnavailableError
from serve_app.http.asgi import json_response
from serve_app.messages import PIN, AdapterChange, EngineOutcome, ReplicaAdapters
from serve_app.platform_view import PlatformView

router = APIRouter(
    prefix="/admin/adapters", dependencies=[Depends(require_admin)], include_in_schema=False
)


@router.get("")
async def list_adapters(request: Request) -> Response:
    gateway = state_of(request).gateway
    view, fronts = _view(gateway), gateway.handles
    answers = await asyncio.gather(*(list_replicas(front) for front in fronts))
    replicas = {front.base.digest: found for front, found in zip(fronts, answers, strict=True)}
    defaults = {
        (entry.name, entry.version) for entry in view.catalog.entries() if entry.parent is not None
    }
    lines = [
        {
            "name": one.name,
            "version": one.version,
            "digest": one.digest,
            "base": one.base_name,
            "aliases": one.aliases,
            "is_default": (one.name, one.version) in defaults,
            "pin": view.catalog.setting(one.name, PIN) == "true",
            "engines": [_place(one, replica) for replica in replicas[one.base_digest]],
        }
        for one in view.catalog.adapters
        if one.base_digest in replicas
    ]
    return json_response({"adapters": lines})


@router.post("/{name}/pin")
async def pin_adapter(request: Request, name: str) -> Response:
    return await _set_pin(request, AdapterChange("pin", _plain(name)))


@router.post("/{name}/unpin")
async def unpin_adapter(request: Request, name: str) -> Response:
    return await _set_pin(request, AdapterChange("unpin", _plain(name)))


@router.post("/{name}/preload")
async def preload_adapter(request: Request, name: str) -> Response:
    front, adapter = find_adapter(state_of(request).gateway, name)
    outcomes = await preload(front, adapter)
    check_outcomes(name, "is not loaded", outcomes, 503)
    return _done(adapter, outcomes)


@router.post("/{name}/evict")
async def evict_adapter(request: Request, name: str) -> Response:
    front, adapter = find_adapter(state_of(request).gateway, name)
    outcomes = await evict(front, adapter)
    check_outcomes(name, "stays in memory", outcomes, 409)
    return _done(adapter, outcomes)


def find_adapter(gateway: Gateway, name: str) -> tuple[BaseHandle, AdapterVersion]:
    front, resolution = gateway.resolve(name)
    if resolution.adapter is None:
        raise InvalidNameError(f"{name!r} is a base model, not an adapter")
    return front, resolution.adapter


def check_outcomes(name: str, verdict: str, outcomes: Sequence[EngineOutcome], status: int) -> None:
    """Raises with the words of every engine that failed."""
    failed = [one for one in outcomes if not one.is_done]
    if failed:
        words = "; ".join(f"engine {one.engine or '?'}: {one.words}" for one in failed)
        count = f"{len(failed)} of {len(outcomes)} engines"
        kind = SERVER_ERROR if status >= 500 else "invalid_request_error"
        raise ApiError(
            status, f"The adapter {name!r} {verdict} on {count}: {words}", kind, "name", "refused"
        )


async def _set_pin(request: Request, wanted: AdapterChange) -> Response:
    adapter = await change(state_of(request).gateway, wanted)
    if adapter is None:
        raise NotFoundError(f"no adapter is named {wanted.name!r}")
    is_pinned = wanted.kind == "pin"
    return json_response({"name": adapter.name, "version": adapter.version, "pin": is_pinned})


def _plain(name: str) -> str:
    reference = parse_reference(name)
    if str(reference) != reference.name:
        raise InvalidNameError(
            f"{name!r}: a pin is of the name {reference.name!r} and follows what it means"
        )
    return reference.name


def _place(adapter: AdapterVersion, replica: ReplicaAdapters) -> dict[str, object]:
    place: dict[str, object] = {"engine": replica.engine}
    for one in replica.residents:
        if one.digest == adapter.digest:
            return place | {
                "tier": "device" if one.is_on_device else "host",
                "bytes": one.num_bytes,
                "pinned": one.is_pinned,
                "references": one.num_references,
                "is_leaving": one.is_leaving,
                "used_s": one.used_s,
            }
    tier = "disk" if adapter.digest in replica.local_digests else "registry"
    place |= {"tier": tier, "bytes": 0, "pinned": False, "references": 0}
    if (why := replica.pin_failures.get(adapter.digest)) is not None:
        place["why_not_pinned"] = why
    return place


def _view(gateway: Gateway) -> PlatformView:
    if gateway.view is None:
        raise ServiceUnavailableError("The server is starting.", 2)
    return gateway.view


def _done(adapter: AdapterVersion, outcomes: Sequence[EngineOutcome]) -> Response:
    engines = [{"engine": one.engine, "outcome": one.words} for one in outcomes]
    return json_response({"name": adapter.name, "version": adapter.version, "engines": engines})

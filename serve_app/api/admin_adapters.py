"""/admin/adapters: the location of each adapter version; pins, preloads and evictions. Their calls
to the engine replicas of a base, and to the manager, are also those of vLLM's routes.

A pin belongs to a name, is kept in the registry, and follows the version that the name resolves to.
Preload and evict act once, on one version (`name`, `name@alias`, `name@version`), on all engines of
its base.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal

from fastapi import APIRouter, Request, Response
from msgspec import UNSET

from registry.entities import AdapterVersion
from registry.errors import InvalidNameError, NotFoundError, RegistryError
from registry.names import parse_reference
from serve_app.admin_api import (
    AdapterLine,
    AdapterLines,
    AdapterResidency,
    EngineResult,
    EngineResults,
)
from serve_app.api.admin_auth import ADMIN_DEPENDENCIES
from serve_app.api.state import state_of, view_of
from serve_app.dispatch.base_handle import BaseHandle
from serve_app.dispatch.gateway import Gateway
from serve_app.errors import INVALID_REQUEST, SERVER_ERROR, ApiError, ServiceUnavailableError
from serve_app.http.asgi import json_response
from serve_app.messages import PIN, AdapterChange, EngineOutcome, ReplicaAdapters
from serve_app.ray_calls import RAY_ERRORS, ask_manager, results_of, root_cause

router = APIRouter(
    prefix="/admin/adapters",
    dependencies=ADMIN_DEPENDENCIES,
    include_in_schema=False,
)

_CALL_TIMEOUT_S = 110.0  # a preload may have to download first
_LIST_TIMEOUT_S = 5.0
_VIEW_TIMEOUT_S = 15.0


@router.get("")
async def list_adapters(request: Request) -> Response:
    gateway = state_of(request).gateway
    view, bases = view_of(gateway), gateway.handles
    found = await asyncio.gather(*(list_replicas(base) for base in bases))
    replicas = dict(zip((base.base.digest for base in bases), found, strict=True))
    defaults = {
        (entry.name, entry.version) for entry in view.catalog.entries() if entry.parent is not None
    }
    lines = [
        AdapterLine(
            adapter.name,
            adapter.version,
            adapter.digest,
            adapter.base_name,
            adapter.aliases,
            is_default=(adapter.name, adapter.version) in defaults,
            pin=view.catalog.setting(adapter.name, PIN) == "true",
            engines=tuple(_residency(adapter, each) for each in replicas[adapter.base_digest]),
        )
        for adapter in view.catalog.adapters
        if adapter.base_digest in replicas
    ]
    return json_response(AdapterLines(lines))


@router.post("/{name}/pin")
async def pin_adapter(request: Request, name: str) -> Response:
    return await _set_pin(request, name, "pin")


@router.post("/{name}/unpin")
async def unpin_adapter(request: Request, name: str) -> Response:
    return await _set_pin(request, name, "unpin")


@router.post("/{name}/preload")
async def preload_adapter(request: Request, name: str) -> Response:
    return await _order(request, name, "preload", "is not loaded", 503)


@router.post("/{name}/evict")
async def evict_adapter(request: Request, name: str) -> Response:
    return await _order(request, name, "evict", "stays in memory", 409)


def find_adapter(gateway: Gateway, name: str) -> tuple[BaseHandle, AdapterVersion]:
    base, resolution = gateway.resolve(name)
    if resolution.adapter is None:
        raise InvalidNameError(f"{name!r} is a base model, not an adapter")
    if len(resolution.adapters) > 1 or resolution.adapters[0].weight != 1:
        raise InvalidNameError(f"{name!r} names adapters of one request, not one adapter")
    return base, resolution.adapter


def check_outcomes(name: str, failure: str, outcomes: Sequence[EngineOutcome], status: int) -> None:
    """Raises ApiError with the message of every engine that failed."""
    failed = [outcome for outcome in outcomes if not outcome.is_done]
    if failed:
        reasons = "; ".join(f"engine {each.engine or '?'}: {each.words}" for each in failed)
        count = f"{len(failed)} of {len(outcomes)} engines"
        kind = SERVER_ERROR if status >= 500 else INVALID_REQUEST
        raise ApiError(
            status, f"The adapter {name!r} {failure} on {count}: {reasons}", kind, "name", "refused"
        )


async def call_engines(
    base: BaseHandle, method: Literal["preload", "evict"], adapter: AdapterVersion
) -> list[EngineOutcome]:
    """Loads or evicts the adapter on every replica of the base; returns one outcome per replica."""
    try:
        results = await results_of(base.handle.broadcast(method, adapter), _CALL_TIMEOUT_S)
    except (*RAY_ERRORS, TimeoutError) as error:
        raise ServiceUnavailableError(
            f"The engines of {base.base.name!r} do not respond.", 5
        ) from error
    if not results:
        raise ServiceUnavailableError(f"No engine of {base.base.name!r} is running.", 5)
    return [
        result
        if isinstance(result, EngineOutcome)
        else EngineOutcome("", False, _failure_text(result))
        for result in results
    ]


async def list_replicas(base: BaseHandle) -> list[ReplicaAdapters]:
    """Returns the adapters of each replica that responds in time."""
    try:
        results = await results_of(base.handle.broadcast("adapters"), _LIST_TIMEOUT_S)
    except (*RAY_ERRORS, TimeoutError):
        return []
    return [result for result in results if isinstance(result, ReplicaAdapters)]


async def change_adapter(gateway: Gateway, change: AdapterChange) -> AdapterVersion | None:
    """Makes the manager apply a change to the registry, whose own errors are raised as they are.
    Returns the version that the name resolves to afterwards, if any."""
    adapter = await ask_manager(gateway.manager.change_adapter, change)
    assert adapter is None or isinstance(adapter, AdapterVersion)
    return adapter


async def wait_for_view(gateway: Gateway, name: str, adapter: AdapterVersion | None) -> None:
    """Waits until `name` resolves to `adapter` in this ingress's view, at most _VIEW_TIMEOUT_S."""
    digest = None if adapter is None else adapter.digest
    with suppress(TimeoutError):
        async with asyncio.timeout(_VIEW_TIMEOUT_S):
            while _resolved_digest(gateway, name) != digest:
                await gateway.change(_VIEW_TIMEOUT_S)


async def _order(
    request: Request, name: str, method: Literal["preload", "evict"], failure: str, status: int
) -> Response:
    base, adapter = find_adapter(state_of(request).gateway, name)
    outcomes = await call_engines(base, method, adapter)
    check_outcomes(name, failure, outcomes, status)
    engines = [EngineResult(outcome.engine, outcome.words) for outcome in outcomes]
    return json_response(EngineResults(adapter.name, adapter.version, engines))


async def _set_pin(request: Request, name: str, kind: Literal["pin", "unpin"]) -> Response:
    reference = parse_reference(name)
    if str(reference) != reference.name:
        raise InvalidNameError(
            f"{name!r}: pin the name {reference.name!r}; the pin follows the version of that name"
        )
    change = AdapterChange(kind, reference.name)
    adapter = await change_adapter(state_of(request).gateway, change)
    if adapter is None:
        raise NotFoundError(f"no adapter is named {change.name!r}")
    is_pinned = kind == "pin"
    return json_response({"name": adapter.name, "version": adapter.version, "pin": is_pinned})


def _residency(adapter: AdapterVersion, replica: ReplicaAdapters) -> AdapterResidency:
    for resident in replica.residents:
        if resident.digest == adapter.digest:
            return AdapterResidency(
                replica.engine,
                "device" if resident.is_on_device else "host",
                resident.num_bytes,
                resident.is_pinned,
                resident.num_references,
                is_leaving=resident.is_leaving,
                used_s=resident.used_s,
            )
    return AdapterResidency(
        replica.engine,
        "disk" if adapter.digest in replica.local_digests else "registry",
        why_not_pinned=replica.pin_failures.get(adapter.digest, UNSET),
    )


def _resolved_digest(gateway: Gateway, name: str) -> str | None:
    if gateway.view is None:
        return None
    try:
        adapter = gateway.view.catalog.resolve(name).adapter
    except RegistryError:
        return None
    return None if adapter is None else adapter.digest


def _failure_text(result: object) -> str:
    if isinstance(result, BaseException) and not isinstance(result, TimeoutError):
        return str(root_cause(result)) or type(result).__name__
    return "it did not respond in time"

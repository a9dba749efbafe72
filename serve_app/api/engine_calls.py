"""Calls about adapters from an ingress to all engine replicas of a base, and to the manager."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Literal

from registry.entities import AdapterVersion
from registry.errors import RegistryError
from serve_app.dispatch.base_handle import BaseHandle
from serve_app.dispatch.gateway import Gateway
from serve_app.errors import ServiceUnavailableError
from serve_app.messages import AdapterChange, EngineOutcome, ReplicaAdapters
from serve_app.ray_calls import RAY_ERRORS, ask_manager, root_cause

_CALL_TIMEOUT_S = 110.0  # a preload may have to download first
_LIST_TIMEOUT_S = 5.0
_VIEW_TIMEOUT_S = 15.0


async def call_engines(
    base: BaseHandle, method: Literal["preload", "evict"], adapter: AdapterVersion
) -> list[EngineOutcome]:
    """Loads or evicts the adapter on every replica of the base; returns one outcome per replica."""
    try:
        results = await base.handle.broadcast(method, adapter).results_async(
            timeout_s=_CALL_TIMEOUT_S, return_exceptions=True
        )
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
        results = await base.handle.broadcast("adapters").results_async(
            timeout_s=_LIST_TIMEOUT_S, return_exceptions=True
        )
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


def _resolved_digest(gateway: Gateway, name: str) -> str | None:
    if gateway.view is None:
        return None
    try:
        adapter = gateway.view.catalog.resolve(name).adapter
    except RegistryError:
        return None
    return None if adapter is None else adapter.digest


def _failure_text(result: object) -> str:
    if isinstance(result, BaseException):
        return str(root_cause(result)) or type(result).__name__
    return "it did not respond in time"

"""Orders about adapters from an ingress to all engine replicas of a base, and to the manager."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from registry.entities import AdapterVersion
from registry.errors import RegistryError
from serve_app.dispatch.base_handle import BaseHandle
from serve_app.dispatch.gateway import Gateway
from serve_app.errors import ServiceUnavailableError
from serve_app.messages import AdapterChange, EngineOutcome, ReplicaAdapters
from serve_app.ray_calls import ask_manager, root_cause

_ORDER_TIMEOUT_S = 110.0  # a preload may fetch first
_LIST_TIMEOUT_S = 5.0
_VIEW_TIMEOUT_S = 15.0


async def preload(front: BaseHandle, adapter: AdapterVersion) -> list[EngineOutcome]:
    """One for each replica of the base."""
    return await _order(front, "preload", adapter)


async def evict(front: BaseHandle, adapter: AdapterVersion) -> list[EngineOutcome]:
    return await _order(front, "evict", adapter)


async def list_replicas(front: BaseHandle) -> list[ReplicaAdapters]:
    """Of those that answer in time."""
    try:
        results = await front.handle.broadcast("adapters").results_async(
            timeout_s=_LIST_TIMEOUT_S, return_exceptions=True
        )
    except (RayError, RayServeException, TimeoutError):
        return []
    return [result for result in results if isinstance(result, ReplicaAdapters)]


async def change(gateway: Gateway, wanted: AdapterChange) -> AdapterVersion | None:
    """By the manager, in the registry. The registry's own errors come out as they are."""
    found = await ask_manager(gateway.manager.change_adapter, wanted)
    assert found is None or isinstance(found, AdapterVersion)
    return found


async def view_follows(gateway: Gateway, name: str, adapter: AdapterVersion | None) -> None:
    """Returns when this ingress sees what the name means since a change, or when it takes long."""
    digest = None if adapter is None else adapter.digest
    with suppress(TimeoutError):
        async with asyncio.timeout(_VIEW_TIMEOUT_S):
            while _meaning(gateway, name) != digest:
                await gateway.change(_VIEW_TIMEOUT_S)


def _meaning(gateway: Gateway, name: str) -> str | None:
    if gateway.view is None:
        return None
    try:
        adapter = gateway.view.catalog.resolve(name).adapter
    except RegistryError:
        return None
    return None if adapter is None else adapter.digest


async def _order(front: BaseHandle, method: str, adapter: AdapterVersion) -> list[EngineOutcome]:
    try:
        results = await front.handle.broadcast(method, adapter).results_async(
            timeout_s=_ORDER_TIMEOUT_S, return_exceptions=True
        )
    except (RayError, RayServeException, TimeoutError) as error:
        raise ServiceUnavailableError(
            f"The engines of {front.base.name!r} do not answer.", 5
        ) from error
    if not results:
        raise ServiceUnavailableError(f"No engine of {front.base.name!r} is up.", 5)
    return [
        result if isinstance(result, EngineOutcome) else EngineOutcome("", False, _words(result))
        for result in results
    ]


def _words(result: object) -> str:
    if isinstance(result, BaseException):
        return str(root_cause(result)) or type(result).__name__
    return "it did not answer in time"

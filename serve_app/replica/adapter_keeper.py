"""Makes a plan true in one engine replica: pinned adapters come into memory and stay, retired ones
leave with their last request.

All in the background: who sends a plan waits for nothing, and a failure is told, not raised. What
the engine holds is asked of the engine, so that a plan that comes twice, or after an eviction, does
the right thing.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from engine.errors import UnknownAdapterError
from engine.types import Resident
from registry.entities import AdapterVersion
from serve_app.messages import AdapterPlan
from serve_app.ray_calls import root_cause
from serve_app.replica.adapter_loads import AdapterLoads
from serve_app.tasks import spawn

logger = logging.getLogger(__name__)

_NUM_LOADS = 2  # at a time, beside those of requests
_NUM_TRIES = 3  # the engine may drop what was loaded a moment ago


class Memory(Protocol):
    """The engine's."""

    async def adapters(self) -> tuple[Resident, ...]: ...
    async def pin(self, digest: str) -> None: ...
    async def unpin(self, digest: str) -> None: ...
    async def unload(self, digest: str) -> None: ...


class AdapterKeeper:
    def __init__(self, loads: AdapterLoads, memory: Memory) -> None:
        self.failures: dict[str, str] = {}  # digest -> why its pin is not kept
        self._loads = loads
        self._memory = memory
        self._plan = AdapterPlan()
        self._retired: set[tuple[str, int]] = set()  # of this plan's incarnation
        self._loading = asyncio.Semaphore(_NUM_LOADS)
        self._pinning: dict[str, asyncio.Task[None]] = {}  # by digest

    def arrange(self, plan: AdapterPlan) -> None:
        if plan.incarnation != self._plan.incarnation:
            self._retired.clear()
        self._plan = plan
        wanted = {pin.digest for pin in plan.pins}
        for retirement in set(plan.retired) - self._retired:
            self._retired.add(retirement)
            if retirement[0] not in wanted:
                spawn(self._unload(retirement[0]), "adapter-plan")
        self.failures = {d: why for d, why in self.failures.items() if d in wanted}
        spawn(self._keep_pins(plan), "adapter-plan")

    async def _keep_pins(self, plan: AdapterPlan) -> None:
        held = {one.digest: one for one in await self._memory.adapters()}
        if plan is not self._plan:
            return  # the newer one's turn
        wanted = {pin.digest for pin in plan.pins}
        for digest, one in held.items():
            if one.is_pinned and digest not in wanted:
                logger.info("adapter %s is not pinned any more", digest[:12])
                await self._memory.unpin(digest)
        for pin in plan.pins:
            known = held.get(pin.digest)
            is_kept = known is not None and known.is_pinned and known.is_on_device
            if is_kept:
                self.failures.pop(pin.digest, None)
            elif pin.digest not in self._pinning:
                self._pinning[pin.digest] = spawn(self._pin(pin), "pin-adapter")

    async def _pin(self, adapter: AdapterVersion) -> None:
        try:
            async with self._loading:
                await self._load_and_pin(adapter)
        except Exception as error:  # whatever it is, requests go on
            why = str(root_cause(error))
            if self.failures.get(adapter.digest) != why:
                logger.warning("adapter %s cannot be pinned: %s", adapter.name, why)
            self.failures[adapter.digest] = why
        else:
            self.failures.pop(adapter.digest, None)
        finally:
            del self._pinning[adapter.digest]

    async def _load_and_pin(self, adapter: AdapterVersion) -> None:
        for tries_left in reversed(range(_NUM_TRIES)):
            loaded = await self._loads.ensure(adapter)
            try:
                await self._memory.pin(adapter.digest)
                break
            except Exception as error:
                if not tries_left or not isinstance(root_cause(error), UnknownAdapterError):
                    raise
            self._loads.forget(adapter.digest, loaded)
        if all(pin.digest != adapter.digest for pin in self._plan.pins):
            await self._memory.unpin(adapter.digest)  # a newer plan came meanwhile

    async def _unload(self, digest: str) -> None:
        """Returns when its last request has ended, or when a load has taken this back."""
        logger.info("adapter %s is retired", digest[:12])
        await self._memory.unload(digest)

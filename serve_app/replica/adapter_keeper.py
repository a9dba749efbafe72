"""Carries out a plan in an engine replica: pinned adapters come into memory and stay, retired
adapters leave with their last request.

All of it runs in the background: the sender of a plan does not wait, and failures are reported, not
raised. The engine is asked which adapters it holds, so that a plan that arrives twice, or after an
eviction, has the right effect.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError

from engine.errors import EngineDeadError
from registry.entities import AdapterVersion
from serve_app.messages import AdapterPlan
from serve_app.ray_calls import root_cause
from serve_app.replica.adapter_loads import AdapterLoads
from serve_app.tasks import spawn

logger = logging.getLogger(__name__)

_NUM_LOADS = 2  # at a time, in addition to the loads of requests


class AdapterKeeper:
    def __init__(self, loads: AdapterLoads, actor: ActorHandle[Any]) -> None:
        """`actor`: the `EngineActor`."""
        self.failures: dict[str, str] = {}  # digest -> why it is not pinned
        self._loads = loads
        self._actor = actor
        self._plan = AdapterPlan()
        self._retired: set[tuple[str, int]] = set()  # of this plan's epoch
        self._loading = asyncio.Semaphore(_NUM_LOADS)
        self._pinning: dict[str, asyncio.Task[None]] = {}  # by digest

    def arrange(self, plan: AdapterPlan) -> None:
        if plan.epoch != self._plan.epoch:
            self._retired.clear()
        self._plan = plan
        wanted = {pin.digest for pin in plan.pins}
        for retirement in set(plan.retired) - self._retired:
            self._retired.add(retirement)
            if retirement[0] not in wanted:
                spawn(_unless_dead(self._unload(retirement[0])), "adapter-plan")
        self.failures = {d: why for d, why in self.failures.items() if d in wanted}
        spawn(_unless_dead(self._keep_pins(plan)), "adapter-plan")

    async def _keep_pins(self, plan: AdapterPlan) -> None:
        held = {resident.digest: resident for resident in await self._actor.adapters.remote()}
        if plan is not self._plan:
            return  # a newer plan has its own task
        wanted = {pin.digest for pin in plan.pins}
        for digest, resident in held.items():
            if resident.is_pinned and digest not in wanted:
                logger.info("adapter %s is no longer pinned", digest[:12])
                await self._actor.unpin_adapter.remote(digest)
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
                await self._loads.use(
                    (adapter,), lambda _: self._actor.pin_adapter.remote(adapter.digest)
                )
                if all(pin.digest != adapter.digest for pin in self._plan.pins):
                    # A newer plan arrived meanwhile.
                    await self._actor.unpin_adapter.remote(adapter.digest)
        except Exception as error:  # reported with the next `adapters`; requests go on
            why = str(root_cause(error))
            if self.failures.get(adapter.digest) != why:
                logger.warning(
                    "adapter %s cannot be pinned, it is tried again: %s", adapter.name, why
                )
            self.failures[adapter.digest] = why
        else:
            self.failures.pop(adapter.digest, None)
        finally:
            del self._pinning[adapter.digest]

    async def _unload(self, digest: str) -> None:
        """Returns when the adapter's last request has ended, or a load has cancelled this."""
        logger.info("adapter %s is retired", digest[:12])
        await self._actor.unload_adapter.remote(digest)


async def _unless_dead(work: Coroutine[Any, Any, None]) -> None:
    """Ends without an error if the engine dies: its replica notices the death by itself."""
    try:
        await work
    except (RayError, EngineDeadError) as error:
        if not isinstance(root_cause(error), RayActorError | EngineDeadError):
            raise

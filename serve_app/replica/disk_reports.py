"""Tells an engine's process what lies on its node's disk and what loads took, when that changed.

The engine passes it on to the ingresses. Files come and go by other processes' hands, too: looked
at every few seconds, and after each load. Ignorant of who asks for adapters.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

from ray.exceptions import RayActorError

from serve_app.replica.adapter_loads import AdapterLoads

logger = logging.getLogger(__name__)

_EVERY_S = 3.0
_REST_S = 0.2  # at least, between two looks: loads come in bursts

# (digests, mean seconds from the disk, from the registry)
Note = Callable[[tuple[str, ...], float, float], Awaitable[object]]


class DiskReports:
    def __init__(self, loads: AdapterLoads, note: Note) -> None:
        self._loads = loads
        self._note = note
        self._noted: tuple[tuple[str, ...], float, float] | None = None

    async def run(self) -> None:
        """Until the engine's process is gone."""
        has_loaded = self._loads.has_loaded
        while True:
            has_loaded.clear()
            try:
                await self._report()
            except RayActorError:
                return
            except Exception:  # the disk's fault; routing only knows less until it is back
                logger.exception("the local adapters could not be listed")
            await asyncio.sleep(_REST_S)
            with suppress(TimeoutError):
                await asyncio.wait_for(has_loaded.wait(), _EVERY_S)

    async def _report(self) -> None:
        digests = tuple(sorted(await self._loads.local_digests()))
        times = self._loads.times
        report = (digests, times.recent_s("disk"), times.recent_s("registry"))
        if report != self._noted:
            await self._note(*report)
            self._noted = report

"""/metrics as one collection for all who scrape at once, kept for a moment: each one asks every
engine and the manager, and thirty scrapers in a loop must not cost what thirty collections cost.
"""

from __future__ import annotations

import asyncio

from serve_app.gateway import Gateway
from serve_app.ingress_metrics import join_texts


class Scrape:
    """Of one ingress replica."""

    def __init__(self) -> None:
        self._collecting: asyncio.Task[bytes] | None = None
        self._collected_s = 0.0

    async def text(self, gateway: Gateway, max_age_s: float) -> bytes:
        """The whole server's exposition, at most `max_age_s` seconds old."""
        running = self._collecting
        now_s = asyncio.get_running_loop().time()
        if running is None or (running.done() and now_s - self._collected_s >= max_age_s):
            running = asyncio.get_running_loop().create_task(self._collect(gateway))
            self._collecting = running
        return await asyncio.shield(running)

    async def _collect(self, gateway: Gateway) -> bytes:
        started_s = asyncio.get_running_loop().time()
        try:
            engines, manager = await asyncio.gather(
                gateway.engine_metrics(), gateway.manager_metrics()
            )
            self._collected_s = started_s
            return join_texts([*engines, *manager])
        except BaseException:
            self._collecting = None  # the next one tries anew
            raise

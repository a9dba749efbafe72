"""The collection behind /metrics, shared by simultaneous scrapers.

Each collection asks every engine and the manager, and thirty scrapers in a loop must not cost as
much as thirty collections.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from serve_app.dispatch.activity import CountsReporter
from serve_app.dispatch.gateway import Gateway
from serve_app.metrics.exposition import join_texts
from serve_app.tasks import share

logger = logging.getLogger(__name__)

_TIMEOUT_S = 2.0


async def collect(gateway: Gateway, counts: CountsReporter) -> bytes:
    """Returns the metrics of the whole server as of now."""
    engines, manager = await asyncio.gather(_engines(gateway), _manager(gateway, counts))
    return join_texts([*engines, *manager])


class Scrape:
    """The latest collection of an ingress replica."""

    def __init__(self, collect: Callable[[], Awaitable[bytes]]) -> None:
        self._collect = collect
        self._collecting: asyncio.Task[bytes] | None = None
        self._begun_s = 0.0

    async def text(self, max_age_s: float) -> bytes:
        """Returns a collection that is under way, or that began at most `max_age_s` seconds ago."""
        loop = asyncio.get_running_loop()
        known = self._collecting
        is_old = known is not None and known.done() and loop.time() - self._begun_s >= max_age_s
        if known is None or is_old or _has_failed(known):
            self._begun_s = loop.time()
            self._collecting = known = share(self._run(), "metrics")
        return await asyncio.shield(known)

    async def _run(self) -> bytes:
        return await self._collect()


def _has_failed(task: asyncio.Task[bytes]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


async def _engines(gateway: Gateway) -> list[bytes]:
    """Returns the texts of every replica of every base, without replicas that do not answer in
    time."""
    broadcasts = [handle.handle.broadcast("metrics") for handle in gateway.handles]
    results = await asyncio.gather(
        *(
            broadcast.results_async(timeout_s=_TIMEOUT_S, return_exceptions=True)
            for broadcast in broadcasts
        ),
        return_exceptions=True,
    )
    texts = [text for result in results if isinstance(result, list) for text in result]
    return [text for text in texts if isinstance(text, bytes)]


async def _manager(gateway: Gateway, counts: CountsReporter) -> list[bytes]:
    """Returns the manager's own metrics and the sums over all ingresses, with the current counts of
    this ingress. Empty while the manager does not answer: a partial sum would look like a counter
    that fell."""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            text: bytes = await gateway.manager.metrics.remote(counts.ingress_id, counts.next())
    except (RayError, RayServeException, TimeoutError) as error:
        logger.warning("could not fetch the manager's metrics: %s", error)
        return []
    counts.was_taken = True
    return [text]

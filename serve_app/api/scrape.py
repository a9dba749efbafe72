"""The collection behind /metrics, shared by simultaneous scrapers, and the figures of each base in
an ingress's report, for the console's charts.

Each collection asks every engine and the manager, and thirty scrapers in a loop must not cost as
much as thirty collections.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from serve_app.dispatch.activity import CountsReporter
from serve_app.dispatch.gateway import Gateway
from serve_app.messages import BaseFigures, EngineFigures
from serve_app.metrics.exposition import join_texts
from serve_app.observe.request_metrics import RequestCounts, RequestMetrics
from serve_app.ray_calls import RAY_ERRORS, results_of
from serve_app.routing.state import routing_state
from serve_app.tasks import has_failed, share

logger = logging.getLogger(__name__)

_TIMEOUT_S = 2.0
_ERRORS = ("error", "non_finite")
_NONE = RequestCounts()


async def collect(gateway: Gateway, counts: CountsReporter) -> bytes:
    """Returns the metrics of the whole server as of now."""
    engines = await _engines(gateway)
    texts = [text for texts in engines.values() for text in texts]
    return join_texts([*texts, await _manager(gateway, counts, engines)])


class Scrape:
    """The latest collection of an ingress replica."""

    def __init__(self, collect: Callable[[], Coroutine[Any, Any, bytes]]) -> None:
        self._collect = collect
        self._collecting: asyncio.Task[bytes] | None = None
        self._begun_s = 0.0

    async def text(self, max_age_s: float) -> bytes:
        """Returns a collection that is under way, or that began at most `max_age_s` seconds ago."""
        loop = asyncio.get_running_loop()
        known = self._collecting
        is_old = known is not None and known.done() and loop.time() - self._begun_s >= max_age_s
        if known is None or is_old or has_failed(known):
            self._begun_s = loop.time()
            self._collecting = known = share(self._collect(), "metrics")
        return await asyncio.shield(known)


async def _engines(gateway: Gateway) -> dict[str, list[bytes]]:
    """Returns the texts of every replica of every base, by the base's digest, without replicas that
    do not answer in time."""
    handles = gateway.handles
    calls = [handle.handle.broadcast("metrics") for handle in handles]
    results = await asyncio.gather(
        *(results_of(call, _TIMEOUT_S) for call in calls), return_exceptions=True
    )
    return {
        handle.base.digest: [text for text in result if isinstance(text, bytes)]
        for handle, result in zip(handles, results, strict=True)
        if isinstance(result, list)
    }


async def _manager(
    gateway: Gateway, counts: CountsReporter, engines: dict[str, list[bytes]]
) -> bytes:
    """Returns the manager's own metrics, the sums over all ingresses, with the current counts of
    this ingress, and the last counters of engines that sleep. `engines`: the metrics of engines
    that run. Empty while the manager does not answer: a partial sum would look like a counter that
    fell."""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            text: bytes = await gateway.manager.metrics.remote(
                counts.ingress_id, counts.next(), engines
            )
    except (*RAY_ERRORS, TimeoutError) as error:
        logger.warning("could not fetch the manager's metrics: %s", error)
        return b""
    counts.was_taken = True
    return text


def figures_of(gateway: Gateway, metrics: RequestMetrics) -> tuple[BaseFigures, ...]:
    """Returns the figures of every base that runs or that had a request. Two versions of a base
    that run side by side count as one base."""
    names = dict.fromkeys((*metrics.bases, *(one.base.name for one in gateway.handles)))
    return tuple(_figures(name, gateway, metrics.bases.get(name, _NONE)) for name in names)


def _figures(name: str, gateway: Gateway, counts: RequestCounts) -> BaseFigures:
    apps = [handle.app_name for handle in gateway.handles if handle.base.name == name]
    outcomes = counts.outcomes
    return BaseFigures(
        name,
        outcomes.total(),
        sum(outcomes[outcome] for outcome in _ERRORS),
        outcomes["refused"],
        counts.prompt_tokens,
        counts.output_tokens,
        tuple(counts.first_token.counts),
        sum(gateway.queues.backlog(app).num_requests for app in apps),
        tuple(
            EngineFigures(
                view.replica_id, view.load.num_running, view.load.num_waiting, view.load.kv_usage
            )
            for app in apps
            for view in routing_state(app).views.replicas
            if view.is_connected
        ),
    )

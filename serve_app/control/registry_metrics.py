"""The state of the registry in Prometheus' text format, and its changes in the log. There is a
single manager, so no label names a process, and every ingress exposes the same values.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from registry.events import KINDS, Change
from serve_app.control.watcher import Watcher

logger = logging.getLogger(__name__)

_SHOWN_CHANGES = 20  # per read, in the log


class RegistryMetrics(Collector):
    def __init__(
        self, watcher: Watcher, reconcile_age_s: Callable[[], float] = lambda: 0.0
    ) -> None:
        self._watcher = watcher
        self._reconcile_age_s = reconcile_age_s
        self._changes: Counter[str] = Counter()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        watcher.subscribe(self._count)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def _count(self, changes: Sequence[Change]) -> None:
        self._changes.update(change.kind for change in changes)

    def collect(self) -> Iterator[Metric]:
        watcher = self._watcher
        is_up = watcher.error is None and watcher.catalog is not None
        gauges = (
            ("registry_up", "1: the last read of the registry succeeded", float(is_up)),
            (
                "registry_last_success_timestamp_seconds",
                "When a read last succeeded, Unix time; 0: never",
                watcher.last_success_s,
            ),
            (
                "registry_snapshot_seconds",
                "Duration of the last good read; near 0 where SQLite reports no change",
                watcher.read_duration_s,
            ),
            (
                "reconcile_age_seconds",
                "Since the manager last compared the served bases with the wanted ones",
                self._reconcile_age_s(),
            ),
        )
        for name, words, value in gauges:
            yield GaugeMetricFamily(f"loraplex_{name}", words, value=value)
        found = CounterMetricFamily(
            "loraplex_registry_changes", "Changes seen in the registry", labels=["kind"]
        )
        for kind in KINDS:
            found.add_metric([kind], self._changes[kind])
        yield found


def log_changes(changes: Sequence[Change]) -> None:
    for change in changes[:_SHOWN_CHANGES]:
        logger.info("registry: %s", change)
    if len(changes) > _SHOWN_CHANGES:
        logger.info("registry: %d more changes", len(changes) - _SHOWN_CHANGES)

"""The local cache's numbers as one engine replica sees them, in Prometheus' text format.

Bytes and quarantined fetches are the node's: equal for all replicas that share its folder, so take
their maximum. The counters are the replica's own. Ignorant of where the numbers come from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from registry.cache import CacheStats


def cache_text(stats: CacheStats, num_refused: int, labels: Mapping[str, str]) -> bytes:
    """`num_refused`: versions that this replica's engine refused to load."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_CacheMetrics(stats, num_refused, labels))
    return generate_latest(registry)


class _CacheMetrics(Collector):
    def __init__(self, stats: CacheStats, num_refused: int, labels: Mapping[str, str]) -> None:
        self._stats = stats
        self._num_refused = num_refused
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        stats, names, values = self._stats, list(self._labels), list(self._labels.values())
        gauges = [
            ("loraplex_cache_bytes", "Of local copies, as the limit counts", stats.own_bytes),
            ("loraplex_cache_downloads_in_flight", "Now", stats.fetches_in_flight),
        ]
        if stats.max_bytes is not None:
            gauges.append(("loraplex_cache_limit_bytes", "registry.cache_bytes", stats.max_bytes))
        for name, documentation, value in gauges:
            gauge = GaugeMetricFamily(name, documentation, labels=names)
            gauge.add_metric(values, value)
            yield gauge
        for name, documentation, value in (
            ("loraplex_cache_hits", "Folders found in the cache", stats.hits),
            ("loraplex_cache_misses", "Folders that had to be fetched", stats.misses),
            ("loraplex_cache_evictions", "Folders that made room", stats.evictions),
        ):
            counter = CounterMetricFamily(name, documentation, labels=names)
            counter.add_metric(values, value)
            yield counter
        quarantined = GaugeMetricFamily(
            "loraplex_quarantined_versions",
            "Bad files, not tried again for a while; by what failed",
            labels=[*names, "stage"],
        )
        quarantined.add_metric([*values, "fetch"], stats.num_quarantined)
        quarantined.add_metric([*values, "load"], self._num_refused)
        yield quarantined

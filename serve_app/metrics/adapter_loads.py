"""How long an engine replica's loads took, by the tier of the files; in Prometheus' text format.

In which tier requests found their adapters, and what each tier of memory holds, the engine's own
process counts (`metrics`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from serve_app.metrics.histograms import SECONDS, Histogram

_NEWEST = 0.2  # its weight in the mean


class LoadTimes:
    """From the request for an adapter to its last byte in host memory."""

    def __init__(self) -> None:
        self._histograms = {tier: Histogram(SECONDS) for tier in ("disk", "registry")}
        self._recent_s: dict[str, float] = {}

    def observe(self, tier: str, seconds: float) -> None:
        self._histograms[tier].observe(seconds)
        mean_s = self._recent_s.setdefault(tier, seconds)
        self._recent_s[tier] = mean_s + _NEWEST * (seconds - mean_s)

    def recent_s(self, tier: str) -> float:
        """A mean of the newest ones; 0 before the first."""
        return self._recent_s.get(tier, 0.0)

    def text(self, labels: Mapping[str, str]) -> bytes:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_LoadMetrics(self._histograms, labels))
        return generate_latest(registry)


class _LoadMetrics(Collector):
    def __init__(self, histograms: Mapping[str, Histogram], labels: Mapping[str, str]) -> None:
        self._histograms = histograms
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(
            "loraplex_adapter_load_seconds",
            "From the files' tier into host memory, fetching and checks included",
            labels=[*self._labels, "tier"],
        )
        for tier, histogram in self._histograms.items():
            values = [*self._labels.values(), tier]
            family.add_metric(values, histogram.cumulative(), histogram.total)
        yield family

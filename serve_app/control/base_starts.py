"""The duration of starts, and each base's state and replicas, as Prometheus families of the
manager."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from serve_app.metrics.histograms import SECONDS, Histogram
from serve_app.platform_view import BaseLine, BaseState

_STATES: tuple[str, ...] = get_args(BaseState)


@dataclass(slots=True)
class StartLog:
    """The starts since this manager began."""

    histograms: dict[str, Histogram] = field(default_factory=dict)  # by base name
    cold_starts: Counter[str] = field(default_factory=Counter)
    _began_s: dict[str, float] = field(default_factory=dict)  # by application
    _last_s: dict[str, float] = field(default_factory=dict)  # by base name

    def begin(self, application: str, now_s: float) -> None:
        self._began_s[application] = now_s

    def end(self, application: str, base: str, now_s: float, *, is_cold: bool) -> None:
        """Ends a start. Called in each round while the application runs; the first call counts."""
        began_s = self._began_s.pop(application, None)
        if began_s is None:
            return
        self._last_s[base] = duration_s = now_s - began_s
        self.histograms.setdefault(base, Histogram(SECONDS)).observe(duration_s)
        if is_cold:
            self.cold_starts[base] += 1

    def drop(self, application: str) -> None:
        self._began_s.pop(application, None)

    def last_s(self, base: str) -> float | None:
        return self._last_s.get(base)

    def text(self, lines: Sequence[BaseLine]) -> bytes:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_BaseMetrics(self, lines))
        return generate_latest(registry)


class _BaseMetrics(Collector):
    def __init__(self, log: StartLog, lines: Sequence[BaseLine]) -> None:
        self._log = log
        self._lines = lines

    def collect(self) -> Iterator[Metric]:
        state = GaugeMetricFamily(
            "loraplex_base_state", "1 for the current state", labels=["base", "state"]
        )
        # Two versions of a base may exist at a time: the first draining, the second starting.
        found = {(line.name, line.state) for line in self._lines}
        for name in sorted({line.name for line in self._lines}):
            for value in _STATES:
                state.add_metric([name, value], float((name, value) in found))
        yield state
        replicas = GaugeMetricFamily(
            "loraplex_replicas", "Engine replicas", labels=["model_name", "state"]
        )
        counts: Counter[tuple[str, str]] = Counter()
        for line in self._lines:
            counts[line.name, "running"] += line.replicas
            counts[line.name, "wanted"] += line.wanted_replicas
            counts[line.name, "draining"] += line.draining_replicas
        for labels, count in sorted(counts.items()):
            replicas.add_metric(labels, count)
        yield replicas
        cold = CounterMetricFamily(
            "loraplex_base_cold_starts", "Starts out of sleep", labels=["base"]
        )
        seconds = HistogramMetricFamily(
            "loraplex_base_start_seconds", "From the order to the first answer", labels=["base"]
        )
        for name, histogram in sorted(self._log.histograms.items()):
            cold.add_metric([name], self._log.cold_starts[name])
            seconds.add_metric([name], histogram.cumulative(), histogram.total)
        yield cold
        yield seconds

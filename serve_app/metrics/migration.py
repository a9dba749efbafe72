"""What became of the requests whose engine left them, in Prometheus' text format.

Labels hold registered names only. Of one ingress replica.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Literal

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from serve_app.metrics.exposition import rendered
from serve_app.metrics.histograms import GAP_SECONDS, Histogram

Reason = Literal["death", "drain", "silence", "memory"]


class MigrationMetrics(Collector):
    """`model`: the base's registered name."""

    def __init__(self, ingress: str) -> None:
        self._ingress = ingress
        self._moves: Counter[tuple[str, Reason, bool]] = Counter()
        self._lost: Counter[str] = Counter()
        self._quarantined: Counter[str] = Counter()
        self._gaps: dict[str, Histogram] = {}

    def moved(self, model: str, reason: Reason, *, is_ok: bool) -> None:
        self._moves[model, reason, is_ok] += 1

    def gap(self, model: str, seconds: float) -> None:
        """Of a choice that had output: from its last token on the one engine to the first on the
        next."""
        self._gaps.setdefault(model, Histogram(GAP_SECONDS)).observe(seconds)

    def lost(self, model: str) -> None:
        """Its client was told that the engine is gone."""
        self._lost[model] += 1

    def quarantined(self, model: str) -> None:
        self._quarantined[model] += 1

    def text(self) -> bytes:
        return rendered(self)

    def collect(self) -> Iterator[Metric]:
        names = ["ingress", "model_name"]
        moves = CounterMetricFamily(
            "loraplex_requests_migrated",
            "Requests that left their engine for another one",
            labels=[*names, "reason", "result"],
        )
        for (model, reason, is_ok), count in sorted(self._moves.items()):
            moves.add_metric([self._ingress, model, reason, "ok" if is_ok else "failed"], count)
        yield moves
        for name, words, counts in (
            ("lost", "Requests that failed because their engine went", self._lost),
            ("quarantined", "Requests that killed their engines", self._quarantined),
        ):
            family = CounterMetricFamily(f"loraplex_requests_{name}", words, labels=names)
            for model, count in sorted(counts.items()):
                family.add_metric([self._ingress, model], count)
            yield family
        gaps = HistogramMetricFamily(
            "loraplex_migration_gap_seconds",
            "Last token on one engine to the first on the next",
            labels=names,
        )
        for model, histogram in sorted(self._gaps.items()):
            gaps.add_metric([self._ingress, model], histogram.cumulative(), histogram.total)
        yield gaps

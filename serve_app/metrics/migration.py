"""An ingress replica's counts of requests whose engine left them.

Labels hold registered names only.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

from serve_app.metrics.exposition import as_text, counter, histogram
from serve_app.metrics.histograms import GAP_SECONDS, Histogram

Reason = Literal["death", "drain", "silence", "memory"]


class MigrationMetrics:
    """`model`: the base's registered name."""

    def __init__(self, ingress: str) -> None:
        self._own = {"ingress": ingress}
        self._moves: Counter[tuple[str, str, str]] = Counter()  # model, reason, result
        self._lost: Counter[str] = Counter()
        self._quarantined: Counter[str] = Counter()
        self._gaps: dict[str, Histogram] = {}

    def moved(self, model: str, reason: Reason, *, is_ok: bool) -> None:
        self._moves[model, reason, "ok" if is_ok else "failed"] += 1

    def gap(self, model: str, seconds: float) -> None:
        """Observes the time of a choice that had output: from its last token on an engine to its
        first on the next."""
        self._gaps.setdefault(model, Histogram(GAP_SECONDS)).observe(seconds)

    def lost(self, model: str) -> None:
        """Counts a request that failed because its engine is gone."""
        self._lost[model] += 1

    def quarantined(self, model: str) -> None:
        self._quarantined[model] += 1

    def text(self) -> bytes:
        own, model = self._own, "model_name"
        return as_text(
            counter("loraplex_requests_migrated", self._moves, own, model, "reason", "result"),
            counter("loraplex_requests_lost", self._lost, own, model),
            counter("loraplex_requests_quarantined", self._quarantined, own, model),
            histogram("loraplex_migration_gap_seconds", self._gaps, own, model),
        )

"""An ingress replica's counts of requests whose engine left them.

Labels hold registered names only.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

from serve_app.metrics.exposition import as_text, counter, histogram
from serve_app.metrics.histograms import GAP_SECONDS, Histogram

Reason = Literal["death", "drain", "silence", "memory"]

_LABELS = ("ingress", "model_name")


class MigrationMetrics:
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
        """Observes the time of a choice that had output: from its last token on an engine to its
        first on the next."""
        self._gaps.setdefault(model, Histogram(GAP_SECONDS)).observe(seconds)

    def lost(self, model: str) -> None:
        """Counts a request that failed because its engine is gone."""
        self._lost[model] += 1

    def quarantined(self, model: str) -> None:
        self._quarantined[model] += 1

    def text(self) -> bytes:
        return as_text(
            counter(
                "loraplex_requests_migrated",
                "Requests that left their engine for another one",
                (*_LABELS, "reason", "result"),
                [
                    ((self._ingress, model, reason, "ok" if is_ok else "failed"), count)
                    for (model, reason, is_ok), count in sorted(self._moves.items())
                ],
            ),
            counter(
                "loraplex_requests_lost",
                "Requests that failed because their engine went",
                _LABELS,
                self._by_model(self._lost),
            ),
            counter(
                "loraplex_requests_quarantined",
                "Requests that killed their engines",
                _LABELS,
                self._by_model(self._quarantined),
            ),
            histogram(
                "loraplex_migration_gap_seconds",
                "Last token on one engine to the first on the next",
                _LABELS,
                [((self._ingress, model), gaps) for model, gaps in sorted(self._gaps.items())],
            ),
        )

    def _by_model(self, counts: Counter[str]) -> list[tuple[tuple[str, str], int]]:
        return [((self._ingress, model), count) for model, count in sorted(counts.items())]

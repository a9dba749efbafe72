"""The durations of an engine replica's adapter loads, by the tier of their files.

The engine's own process counts in which tier requests find their adapters, and how much each tier
of memory holds (`metrics.engine`).
"""

from __future__ import annotations

from collections.abc import Mapping

from serve_app.metrics.exposition import as_text, histogram
from serve_app.metrics.histograms import SECONDS, Histogram

_NEWEST = 0.2  # weight of the newest load in the mean


class LoadTimes:
    """Times from the request for an adapter to its last byte in host memory."""

    def __init__(self) -> None:
        self._histograms = {tier: Histogram(SECONDS) for tier in ("disk", "registry")}
        self._recent_s: dict[str, float] = {}

    def observe(self, tier: str, seconds: float) -> None:
        self._histograms[tier].observe(seconds)
        mean_s = self._recent_s.setdefault(tier, seconds)
        self._recent_s[tier] = mean_s + _NEWEST * (seconds - mean_s)

    def recent_s(self, tier: str) -> float:
        """Returns a moving mean of the recent loads; 0 before the first."""
        return self._recent_s.get(tier, 0.0)

    def text(self, labels: Mapping[str, str]) -> bytes:
        return as_text(
            histogram(
                "loraplex_adapter_load_seconds",
                "From the files' tier into host memory, fetching and checks included",
                (*labels, "tier"),
                [((*labels.values(), tier), times) for tier, times in self._histograms.items()],
            )
        )

"""The manager's metrics of bases: how long starts last, each base's state and replicas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import get_args

from serve_app.metrics.exposition import as_text, counter, gauge, histogram
from serve_app.metrics.histograms import SECONDS, Histogram
from serve_app.platform_view import BaseLine, BaseState

_STATES: tuple[str, ...] = get_args(BaseState)


@dataclass(slots=True)
class StartLog:
    """The starts of bases since this manager began."""

    histograms: dict[str, Histogram] = field(default_factory=dict)  # by base name
    cold_starts: Counter[str] = field(default_factory=Counter)
    _began_s: dict[str, float] = field(default_factory=dict)  # by application
    _last_s: dict[str, float] = field(default_factory=dict)  # by base name

    def begin(self, application: str, now_s: float) -> None:
        self._began_s[application] = now_s

    def end(self, application: str, base: str, now_s: float, *, is_cold: bool) -> None:
        """Called each time the application is seen running: only the first call counts."""
        began_s = self._began_s.pop(application, None)
        if began_s is None:
            return
        self._last_s[base] = start_s = now_s - began_s
        self.histograms.setdefault(base, Histogram(SECONDS)).observe(start_s)
        if is_cold:
            self.cold_starts[base] += 1

    def drop(self, application: str) -> None:
        self._began_s.pop(application, None)

    def last_s(self, base: str) -> float | None:
        return self._last_s.get(base)

    def text(self, lines: Sequence[BaseLine]) -> bytes:
        # Two versions of a base may exist at a time, the new one starting, the old one draining.
        found = {(line.name, line.state) for line in lines}
        states = {
            (name, state): float((name, state) in found)
            for name in sorted({line.name for line in lines})
            for state in _STATES
        }
        replicas: Counter[tuple[str, str]] = Counter()
        for line in lines:
            replicas[line.name, "running"] += line.replicas
            replicas[line.name, "wanted"] += line.wanted_replicas
            replicas[line.name, "draining"] += line.draining_replicas
        cold_starts = {base: self.cold_starts[base] for base in self.histograms}
        return as_text(
            gauge("loraplex_base_state", states, {}, "base", "state"),
            gauge("loraplex_replicas", replicas, {}, "model_name", "state"),
            counter("loraplex_base_cold_starts", cold_starts, {}, "base"),
            histogram("loraplex_base_start_seconds", self.histograms, {}, "base"),
        )

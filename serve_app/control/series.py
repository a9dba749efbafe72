"""The last quarter of an hour of each base, from the reports that ingresses send each second
anyway: pages that show it cost no engine and no ingress a call.

A ring of points of five seconds. Rates come from the increases of an ingress's counts between two
reports; the first report of an ingress is only their beginning. Gauges are those of the last
report in a point's time; every ingress sees every engine, and the newest report about an engine
counts. Pure: the time is an argument, in Unix seconds.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from serve_app.admin_api import BaseSeries, SeriesAnswer
from serve_app.messages import BaseFigures, EngineFigures
from serve_app.metrics.histograms import SECONDS

T = TypeVar("T")

INTERVAL_S = 5
NUM_POINTS = 180
_MAX_AGE_S = 8.0  # of the report of a live ingress, and of the state of a live engine


@dataclass(slots=True)
class _Point:
    number: int  # Unix time / INTERVAL_S
    counts: Counter[str] = field(default_factory=Counter)  # by field of BaseFigures
    first_token: list[int] = field(default_factory=lambda: [0] * (len(SECONDS) + 1))
    # Of the last report; None: no engine was seen.
    running: int | None = None
    waiting: int = 0
    kv_usage: float = 0.0  # mean of the engines


@dataclass(slots=True)
class _Base:
    points: deque[_Point] = field(default_factory=lambda: deque(maxlen=NUM_POINTS))
    engines: dict[str, tuple[float, EngineFigures]] = field(default_factory=dict)
    backlogs: dict[str, tuple[float, int]] = field(default_factory=dict)  # by ingress


class Series:
    """All methods belong to the manager's event loop."""

    def __init__(self) -> None:
        self._bases: dict[str, _Base] = {}  # by name
        # By ingress: the time and the counts of its last report.
        self._last: dict[str, tuple[float, Mapping[str, BaseFigures]]] = {}

    def add(self, ingress_id: str, figures: Sequence[BaseFigures], now_s: float) -> None:
        known = self._last.get(ingress_id)
        self._last[ingress_id] = now_s, {one.name: one for one in figures}
        for one in figures:
            base = self._bases.setdefault(one.name, _Base())
            point = _point_at(base.points, int(now_s // INTERVAL_S))
            if known is not None:
                _count(point, one, known[1].get(one.name, BaseFigures(one.name)))
            base.engines |= {engine.engine: (now_s, engine) for engine in one.engines}
            base.backlogs[ingress_id] = now_s, one.num_queued
            base.engines = _recent(base.engines, now_s)
            base.backlogs = _recent(base.backlogs, now_s)
            engines = [engine for _, engine in base.engines.values()]
            if engines:
                point.running = sum(engine.num_running for engine in engines)
                point.kv_usage = sum(engine.kv_usage for engine in engines) / len(engines)
            point.waiting = sum(engine.num_waiting for engine in engines)
            point.waiting += sum(number for _, number in base.backlogs.values())
        self._last = _recent(self._last, now_s)
        oldest = now_s // INTERVAL_S - NUM_POINTS
        for name in [n for n, base in self._bases.items() if base.points[-1].number <= oldest]:
            del self._bases[name]

    def answer(self, now_s: float) -> SeriesAnswer:
        """Returns the points up to the last complete one."""
        end = int(now_s // INTERVAL_S)
        numbers = range(end - NUM_POINTS, end)
        bases = [_series(name, base.points, numbers) for name, base in sorted(self._bases.items())]
        return SeriesAnswer(INTERVAL_S, [number * INTERVAL_S for number in numbers], bases)


def _point_at(points: deque[_Point], number: int) -> _Point:
    # The clock of the machine may be set back: the last point goes on then.
    if not points or points[-1].number < number:
        points.append(_Point(number))
    return points[-1]


def _count(point: _Point, new: BaseFigures, old: BaseFigures) -> None:
    for name in ("num_requests", "num_errors", "num_refused", "prompt_tokens", "output_tokens"):
        point.counts[name] += getattr(new, name) - getattr(old, name)
    for index, count in enumerate(new.first_token):
        before = old.first_token[index] if old.first_token else 0
        point.first_token[index] += count - before


def _recent(values: dict[str, tuple[float, T]], now_s: float) -> dict[str, tuple[float, T]]:
    return {key: one for key, one in values.items() if now_s - one[0] <= _MAX_AGE_S}


def _series(name: str, points: Iterable[_Point], numbers: range) -> BaseSeries:
    by_number = {point.number: point for point in points}
    found = [by_number.get(number) for number in numbers]

    def rates(name: str) -> list[float | None]:
        return [None if one is None else one.counts[name] / INTERVAL_S for one in found]

    return BaseSeries(
        name,
        requests_per_s=rates("num_requests"),
        errors_per_s=rates("num_errors"),
        refused_per_s=rates("num_refused"),
        prompt_tokens_per_s=rates("prompt_tokens"),
        output_tokens_per_s=rates("output_tokens"),
        ttft_p50_s=[None if one is None else quantile(one.first_token, 0.5) for one in found],
        ttft_p95_s=[None if one is None else quantile(one.first_token, 0.95) for one in found],
        running=[None if one is None else one.running for one in found],
        waiting=[None if one is None else one.waiting for one in found],
        kv_usage=[None if one is None or one.running is None else one.kv_usage for one in found],
    )


def quantile(counts: Sequence[int], share: float) -> float | None:
    """Returns a quantile in seconds of a histogram over SECONDS, linear within a bucket as
    Prometheus' histogram_quantile; the highest bound for values above it; None without values."""
    wanted = share * sum(counts)
    if not wanted:
        return None
    below = 0
    for index, bound in enumerate(SECONDS):
        if below + counts[index] >= wanted:
            low = SECONDS[index - 1] if index else 0.0
            return low + (bound - low) * (wanted - below) / counts[index]
        below += counts[index]
    return SECONDS[-1]

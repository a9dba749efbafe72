"""Virtual time: events in order of their moment, of equal moments in order of their making.

Nothing here waits, and nothing reads a clock: a run is a function of its inputs.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import Any, Protocol


class HasTime(Protocol):
    @property
    def arrived_s(self) -> float: ...


class Loop:
    __slots__ = ("_count", "_events", "now_s", "num_events")

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_events = 0
        self._count = 0  # events of one moment keep their order, and are never compared further
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []

    def at(self, time_s: float, call: Callable[[Any], None], argument: object = None) -> None:
        """An event cannot be taken back: its receiver knows whether it still means something."""
        self._count += 1
        heapq.heappush(self._events, (time_s, self._count, call, argument))

    def run(
        self,
        arrivals: Iterator[HasTime],
        take: Callable[[Any], None],
        until_s: float = float("inf"),
    ) -> None:
        """Arrivals, in order of time, go past the heap. Returns when nothing is left to happen."""
        events, pop = self._events, heapq.heappop
        coming = next(arrivals, None)
        while True:
            if coming is not None and (not events or coming.arrived_s <= events[0][0]):
                self.now_s = coming.arrived_s
                if self.now_s > until_s:
                    return
                take(coming)
                coming = next(arrivals, None)
                continue
            if not events or events[0][0] > until_s:
                return
            self.now_s, _, call, argument = pop(events)
            self.num_events += 1
            call(argument)

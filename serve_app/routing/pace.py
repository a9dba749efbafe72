"""How fast a queue moves, measured while somebody waits in it. Pure."""

from __future__ import annotations

from math import exp

_MEMORY_S = 10.0  # time constant of the mean
_MIN_DEPARTURES = 8  # below it nothing is known


class Pace:
    def __init__(self) -> None:
        self._cost = 0.0
        self._seconds = 0.0
        self._num_departures = 0
        self._since_s = 0.0  # the last departure, or when the queue began

    def begin(self, now_s: float) -> None:
        """The first one waits."""
        self._since_s = now_s

    def departed(self, cost: float, now_s: float) -> None:
        """One that waited goes."""
        passed_s = now_s - self._since_s
        kept = exp(-passed_s / _MEMORY_S)
        self._cost = self._cost * kept + cost
        self._seconds = self._seconds * kept + passed_s
        self._num_departures += 1
        self._since_s = now_s

    def wait_s(self, cost_ahead: float, now_s: float) -> float | None:
        """Until so much has gone; None: not known. Call it while somebody waits: a queue that
        stands still is seen to."""
        if self._num_departures < _MIN_DEPARTURES or self._cost <= 0:
            return None
        seconds = self._seconds + max(0.0, now_s - self._since_s)
        return cost_ahead * seconds / self._cost

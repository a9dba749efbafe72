"""How fast a queue moves: what went while somebody waited, and before that is known, what Little's
law says of the requests that run: their cost, by the time that one takes. Pure."""

from __future__ import annotations

from math import exp

_MEMORY_S = 10.0  # time constant of the mean
_MIN_DEPARTURES = 8  # below it they tell nothing
_SERVICE_WEIGHT = 1 / 16  # of a newly ended request in the mean


class DrainRate:
    def __init__(self) -> None:
        self._cost = 0.0
        self._seconds = 0.0
        self._num_departures = 0
        self._since_s = 0.0  # the last departure, or when the queue began
        self._service_s: float | None = None

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

    def ended(self, service_s: float) -> None:
        """So long after it went, waiting here not included."""
        if self._service_s is None:
            self._service_s = service_s
        self._service_s += _SERVICE_WEIGHT * (service_s - self._service_s)

    def wait_s(self, cost_ahead: float, running_cost: float, now_s: float) -> float | None:
        """Until so much has gone; None: not known. `running_cost`: of all that went and did not
        end. Call it while somebody waits: a queue that stands still is seen to."""
        if self._num_departures >= _MIN_DEPARTURES and self._cost > 0:
            seconds = self._seconds + max(0.0, now_s - self._since_s)
            return cost_ahead * seconds / self._cost
        if self._service_s is not None and running_cost > 0:
            return cost_ahead * self._service_s / running_cost
        return None

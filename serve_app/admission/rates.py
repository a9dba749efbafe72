"""The rates of a queue: how fast it drains, and how many requests per second were sent to engines
and refused recently. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

_DRAIN_MEMORY_S = 10.0  # time constant of the mean
_MIN_DEPARTURES = 8  # with fewer the mean is not reliable
_SERVICE_WEIGHT = 1 / 16  # of a newly ended request in the mean
_REQUEST_MEMORY_S = 5.0  # time constant of the request rates
_MIN_PER_S = 0.01  # lower rates count as 0


class DrainRate:
    """The cost that leaves a queue per second while requests wait in it; until enough have left,
    an estimate by Little's law: the cost of the running requests divided by the mean duration of a
    request."""

    def __init__(self) -> None:
        self._cost = 0.0
        self._seconds = 0.0
        self._num_departures = 0
        self._since_s = 0.0  # the last departure, or when the first request began to wait
        self._service_s: float | None = None

    def start(self, now_s: float) -> None:
        """A request enters the empty queue."""
        self._since_s = now_s

    def record_departure(self, cost: float, now_s: float) -> None:
        """A waiting request of this cost goes to an engine."""
        passed_s = now_s - self._since_s
        kept = exp(-passed_s / _DRAIN_MEMORY_S)
        self._cost = self._cost * kept + cost
        self._seconds = self._seconds * kept + passed_s
        self._num_departures += 1
        self._since_s = now_s

    def record_service(self, service_s: float) -> None:
        """A request has ended `service_s` after it went to an engine."""
        if self._service_s is None:
            self._service_s = service_s
        self._service_s += _SERVICE_WEIGHT * (service_s - self._service_s)

    def wait_s(self, cost_ahead: float, running_cost: float, now_s: float) -> float | None:
        """Seconds until `cost_ahead` has left the queue; None if not known. `running_cost`: of all
        requests that went to engines and have not ended. Valid while requests wait, so that the
        rate of a queue that does not move falls."""
        if self._num_departures >= _MIN_DEPARTURES and self._cost > 0:
            seconds = self._seconds + max(0.0, now_s - self._since_s)
            return cost_ahead * seconds / self._cost
        if self._service_s is not None and running_cost > 0:
            return cost_ahead * self._service_s / running_cost
        return None


@dataclass(slots=True)
class Rate:
    """Requests per second, as a mean that decays exponentially."""

    per_s: float = 0.0
    at_s: float = 0.0

    def record(self, now_s: float) -> None:
        self.per_s = self._decayed(now_s) + 1 / _REQUEST_MEMORY_S
        self.at_s = now_s

    def now(self, now_s: float) -> float:
        per_s = self._decayed(now_s)
        return per_s if per_s >= _MIN_PER_S else 0.0

    def _decayed(self, now_s: float) -> float:
        return self.per_s * exp(-(now_s - self.at_s) / _REQUEST_MEMORY_S)

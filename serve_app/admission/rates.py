"""How many requests a second went to engines and were refused, of late: engines see only the first,
an autoscaler has to know of both. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

_OVER_S = 5.0  # the means forget so fast
_LEAST = 0.01  # a second; below it there was nothing


@dataclass(slots=True)
class _Rate:
    per_s: float = 0.0
    at_s: float = 0.0

    def add(self, now_s: float) -> None:
        """One request."""
        self.per_s = self._left(now_s) + 1 / _OVER_S
        self.at_s = now_s

    def now(self, now_s: float) -> float:
        per_s = self._left(now_s)
        return per_s if per_s >= _LEAST else 0.0

    def _left(self, now_s: float) -> float:
        return self.per_s * exp(-(now_s - self.at_s) / _OVER_S)


class RequestRates:
    def __init__(self) -> None:
        self._sent = _Rate()
        self._refused = _Rate()

    def sent(self, now_s: float) -> None:
        self._sent.add(now_s)

    def refused(self, now_s: float) -> None:
        self._refused.add(now_s)

    def per_s(self, now_s: float) -> tuple[float, float]:
        """(requests that went, requests that were refused)."""
        return self._sent.now(now_s), self._refused.now(now_s)

"""The choice of the busiest of many names, which alone get series of their own.

The names come from the registry or the configuration, but there may be thousands. Series follow
the traffic: a name that is busy for long takes the place of a name that no longer is. Its requests
before that stay counted under `other`, so that no counter falls. Pure: the time is an argument.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

OTHER = "other"
_HALF_LIFE_S = 600.0  # of a request's weight
_REVIEW_S = 10.0
_STAY = 2.0  # another name must be this many times as busy to take a place
_FORGOTTEN = 0.01  # requests


class Busiest(Generic[K]):
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._weights: dict[K, float] = {}  # recent requests, by name
        self._chosen: set[K] = set()
        self._reviewed_s: float | None = None

    def count(self, name: K) -> bool:
        """Counts a request. Returns True if the name has series of its own."""
        self._weights[name] = self._weights.get(name, 0.0) + 1.0
        if name not in self._chosen:
            if len(self._chosen) >= self._limit:
                return False
            self._chosen.add(name)
        return True

    def review(self, now_s: float) -> set[K]:
        """Chooses again, at most every ten seconds. Returns the names that lost their series."""
        if self._reviewed_s is None:
            self._reviewed_s = now_s
        age_s = now_s - self._reviewed_s
        if age_s < _REVIEW_S:
            return set()
        self._reviewed_s = now_s
        left = 0.5 ** (age_s / _HALF_LIFE_S)
        self._weights = {
            name: weight * left
            for name, weight in self._weights.items()
            if weight * left >= _FORGOTTEN or name in self._chosen
        }
        if len(self._weights) <= self._limit:
            ranked = list(self._weights)
        else:
            ranked = sorted(self._weights, key=self._standing, reverse=True)[: self._limit]
        lost = self._chosen.difference(ranked)
        self._chosen.intersection_update(ranked)
        self._chosen.update(ranked)
        return lost

    def _standing(self, name: K) -> float:
        return self._weights[name] * (_STAY if name in self._chosen else 1.0)

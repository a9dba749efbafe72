"""The homes of adapters: each adapter orders the replicas, and the first k are its homes.

The order is rendezvous hashing: every ingress computes the same order without communication, and
when a replica is added or removed, only the adapters that it gains or had move. k is the number of
replicas that the adapter's work needs: it follows a rise within seconds and falls slowly. Ignorant
of Ray; the caller passes the time.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import nsmallest

from serve_app.routing.lru import LruDict

_PRIME = (1 << 61) - 1
_SHORT_ORDER = 16  # replicas of an order that are computed at first
_MAX_ADAPTERS = 32768  # remembered; beyond it the least recently used are forgotten
_RISE_S = 5.0  # time constant of an adapter's work
_FALL_S = 60.0  # time constant of its recent maximum


@dataclass(slots=True)
class _Work:
    """The replica seconds per second that an adapter uses."""

    now: float = 0.0
    high: float = 0.0  # follows `now` up at once and down slowly
    at_s: float = 0.0

    def settle(self, now_s: float) -> None:
        """Brings both values up to date."""
        passed_s = max(0.0, now_s - self.at_s)
        self.now *= math.exp(-passed_s / _RISE_S)
        self.high = max(self.now, self.high * math.exp(-passed_s / _FALL_S))
        self.at_s = max(now_s, self.at_s)

    def add(self, seconds: float) -> None:
        self.now += seconds / _RISE_S
        self.high = max(self.now, self.high)


class Placement:
    """The homes of every adapter by the traffic of this ingress."""

    def __init__(self, target_usage: float) -> None:
        """`target_usage`: the share of a replica that an adapter may use before it gets another
        home."""
        self.num_ingresses = 1  # ingresses that share the traffic evenly; each sees only its part
        self._target_usage = target_usage
        self._seeds: tuple[tuple[int, str], ...] = ()  # of the replicas
        self._orders: LruDict[str, tuple[str, ...]] = LruDict(_MAX_ADAPTERS)
        self._works: LruDict[str, _Work] = LruDict(_MAX_ADAPTERS)
        self._wide: set[str] = set()  # adapters that may have several homes

    def change(self, replica_ids: Iterable[str]) -> None:
        seeds = tuple(sorted((_hash(name), name) for name in replica_ids))
        if seeds != self._seeds:
            self._seeds = seeds
            self._orders.clear()

    def first(self, adapter: str, count: int) -> tuple[str, ...]:
        """Returns the first replicas of the adapter's order."""
        count = min(count, len(self._seeds))
        order = self._orders.get(adapter)
        if order is None or len(order) < count:
            order = self._order(adapter, max(count, _SHORT_ORDER))
        self._orders.put(adapter, order)
        return order[:count]

    def observe(self, adapter: str, seconds: float, now_s: float) -> None:
        """Adds a request with this adapter that uses `seconds` of a replica's time."""
        work = self._works.get(adapter) or _Work(at_s=now_s)
        work.settle(now_s)
        work.add(seconds * self.num_ingresses)
        self._works.put(adapter, work)
        if work.high > self._target_usage:
            self._wide.add(adapter)

    def num_homes(self, adapter: str, now_s: float) -> int:
        work = self._works.get(adapter)
        if work is None:
            return 1
        work.settle(now_s)
        return max(1, min(math.ceil(work.high / self._target_usage), max(1, len(self._seeds))))

    def homes(self, adapter: str, now_s: float) -> tuple[str, ...]:
        """Returns the adapter's homes, the best first; not empty if there are replicas."""
        return self.first(adapter, self.num_homes(adapter, now_s))

    def wide(self, now_s: float) -> dict[str, tuple[str, ...]]:
        """Returns the homes of all adapters that have several."""
        homes = {adapter: self.homes(adapter, now_s) for adapter in self._wide}
        self._wide = {adapter for adapter, replicas in homes.items() if len(replicas) > 1}
        return {adapter: homes[adapter] for adapter in self._wide}

    def _order(self, adapter: str, count: int) -> tuple[str, ...]:
        """Mixes two hashes in 0.1 us per replica; BLAKE2b of each pair needs 0.8 us and spreads no
        better."""
        own = _hash(adapter)
        scored = [((mixed := own ^ seed) * mixed % _PRIME, name) for seed, name in self._seeds]
        return tuple(name for _, name in nsmallest(count, scored))


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 4

"""Where adapters live: each has an order of replicas, and the first k of it are its homes.

The order is rendezvous hashing: the same in every ingress without a word between them, and when a
replica comes or goes only the adapters that it wins or held move. k is what the adapter's work
needs, in replicas: it follows a rise within seconds and falls slowly. Ignorant of Ray; the time is
the caller's.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import nsmallest

from serve_app.routing.lru import LruDict

_PRIME = (1 << 61) - 1
_SHORT_ORDER = 16  # of a rendezvous order, as long as nobody asks for more
_MAX_ADAPTERS = 32768  # remembered; beyond it the longest unused are forgotten
_RISE_S = 5.0  # time constant of an adapter's work
_FALL_S = 60.0  # and of the highest that it was


class Rendezvous:
    """Every key's own order of the replicas."""

    def __init__(self) -> None:
        self._seeds: tuple[tuple[int, str], ...] = ()
        self._orders: LruDict[str, tuple[str, ...]] = LruDict(_MAX_ADAPTERS)

    def change(self, replica_ids: Iterable[str]) -> None:
        seeds = tuple(sorted((_hash(one), one) for one in replica_ids))
        if seeds != self._seeds:
            self._seeds = seeds
            self._orders.clear()

    def __len__(self) -> int:
        return len(self._seeds)

    def first(self, key: str, count: int) -> tuple[str, ...]:
        count = min(count, len(self._seeds))
        order = self._orders.get(key)
        if order is None or len(order) < count:
            order = self._order(key, max(count, _SHORT_ORDER))
        self._orders.put(key, order)
        return order[:count]

    def _order(self, key: str, count: int) -> tuple[str, ...]:
        """0.1 us a replica where BLAKE2b of each pair takes 0.8; both spread alike."""
        own = _hash(key)
        scored = [((mixed := own ^ seed) * mixed % _PRIME, one) for seed, one in self._seeds]
        return tuple(one for _, one in nsmallest(count, scored))


@dataclass(slots=True)
class _Work:
    """Replicas' seconds a second that an adapter takes."""

    now: float = 0.0
    high: float = 0.0  # follows it up at once and down slowly
    at_s: float = 0.0

    def settle(self, now_s: float) -> None:
        """Both as of now."""
        passed_s = max(0.0, now_s - self.at_s)
        self.now *= math.exp(-passed_s / _RISE_S)
        self.high = max(self.now, self.high * math.exp(-passed_s / _FALL_S))
        self.at_s = max(now_s, self.at_s)

    def add(self, seconds: float) -> None:
        self.now += seconds / _RISE_S
        self.high = max(self.now, self.high)


class Placement:
    """The homes of every adapter, as one ingress sees its traffic."""

    def __init__(self, target_usage: float) -> None:
        """`target_usage`: how much of a replica one adapter may take before it gets another."""
        self.num_ingresses = 1  # that share the traffic evenly; this one sees its part only
        self._target_usage = target_usage
        self._order = Rendezvous()
        self._works: LruDict[str, _Work] = LruDict(_MAX_ADAPTERS)
        self._wide: set[str] = set()  # adapters that had more than one home

    def change(self, replica_ids: Iterable[str]) -> None:
        self._order.change(replica_ids)

    def observe(self, adapter: str, seconds: float, now_s: float) -> None:
        """A request with this adapter takes so long of a replica."""
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
        return max(1, min(math.ceil(work.high / self._target_usage), max(1, len(self._order))))

    def homes(self, adapter: str, now_s: float) -> tuple[str, ...]:
        """The best first; at least one where there are replicas."""
        return self._order.first(adapter, self.num_homes(adapter, now_s))

    def wide(self, now_s: float) -> dict[str, tuple[str, ...]]:
        """The homes of all adapters that have more than one."""
        homes = {adapter: self.homes(adapter, now_s) for adapter in self._wide}
        self._wide = {adapter for adapter, its in homes.items() if len(its) > 1}
        return {adapter: homes[adapter] for adapter in self._wide}


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 4

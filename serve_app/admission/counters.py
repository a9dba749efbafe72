"""Virtual counters: who had how much, and who of those that wait had least or waits longest. Pure.

Heaps whose keys move: an entry that is too low is corrected when it comes up, a counter that falls
gets a new entry, so that charging a running answer token by token costs nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from itertools import chain, count
from typing import Generic, Protocol, TypeVar


class _Ranks(Protocol):
    def fell(self, account: Account) -> None: ...


class Account:
    """What a tenant, or one of its adapters, had so far. Starts at the least of those that wait:
    nobody saves up by being idle."""

    __slots__ = ("counter", "name", "num_open", "rankings", "weight")

    def __init__(self, name: str, weight: float) -> None:
        self.name = name
        self.weight = weight
        self.counter = 0.0  # cost units by weight
        self.num_open = 0  # requests that wait or run: while there are any, it is not forgotten
        self.rankings: list[_Ranks] = []  # that it is in now

    def charge(self, cost: float) -> None:
        """Below zero: part of what was charged before is given back."""
        self.counter += cost / self.weight
        if cost < 0:
            for ranking in self.rankings:
                ranking.fell(self)

    def lift(self, floor: float) -> None:
        self.counter = max(self.counter, floor)


A = TypeVar("A", bound=Account)


class Ranking(Generic[A]):
    """Those that wait, least counter first; of equals the one that came first."""

    def __init__(self) -> None:
        self._members: dict[Account, A] = {}
        self._heap: list[tuple[float, int, A]] = []
        self._ticks = count()

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[A]:
        return iter(self._members.values())

    def add(self, account: A) -> None:
        self._members[account] = account
        account.rankings.append(self)
        self._push(account)

    def remove(self, account: A) -> None:
        del self._members[account]
        account.rankings.remove(self)
        if not self._members:
            self._heap.clear()  # entries of those that left: they would hold the accounts

    def fell(self, account: Account) -> None:
        self._push(self._members[account])

    def first(self) -> A:
        """There must be one."""
        heap = self._heap
        while True:
            counter, _, account = heap[0]
            if account not in self._members or counter > account.counter:
                heappop(heap)  # it left, or has a newer entry
            elif counter < account.counter:
                heapreplace(heap, (account.counter, next(self._ticks), account))
            else:
                return account

    def _push(self, account: A) -> None:
        if len(self._heap) > 2 * len(self._members) + 64:
            self._heap = [(one.counter, next(self._ticks), one) for one in self]
            heapify(self._heap)
        heappush(self._heap, (account.counter, next(self._ticks), account))


class Accounts(Generic[A]):
    """By name. Of those without a request `limit` are kept, the longest idle is forgotten first:
    a counter that was far above the others then starts anew."""

    def __init__(self, make: Callable[[str], A], limit: int) -> None:
        self._make = make
        self._limit = limit
        self._busy: dict[str, A] = {}
        self._idle: OrderedDict[str, A] = OrderedDict()

    def __len__(self) -> int:
        return len(self._busy) + len(self._idle)

    def __iter__(self) -> Iterator[A]:
        return chain(self._busy.values(), self._idle.values())

    def get(self, name: str) -> A | None:
        """Of those that have requests."""
        return self._busy.get(name)

    def open(self, name: str) -> A:
        """For one request; `close` it once."""
        account = self._busy.get(name)
        if account is None:
            account = self._idle.pop(name, None) or self._make(name)
            self._busy[name] = account
        account.num_open += 1
        return account

    def close(self, account: A) -> None:
        account.num_open -= 1
        if account.num_open:
            return
        self._idle[account.name] = self._busy.pop(account.name)
        if len(self._idle) > self._limit:
            self._idle.popitem(last=False)


class Waits(Protocol):
    since_s: float  # infinity: it does not wait


W = TypeVar("W", bound=Waits)


class Overdue(Generic[W]):
    """Who waits longest. `push` at every change of `since_s` but that to infinity."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, W]] = []
        self._ticks = count()

    def push(self, one: W) -> None:
        heappush(self._heap, (one.since_s, next(self._ticks), one))

    def first(self, before_s: float) -> W | None:
        """If it waits since then."""
        heap = self._heap
        while heap and heap[0][0] != heap[0][2].since_s:
            heappop(heap)  # it was served, or left
        return heap[0][2] if heap and heap[0][0] <= before_s else None

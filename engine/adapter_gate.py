"""Admission by adapter: references, and a bound on overtaking.

Younger sequences pass over a waiting sequence whose adapter finds no room. After `max_overtakes` of
them, no younger sequence that needs an adapter is admitted before it, so that running sequences end
and free the room; sequences without an adapter need no room and still pass. The barrier holds only
while some running sequence holds an adapter, hence it cannot lock the engine. Sees adapter keys
only; the pool decides which adapters have room.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from engine.types import AdapterStore, Sequence, key_digests

_PREFETCHED = 64  # waiting sequences whose adapters are considered, once per step
_COPY_STEPS = 2  # steps that an adapter's copy to the device takes at most
_NEWEST = 0.1  # share of the newest wait in the mean


class AdapterGate:
    """Called with one `begin_walk` per step, then `acquire` in order of age."""

    def __init__(self, adapters: AdapterStore, max_overtakes: int) -> None:
        self._adapters = adapters
        self._max_overtakes = max_overtakes
        self._num_held = 0
        self._refused: set[str] = set()  # keys, in this walk
        self._passed_over: list[Sequence] = []  # in this walk
        self._is_barrier_up = False
        self.room_s = 0.0  # mean recent wait for room for an adapter

    @property
    def num_passed_over(self) -> int:
        return len(self._passed_over)

    @property
    def passed_over_tokens(self) -> int:
        return sum(len(sequence.token_ids) for sequence in self._passed_over)

    def begin_walk(self) -> None:
        self._refused.clear()
        self._passed_over.clear()
        self._is_barrier_up = False
        # Only before the walk. A copy that landed during it would not help a sequence that was
        # already refused, and a later sequence could evict its pages again.
        self._adapters.land_copies()

    def error(self, sequence: Sequence) -> str | None:
        """Returns why a waiting sequence cannot run any more: an adapter was unloaded, or dropped
        from the host, or pins have taken the room that its adapters need together."""
        key = sequence.request.adapter
        if key is None:
            return None
        if not self._adapters.has(key):
            return f"adapter {key} is no longer loaded"
        return self._adapters.obstacle(key)

    def acquire(self, sequence: Sequence) -> bool:
        key = sequence.request.adapter
        if key is None:
            return True
        if key not in self._refused:
            if self._is_barrier_up and self._num_held:
                return False
            if self._adapters.acquire(key):
                self._num_held += 1
                return True
        self._refused.add(key)
        self._passed_over.append(sequence)
        sequence.num_refusals += 1
        self._is_barrier_up |= sequence.num_overtaken >= self._max_overtakes
        return False

    def prefetch(self, waiting: Iterable[Sequence]) -> None:
        """Starts copies of the adapters of the next sequences while others run."""
        next_in_line = islice(waiting, _PREFETCHED)
        digests = dict.fromkeys(d for s in next_in_line for d in key_digests(s.request.adapter))
        self._adapters.prefetch([digest for digest in digests if self._adapters.has(digest)])

    def note_admitted(self, sequence: Sequence) -> None:
        # Copies of adapters that had room take one or two steps, and are no wait for room.
        if sequence.num_refusals > _COPY_STEPS:
            self.room_s += _NEWEST * (sequence.queued_s - self.room_s)
        sequence.num_refusals = sequence.num_overtaken = 0
        if sequence.request.adapter is None:
            return
        for older in self._passed_over:
            older.num_overtaken += 1
            self._is_barrier_up |= older.num_overtaken >= self._max_overtakes

    def release(self, sequence: Sequence) -> None:
        if sequence.request.adapter is not None:
            self._num_held -= 1
            self._adapters.release(sequence.request.adapter)

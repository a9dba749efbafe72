"""The ownership of the pool's blocks: references, pins, eviction of the least recently used.

Integers and digests only: the pool fills the blocks.

    absent --acquire--> resident, referenced --release--> resident, idle --evicted--> absent
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Placement:
    """The result of one acquire."""

    blocks: tuple[int, ...]
    is_new: bool  # the blocks do not hold this digest's rows yet
    evicted: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Resident:
    """The state of an adapter in memory: a value that pickles."""

    digest: str
    is_on_device: bool  # a copy on the host is kept as well
    num_bytes: int  # on the host; about as many on the device
    num_pages: int  # of 16 rank rows
    num_references: int  # running sequences with it, and its own copy to the device
    is_pinned: bool
    is_leaving: bool  # removed: it leaves with its last reference
    used_s: float  # Unix time of its load or of the last acquire by a sequence


class FreeBlocks:
    """The free blocks, as runs: long runs are kept long, because a run is one copy."""

    def __init__(self, num_blocks: int) -> None:
        self._runs: list[tuple[int, int]] = [(0, num_blocks)] if num_blocks else []  # [start, end)
        self._count = num_blocks

    def __len__(self) -> int:
        return self._count

    def take(self, count: int) -> tuple[int, ...]:
        """Takes blocks of the shortest run that is long enough, otherwise of the longest runs."""
        assert count <= self._count
        self._count -= count
        taken: list[int] = []
        while count:
            fitting = [run for run in self._runs if run[1] - run[0] >= count]
            run = min(fitting, key=_length) if fitting else max(self._runs, key=_length)
            start, end = run
            used = min(count, end - start)
            i = bisect_left(self._runs, run)
            self._runs[i : i + 1] = [(start + used, end)] if start + used < end else []
            taken += range(start, start + used)
            count -= used
        return tuple(taken)

    def give_back(self, blocks: Iterable[int]) -> None:
        for block in sorted(blocks):
            self._count += 1
            start, end = block, block + 1
            i = bisect_left(self._runs, (start, end))
            low = high = i
            if i and self._runs[i - 1][1] == start:
                low, start = i - 1, self._runs[i - 1][0]
            if i < len(self._runs) and self._runs[i][0] == end:
                high, end = i + 1, self._runs[i][1]
            self._runs[low:high] = [(start, end)]


class BlockTable:
    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = FreeBlocks(num_blocks)
        self._blocks: OrderedDict[str, tuple[int, ...]] = OrderedDict()  # least recently used first
        self._references: dict[str, int] = {}
        self.pinned: set[str] = set()  # once resident, never evicted
        self._idle: dict[str, None] = {}  # evictable, longest idle first

    @property
    def num_free(self) -> int:
        return len(self._free)

    def resident(self) -> tuple[str, ...]:
        """Returns the resident digests, least recently used first."""
        return tuple(self._blocks)

    def is_resident(self, digest: str) -> bool:
        return digest in self._blocks

    def blocks(self, digest: str) -> tuple[int, ...]:
        return self._blocks[digest]

    def num_references(self, digest: str) -> int:
        return self._references.get(digest, 0)

    def is_evictable(self, digest: str) -> bool:
        return self.num_references(digest) == 0 and digest not in self.pinned

    def acquire(
        self, digest: str, num_blocks: int, protected: Collection[str] = ()
    ) -> Placement | None:
        """Adds a reference, evicting idle adapters if needed. Returns None, with nothing changed,
        if there is no room.

        Idle adapters among the `protected` are evicted only if the others are not enough.
        """
        assert num_blocks > 0
        is_new = digest not in self._blocks
        evicted = self._victims(num_blocks, protected) if is_new else ()
        if evicted is None:
            return None
        for victim in evicted:
            self.drop(victim)
        if is_new:
            self._blocks[digest] = self._free.take(num_blocks)
        else:
            self._blocks.move_to_end(digest)
        self._references[digest] = self.num_references(digest) + 1
        self._idle.pop(digest, None)
        return Placement(self._blocks[digest], is_new, evicted)

    def acquire_keeping(
        self, digest: str, num_blocks: int, protected: Collection[str]
    ) -> Placement | None:
        """Acquires as `acquire` does, but returns None rather than evict one of the `protected`."""
        idle = (len(self._blocks[one]) for one in self._idle if one not in protected)
        if digest not in self._blocks and len(self._free) + sum(idle) < num_blocks:
            return None
        return self.acquire(digest, num_blocks, protected)

    def release(self, digest: str) -> None:
        references = self.num_references(digest)
        assert references > 0, f"released more often than acquired: {digest}"
        self._references[digest] = references - 1
        self._note_if_idle(digest)

    def drop(self, digest: str) -> None:
        assert self.num_references(digest) == 0, f"dropped while referenced: {digest}"
        self._free.give_back(self._blocks.pop(digest))
        self._references.pop(digest, None)
        self._idle.pop(digest, None)

    def pin(self, digest: str) -> None:
        self.pinned.add(digest)
        self._idle.pop(digest, None)

    def unpin(self, digest: str) -> None:
        self.pinned.discard(digest)
        self._note_if_idle(digest)

    def _note_if_idle(self, digest: str) -> None:
        if digest in self._blocks and digest not in self._idle and self.is_evictable(digest):
            self._idle[digest] = None

    def _victims(self, num_blocks: int, protected: Collection[str]) -> tuple[str, ...] | None:
        victims: list[str] = []
        room = len(self._free)
        if room >= num_blocks:
            return ()
        for digest in sorted(self._idle, key=lambda d: d in protected):  # stable: order within each
            if room >= num_blocks:
                break
            victims.append(digest)
            room += len(self._blocks[digest])
        return tuple(victims) if room >= num_blocks else None


def _length(run: tuple[int, int]) -> int:
    return run[1] - run[0]

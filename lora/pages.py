"""The ownership of the adapter pool's pages: references, pins, eviction of the least recently used.

A page is 16 rank rows, the same rows in every site. Integers and digests only: the pool fills the
pages.

    absent --acquire--> resident, referenced --release--> resident, idle --evicted--> absent
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Placement:
    """The result of one acquire."""

    pages: tuple[int, ...]
    is_new: bool  # the pages do not hold this digest's rows yet
    evicted: tuple[str, ...] = ()


class PageTable:
    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = set(range(num_pages))
        self._pages: OrderedDict[str, tuple[int, ...]] = OrderedDict()  # least recently used first
        self._references: dict[str, int] = {}
        self._pinned: set[str] = set()
        self._idle: dict[str, None] = {}  # evictable, longest idle first

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_pinned(self) -> int:
        return len(self._pinned)

    def resident(self) -> tuple[str, ...]:
        """Returns the resident digests, least recently used first."""
        return tuple(self._pages)

    def is_resident(self, digest: str) -> bool:
        return digest in self._pages

    def pages(self, digest: str) -> tuple[int, ...]:
        return self._pages[digest]

    def num_references(self, digest: str) -> int:
        return self._references.get(digest, 0)

    def is_pinned(self, digest: str) -> bool:
        return digest in self._pinned

    def is_evictable(self, digest: str) -> bool:
        return self.num_references(digest) == 0 and digest not in self._pinned

    def acquire(
        self, digest: str, num_pages: int, protected: Collection[str] = ()
    ) -> Placement | None:
        """Adds a reference, evicting idle adapters if needed. Returns None, with nothing changed,
        if there is no room.

        Idle adapters among the `protected` are evicted only if the others are not enough.
        """
        placement = self._place(digest, num_pages, protected)
        if placement is not None:
            self._references[digest] += 1
            self._idle.pop(digest, None)
        return placement

    def acquire_keeping(
        self, digest: str, num_pages: int, protected: Collection[str]
    ) -> Placement | None:
        """Acquires as `acquire` does, but returns None rather than evict one of the `protected`."""
        if digest not in self._pages and self._num_free_or_idle(protected) < num_pages:
            return None
        return self.acquire(digest, num_pages, protected)

    def release(self, digest: str) -> None:
        references = self.num_references(digest)
        assert references > 0, f"released more often than acquired: {digest}"
        self._references[digest] = references - 1
        self._note_if_idle(digest)

    def drop(self, digest: str) -> None:
        """Frees the pages of an idle adapter."""
        assert self.num_references(digest) == 0, f"dropped while referenced: {digest}"
        self._free.update(self._pages.pop(digest))
        self._references.pop(digest, None)
        self._idle.pop(digest, None)

    def pin(self, digest: str) -> None:
        """Pins an adapter: once resident, it is never evicted."""
        self._pinned.add(digest)
        self._idle.pop(digest, None)

    def unpin(self, digest: str) -> None:
        self._pinned.discard(digest)
        self._note_if_idle(digest)

    def _place(self, digest: str, num_pages: int, protected: Collection[str]) -> Placement | None:
        assert num_pages > 0
        if digest in self._pages:
            self._pages.move_to_end(digest)
            return Placement(self._pages[digest], is_new=False)
        evicted = self._victims(num_pages, protected)
        if evicted is None:
            return None
        for victim in evicted:
            self.drop(victim)
        self._pages[digest] = self._take(num_pages)
        self._references[digest] = 0
        return Placement(self._pages[digest], is_new=True, evicted=evicted)

    def _note_if_idle(self, digest: str) -> None:
        if digest in self._pages and digest not in self._idle and self.is_evictable(digest):
            self._idle[digest] = None

    def _num_free_or_idle(self, protected: Collection[str]) -> int:
        idle = (len(self._pages[digest]) for digest in self._idle if digest not in protected)
        return len(self._free) + sum(idle)

    def _victims(self, num_pages: int, protected: Collection[str]) -> tuple[str, ...] | None:
        victims: list[str] = []
        room = len(self._free)
        for digest in sorted(self._idle, key=lambda d: d in protected):  # stable: order within each
            if room >= num_pages:
                break
            victims.append(digest)
            room += len(self._pages[digest])
        return tuple(victims) if room >= num_pages else None

    def _take(self, num_pages: int) -> tuple[int, ...]:
        """Returns the first free run that is long enough (contiguous rows are read without a
        gather), otherwise the lowest free pages."""
        free = sorted(self._free)
        chosen = free[:num_pages]
        for i in range(len(free) - num_pages + 1):
            if free[i + num_pages - 1] - free[i] == num_pages - 1:
                chosen = free[i : i + num_pages]
                break
        self._free.difference_update(chosen)
        return tuple(chosen)

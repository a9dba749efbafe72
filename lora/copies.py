"""The copies of adapters to their blocks, in flight on a stream of their own.

    page-locked memory --copy engine, side stream--> blocks and rows of the table

A copy writes the blocks in place, so it waits on the device for the steps that read their last
owner, and only for those. Never blocks the host, except in `wait`: callers poll. One thread calls
it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from lora.page_image import PackedAdapter


class Event(Protocol):
    """A point in the work of a device."""

    def query(self) -> bool:
        """Returns True if the device has reached it."""

    def synchronize(self) -> None: ...


class Copier(Protocol):
    max_flying: int  # copies in flight: further ones would only queue
    max_bytes: int  # in flight beyond which none begins

    def mark_steps(self) -> Event:
        """Returns the end of all steps launched so far."""

    def copy(self, write: Callable[[], None], after: Event | None) -> Event:
        """Calls `write`, whose copies begin after the event, in order of the calls. Returns their
        end."""


class CudaCopier:
    max_flying = 16

    def __init__(
        self,
        device: torch.device,
        steps: torch.cuda.Stream | None,  # None: the current one, at each call
        max_bytes: int,
    ) -> None:
        self.max_bytes = max_bytes
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._steps = steps

    def mark_steps(self) -> Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._steps)
        return event

    def copy(self, write: Callable[[], None], after: Event | None) -> Event:
        with torch.cuda.stream(self._copies):
            if after is not None:
                self._copies.wait_event(after)  # type: ignore[arg-type]
            write()
            end = torch.cuda.Event()  # type: ignore[no-untyped-call]
            end.record()
        return end


@dataclass(slots=True)
class _Copy:
    packed: PackedAdapter  # kept while the copy engine reads it
    end: Event
    is_cancelled: bool = False


class AdapterCopies:
    def __init__(self, copier: Copier) -> None:
        self._copier = copier
        self._flying: deque[_Copy] = deque()
        self._num_bytes = 0

    @property
    def can_start(self) -> bool:
        """Returns False if a copy would only queue, with blocks that others could use meanwhile."""
        copier = self._copier
        return len(self._flying) < copier.max_flying and self._num_bytes < copier.max_bytes

    @property
    def is_busy(self) -> bool:
        return bool(self._flying)

    def start(self, packed: PackedAdapter, write: Callable[[], None], after: Event | None) -> None:
        """Begins the copy. `after`: the end of all steps that read the overwritten memory."""
        self._flying.append(_Copy(packed, self._copier.copy(write, after)))
        self._num_bytes += packed.num_bytes

    def poll(self) -> list[str]:
        """Returns the adapters that every step launched from now on finds in their blocks."""
        arrived: list[str] = []
        while self._flying and self._flying[0].end.query():
            copy = self._flying.popleft()
            self._num_bytes -= copy.packed.num_bytes
            if not copy.is_cancelled:
                arrived.append(copy.packed.digest)
        return arrived

    def wait(self) -> None:
        """Blocks until the next `poll` finds a copy that has ended."""
        if self._flying:
            self._flying[0].end.synchronize()

    def cancel(self, digest: str) -> None:
        """Cancels the copies for the digest. Its blocks may be reassigned at once: later copies
        come after these."""
        for copy in self._flying:
            copy.is_cancelled |= copy.packed.digest == digest


class ReadMarks:
    """The ends of the last steps that read idle adapters, and of the last that read a block which
    is free now or was since: marks of a later time include the earlier ones."""

    def __init__(self) -> None:
        self._read_until: dict[str, tuple[int, Event]] = {}
        self._free_from: tuple[int, Event] | None = None
        self._num_marks = 0

    @property
    def free_from(self) -> Event | None:
        """The end of the last step that read a block which is free; None: no step did."""
        return None if self._free_from is None else self._free_from[1]

    def add(self, digest: str, end: Event) -> None:
        """Notes that no step after `end` reads an adapter until its next use."""
        self._num_marks += 1
        self._read_until[digest] = self._num_marks, end

    def leave(self, digest: str) -> None:
        """Notes that an adapter's blocks are free."""
        mark = self._read_until.pop(digest, None)
        if mark is not None and (self._free_from is None or mark[0] > self._free_from[0]):
            self._free_from = mark

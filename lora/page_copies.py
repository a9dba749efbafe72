"""The copies of adapters' pages in flight, through a few staging slots, in order of request.

Never blocks, except in `wait`: callers poll. One thread calls it. The slots and the pools move an
image into a slot and on to its page.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from lora.page_pools import PagePools
from lora.staging import StagingSlot


@dataclass(frozen=True, slots=True)
class _Copy:
    digest: str
    image: torch.Tensor
    page: int
    is_last: bool  # the last page of its adapter
    is_cancelled: bool = False


class PageCopies:
    def __init__(self, pools: PagePools, slots: Sequence[StagingSlot]) -> None:
        """The slots are filled in the order of their `fill` calls."""
        assert slots
        self._pools = pools
        self._free = deque(slots)
        self._waiting: deque[_Copy] = deque()
        self._flying: deque[tuple[_Copy, StagingSlot]] = deque()

    @property
    def can_start(self) -> bool:
        """Returns False if a copy would only queue, with pages that others could use meanwhile."""
        return bool(self._free)

    @property
    def is_busy(self) -> bool:
        return bool(self._flying)

    def start(self, digest: str, images: Sequence[torch.Tensor], pages: Sequence[int]) -> None:
        """Assigns the pages to the digest from now on; their contents are written in time."""
        last = len(pages) - 1
        for i, (image, page) in enumerate(zip(images, pages, strict=True)):
            self._waiting.append(_Copy(digest, image, page, i == last))
        self._fill_slots()

    def poll(self) -> list[str]:
        """Returns the adapters that every step launched from now on finds in their pages."""
        arrived: list[str] = []
        while self._flying and self._flying[0][1].is_filled():
            copy, slot = self._flying.popleft()
            self._free.append(slot)
            if copy.is_cancelled:
                continue
            slot.empty(partial(self._pools.write, page=copy.page))
            if copy.is_last:
                arrived.append(copy.digest)
        self._fill_slots()
        return arrived

    def wait(self) -> None:
        """Blocks until the next `poll` returns an adapter."""
        if self._flying:
            self._flying[0][1].wait()

    def cancel(self, digest: str) -> None:
        """Cancels all writes for the digest; its pages may be reassigned at once."""
        self._waiting = deque(copy for copy in self._waiting if copy.digest != digest)
        self._flying = deque(
            (replace(copy, is_cancelled=copy.is_cancelled or copy.digest == digest), slot)
            for copy, slot in self._flying
        )

    def _fill_slots(self) -> None:
        while self._waiting and self._free:
            copy, slot = self._waiting.popleft(), self._free.popleft()
            slot.fill(copy.image)
            self._flying.append((copy, slot))

"""The adapters of a group: the first rank's pool decides, and the others' hold the same blocks.

An adapter is read and checked once and packed for every rank: its images have the same layout and
size on all of them, so they lie side by side in one piece of memory that all ranks map. The pool of
the first rank's pool decides; it sends each change of its blocks before the next step, so a step
finds its adapters on every rank. On CUDA each rank orders its copy before that step on its own
device.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from engine.parallel.channel import Shared
from engine.parallel.group import Group
from engine.parallel.shards import Shard
from lora.adapter import Adapter
from lora.copies import Copier, CudaCopier, Event
from lora.heap import Deltas
from lora.int8 import quantized
from lora.page_image import PackedAdapter
from lora.pinned_memory import register
from lora.pool import AdapterPool
from lora.sites import Site

_MAX_BYTES_FLYING = 256 * 1024**2  # of one rank: further copies slow down steps
_MAX_MARKS = 64
_ANY_NUMBER = 1 << 62  # bytes: the first rank's limit holds for all


@dataclass(frozen=True, slots=True)
class SharedAdapter(PackedAdapter):
    """The first rank's image, and the memory with those of all ranks."""

    images: Shared | None = None


class GroupPool(AdapterPool):
    """The first rank's pool."""

    def __init__(
        self,
        group: Group,
        shard: Shard,
        bytes_budget: int,
        dtype: torch.dtype,
        device: torch.device,
        host_bytes: int,
        max_list: int,
        *,
        has_affine: bool,
        is_int8: bool = False,
    ) -> None:
        """`bytes_budget`: of each rank. `host_bytes`: of all ranks together."""
        super().__init__(
            shard.sites(),
            bytes_budget,
            dtype,
            device,
            host_bytes // shard.size,
            copier=_copier(device, group),
            max_list=max_list,
            has_affine=has_affine,
            is_int8=is_int8,
            allocate_host=_no_memory,
        )
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the table's zeros are written before any copy
        self._group = group
        self._shards = [Shard(shard.whole, rank, shard.size) for rank in range(shard.size)]

    def pack(self, adapter: Adapter) -> PackedAdapter:
        """Packs a whole adapter for all ranks."""
        images: Shared | None = None
        packed: list[PackedAdapter] = []

        def allocate(num_bytes: int) -> torch.Tensor:
            nonlocal images
            stride = _stride(num_bytes)
            images = images or Shared(stride * len(self._shards))
            memory = images.tensor(stride * len(packed), num_bytes)
            if not packed and self.device.type == "cuda":
                register(memory)  # this rank's part: the others have their own maps
            return memory

        if self.is_int8:
            adapter = quantized(adapter)  # whole: all ranks have the rows and scales of one
        for shard in self._shards:
            own_part = shard.adapter(adapter)
            part = self._layout.pack(own_part, allocate, self.reserved_bytes, self._max_list)
            part.rows.copy_(part.entries)  # for the other ranks
            packed.append(part)
        own = packed[0]
        return SharedAdapter(
            own.digest,
            own.memory,
            own.entries,
            own.num_blocks,
            own.site_kinds,
            own.invocation,
            images,
        )

    def insert(self, packed: PackedAdapter) -> tuple[str, ...]:
        is_new = packed.digest not in self._host
        dropped = super().insert(packed)
        if is_new:
            assert isinstance(packed, SharedAdapter)
            assert packed.images is not None
            message = {
                "do": "keep",
                "digest": packed.digest,
                "num_bytes": packed.num_bytes,
                "shape": list(packed.entries.shape),
                "num_blocks": packed.num_blocks,
            }
            self._group.send(message, packed.images.file)
            packed.images.close_file()
        return dropped

    def _bring(self, packed: PackedAdapter, blocks: tuple[int, ...]) -> bool:
        after = self._reads.free_from
        message = {"do": "write", "digest": packed.digest, "blocks": blocks}
        self._group.send(message | {"after": after.number if isinstance(after, _Mark) else 0})
        return super()._bring(packed, blocks)

    def land_copies(self) -> None:
        """Lets the next step of the other ranks wait for their copies: those of this rank have
        ended, so there is hardly anything to wait for."""
        flying = tuple(self._arriving)
        super().land_copies()
        for digest in flying:
            if digest not in self._arriving:
                self._group.send({"do": "land", "digest": digest})

    def _forget(self, digest: str) -> None:
        super()._forget(digest)
        self._group.send({"do": "drop", "digest": digest})


@dataclass(frozen=True, slots=True)
class _Mark:
    """The end of the steps launched so far, on this rank and, by number, on the others."""

    event: Event
    number: int

    def query(self) -> bool:
        return self.event.query()

    def synchronize(self) -> None:
        self.event.synchronize()


class _GroupCopier:
    """Copies of the first rank, whose marks say how many launches come before them."""

    def __init__(self, copier: Copier, group: Group) -> None:
        self._copier, self._group = copier, group
        self.max_flying, self.max_bytes = copier.max_flying, copier.max_bytes

    def mark_steps(self) -> Event:
        return _Mark(self._copier.mark_steps(), self._group.num_launches)

    def copy(self, write: Callable[[], None], after: Event | None) -> Event:
        return self._copier.copy(write, after.event if isinstance(after, _Mark) else after)


class FollowerPool(AdapterPool):
    """Another rank's pool, which follows the messages. On CUDA its copies run beside the steps:
    each begins after the launches that read the same blocks, and the first step that may read
    it waits for its end."""

    def __init__(
        self,
        sites: Sequence[Site],
        bytes_budget: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        has_affine: bool,
        is_int8: bool = False,
    ) -> None:
        super().__init__(
            sites,
            bytes_budget,
            dtype,
            device,
            _ANY_NUMBER,
            has_affine=has_affine,
            is_int8=is_int8,
            allocate_host=_no_memory,
        )
        self._places: dict[str, tuple[int, ...]] = {}
        self._num_launches = 0
        self._launches: deque[tuple[int, Event]] = deque(maxlen=_MAX_MARKS)
        self._copied: dict[str, Event] = {}  # the ends of copies
        self._dropped: deque[tuple[PackedAdapter, Event]] = deque()  # while they are copied

    def note_launch(self) -> None:
        """Marks the end of the launches so far, as the first rank's `Group.num_launches`."""
        self._num_launches += 1
        if self._copier is not None:
            self._launches.append((self._num_launches, self._copier.mark_steps()))

    def keep(
        self,
        shard: Shard,
        digest: str,
        num_bytes: int,
        shape: tuple[int, int],  # [pages, strips] of the table
        num_blocks: int,
        file: int,
    ) -> None:
        """Maps this rank's image of an adapter. The file is closed."""
        stride = _stride(num_bytes)
        memory = Shared(stride * shard.size, file).tensor(stride * shard.rank, num_bytes)
        if self.device.type == "cuda":
            register(memory)
        entries = memory[num_bytes - 8 * shape[0] * shape[1] :].view(torch.int64).view(shape)
        packed = PackedAdapter(digest, memory, entries.clone(), num_blocks, frozenset())
        self._host.add(packed)

    def write(self, digest: str, blocks: Sequence[int], after: int) -> None:
        """Copies an adapter to its blocks, after so many launches. Those of others that they were
        are not read again."""
        self._places[digest] = tuple(blocks)
        self._deltas.pop(digest, None)
        write = partial(self._heap.write, self._host[digest], blocks)
        if self._copier is None:
            write()
            return
        # Of launches longer ago than those that are kept, the oldest kept one marks the end, too.
        end = next((event for number, event in self._launches if number >= after), None)
        self._copied[digest] = self._copier.copy(write, end if after else None)

    def land(self, digest: str) -> None:
        """Lets all that is launched from now on wait for the copy of an adapter."""
        end = self._copied.get(digest)
        if isinstance(end, torch.cuda.Event):
            torch.cuda.current_stream(self.device).wait_event(end)

    def drop(self, digest: str) -> None:
        packed, end = self._host[digest], self._copied.pop(digest, None)
        while self._dropped and self._dropped[0][1].query():
            self._dropped.popleft()
        if end is not None and not end.query():
            self._dropped.append((packed, end))
        self._host.drop(digest)
        self._places.pop(digest, None)
        self._deltas.pop(digest, None)

    def deltas(self, digest: str) -> Deltas:
        if digest not in self._deltas:
            self._deltas[digest] = self._heap.deltas(self._host[digest], self._places[digest])
        return self._deltas[digest]


def _stride(num_bytes: int) -> int:
    """Returns the distance of two ranks' images."""
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _copier(device: torch.device, group: Group) -> _GroupCopier | None:
    if device.type != "cuda":
        return None
    return _GroupCopier(CudaCopier(device, None, _MAX_BYTES_FLYING), group)


def _no_memory(num_bytes: int) -> torch.Tensor:
    raise AssertionError("images of ranks are in memory that they share")

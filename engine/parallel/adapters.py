"""The adapters of a group: the first rank's pool decides, and the others' hold the same blocks.

An adapter is read and checked once and packed for every rank: its images have the same layout and
size on all of them, so they lie side by side in one piece of memory that all ranks map. The pool of
the first rank is the real one; what it does to its blocks it sends before the next step, so a step
finds its adapters on every rank.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.parallel.channel import Shared
from engine.parallel.group import Group
from engine.parallel.shards import Shard
from lora.adapter import Adapter
from lora.heap import Deltas
from lora.page_image import PackedAdapter
from lora.pool import AdapterPool
from lora.sites import Site

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
        host_bytes: int,
        max_list: int,
        *,
        has_affine: bool,
    ) -> None:
        """`bytes_budget`: of each rank. `host_bytes`: of all ranks together."""
        super().__init__(
            shard.sites(),
            bytes_budget,
            dtype,
            "cpu",
            host_bytes // shard.size,
            max_list=max_list,
            has_affine=has_affine,
        )
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
            return images.tensor(stride * len(packed), num_bytes)

        for shard in self._shards:
            part = self._layout.pack(shard.adapter(adapter), allocate, self.reserved_bytes)
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
        self._group.send({"do": "write", "digest": packed.digest, "blocks": blocks})
        return super()._bring(packed, blocks)

    def _forget(self, digest: str) -> None:
        super()._forget(digest)
        self._group.send({"do": "drop", "digest": digest})


class FollowerPool(AdapterPool):
    """Another rank's pool, which does what it receives."""

    def __init__(
        self, sites: Sequence[Site], bytes_budget: int, dtype: torch.dtype, *, has_affine: bool
    ) -> None:
        super().__init__(sites, bytes_budget, dtype, "cpu", _ANY_NUMBER, has_affine=has_affine)
        self._places: dict[str, tuple[int, ...]] = {}

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
        entries = memory[num_bytes - 8 * shape[0] * shape[1] :].view(torch.int64).view(shape)
        packed = PackedAdapter(digest, memory, entries.clone(), num_blocks, frozenset())
        self._host.add(packed)

    def write(self, digest: str, blocks: Sequence[int]) -> None:
        """Copies an adapter to its blocks. Those of others that they were are not read again."""
        self._places[digest] = tuple(blocks)
        self._deltas.pop(digest, None)
        self._heap.write(self._host[digest], blocks)

    def drop(self, digest: str) -> None:
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

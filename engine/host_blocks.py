"""The KV blocks in host memory by the names of their content, and the device's blocks before them.

A slot of host memory holds the content of one block. It is *storing* while the copy from the device
is in flight, *idle* when it can be found and evicted, *held* while copies to the device read it.
Integers and bytes only: the copies are those of `engine.block_copies`, their order is that of
`engine.kv_offload`.

    free --reserve--> storing --stored--> idle (LRU) --hold--> held --release--> idle
     ^                                     |
     +------------ reserve of another -----+
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from engine.blocks import BlockPool


@dataclass(frozen=True, slots=True)
class KVHostLoad:
    """The state of the host tier of KV; all 0 without one. Counts are since the start."""

    num_blocks: int = 0
    num_used_blocks: int = 0
    hit_tokens: int = 0  # of `EngineLoad.prefix_hits`: the tokens whose KV came from the host
    stored_bytes: int = 0  # to the host
    loaded_bytes: int = 0  # to the device
    store_s: float = 0.0  # of the copies, as the device measures them
    load_s: float = 0.0
    num_dropped_blocks: int = 0  # evicted from the device before a copy of them had begun
    num_swapped_blocks: int = 0  # stored for preempted sequences


NO_KV_HOST = KVHostLoad()


class BlockCopy(Protocol):
    """One call's copies."""

    def query(self) -> bool:
        """Returns True if they have ended."""
        ...

    def synchronize(self) -> None: ...

    def seconds(self) -> float:
        """Returns the time that they took once they began; called after their end."""
        ...


class BlockCopier(Protocol):
    num_slots: int  # of host memory
    block_bytes: int

    def store(self, blocks: Sequence[int], slots: Sequence[int]) -> BlockCopy:
        """Copies blocks to slots of the host, after all steps launched so far."""
        ...

    def load(
        self, slots: Sequence[int], blocks: Sequence[int], *, in_parts: bool = False
    ) -> BlockCopy:
        """Copies slots of the host to blocks, after all steps launched so far. `in_parts`: of
        layers, the first ones first, where the layout of blocks allows it."""
        ...

    def hold_steps(self, copy: BlockCopy) -> None:
        """Has every step that is launched from now on begin after the copy and all before it. After
        a load in parts, they begin after the copies before it, and the next step reads each layer
        after the layer's part."""
        ...


class HostBlocks:
    """The index of the host's slots."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.on_evict: Callable[[bytes], None] = lambda name: None
        self._free = list(reversed(range(num_slots)))  # lowest first: neighbours are one copy
        self._storing: dict[bytes, int] = {}
        self._idle: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._held: dict[bytes, tuple[int, int]] = {}  # slot and references

    @property
    def num_used(self) -> int:
        return self.num_slots - len(self._free)

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def num_storing(self) -> int:
        return len(self._storing)

    def has(self, name: bytes) -> bool:
        """Returns True if the content can be copied to the device."""
        return name in self._idle or name in self._held

    def knows(self, name: bytes) -> bool:
        """Returns True if the content is here or on its way."""
        return self.has(name) or name in self._storing

    def reserve(self, name: bytes) -> int | None:
        """Returns the slot to store an unknown content to: a free one, or that of the content that
        was not used for longest. None: all others are storing or held."""
        assert not self.knows(name), "a block is stored twice"
        if self._free:
            slot = self._free.pop()
        elif self._idle:
            evicted, slot = self._idle.popitem(last=False)
            self.on_evict(evicted)
        else:
            return None
        self._storing[name] = slot
        return slot

    def stored(self, name: bytes) -> None:
        """Makes a content findable: its copy has landed."""
        self._idle[name] = self._storing.pop(name)

    def hold(self, name: bytes) -> int:
        """Returns the slot of a content, which stays until it is released as often as held."""
        slot, count = self._held[name] if name in self._held else (self._idle.pop(name), 0)
        self._held[name] = slot, count + 1
        return slot

    def release(self, name: bytes) -> None:
        slot, count = self._held.pop(name)
        if count > 1:
            self._held[name] = slot, count - 1
        else:
            self._idle[name] = slot


class OffloadedPool(BlockPool):
    """The device's blocks in front of a host tier, and the record of blocks that would be lost.

    The name of a prefix (`engine.prefix_digests`) stays known to routers while one of the tiers has
    its last block: a copy from the host is several times faster than computing.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        base_digest: str,
        host: HostBlocks,
    ) -> None:
        super().__init__(num_blocks, block_size, base_digest)
        self.on_take: Callable[[int], None] = lambda block: None  # before a block is written again
        self.num_dropped = 0  # blocks that were evicted though no copy of them had begun
        self._host = host
        self._unsaved: set[int] = set()  # idle, and unknown to the host
        self._prefix_on_host: dict[bytes, int] = {}  # contents that the device has evicted
        host.on_evict = self._lose_on_host

    def next_unsaved(self, count: int) -> tuple[int, ...]:
        """Returns the blocks among the next `count` to be allocated whose content the host lacks,
        the next to be evicted first."""
        if not self._unsaved:
            return ()
        next_evicted = islice(self._idle, max(0, count - len(self._empty)))
        return tuple(block for block in next_evicted if block in self._unsaved)

    def note_stored(self, block: int) -> None:
        """Notes that a copy of the block has begun."""
        self._unsaved.discard(block)

    def name_of(self, block: int) -> bytes | None:
        """Returns the name of a findable block."""
        return self._hash_of[block]

    def hold(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._unsaved.discard(block)
        super().hold(blocks)

    def release(self, blocks: Sequence[int]) -> None:
        super().release(blocks)
        for block in blocks:
            name = self._hash_of[block]
            if name is not None and block in self._idle and not self._host.knows(name):
                self._unsaved.add(block)

    def name_prefix(self, block: int, digest: int) -> None:
        super().name_prefix(block, digest)
        name = self._hash_of[block]
        assert name is not None
        self._prefix_on_host.pop(name, None)

    def _lose_prefix(self, block_hash: bytes, digest: int) -> None:
        if self._host.knows(block_hash):
            self._prefix_on_host[block_hash] = digest
        else:
            super()._lose_prefix(block_hash, digest)

    def _lose_on_host(self, name: bytes) -> None:
        block = self._block_of.get(name)
        if block is not None and block in self._idle:
            self._unsaved.add(block)
        digest = self._prefix_on_host.pop(name, None)
        if digest is not None:
            super()._lose_prefix(name, digest)

    def _take(self) -> int:
        block = super()._take()
        if block in self._unsaved:
            self._unsaved.remove(block)
            self.num_dropped += 1
        self.on_take(block)
        return block

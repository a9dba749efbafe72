"""The host tier of KV: blocks are stored before the device evicts them and loaded when found again.

    device, idle --store ahead of eviction--> host --load while the sequence waits--> device, idle
    device, of a preempted sequence --store at once--> host --load, as any prefix--> device, idle

Stores take the idle blocks that are next in line for eviction, and only while the next steps could
allocate blocks that the host lacks. To store each block when it is published would write all blocks
over the bus, and fill a host tier that is smaller than the device's cache with copies of blocks
that the device has anyway: so the two tiers add up, and an engine whose device has room copies
nothing.
Blocks that are evicted before a copy of them has begun are lost, and counted.

A sequence whose prefix continues on the host waits for its copies as others wait for adapters:
younger ones pass, within the blocks that it leaves. Loaded blocks are published when their copy has
landed and not before, and the sequence then finds them as any cached prefix. If there is no other
request, a step that waits on the device holds up none: the blocks are published at once, and the
step computes the first layers while the last ones arrive. A preempted sequence is no special
case: its full blocks are findable, they are stored before they can be evicted, and it returns as a
sequence with a long prefix.

Copies are ordered on the device. A store reads blocks whose steps are committed, and which no step
writes until they are allocated again; the steps after such an allocation then wait for the store on
the device. A load writes blocks that no sequence holds when it begins, after all steps launched
before. Integers only; one thread calls it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from engine.block_tables import BlockTables
from engine.blocks import BlockPool
from engine.config import EngineConfig
from engine.host_blocks import (
    BlockCopier,
    BlockCopy,
    HostBlocks,
    KVHostLoad,
    OffloadedPool,
)
from engine.host_tables import HostBlock, HostHit, HostTables
from engine.step_cost import StepCost
from engine.types import EngineLoad, Runner, Sequence
from engine.window_tables import make_tables

# Copies beside steps slow them down: on an H200 a copy at 50 GB/s beside matrix products by a
# fifth. Stores are paced by the allocations that they precede, 5 GB/s where prompts of Llama-3-8B
# fill the device; loads by the bytes in flight between two steps, 5 ms of them.
_LOAD_BYTES = 256 * 1024**2
_AWAITED_BYTES = 1024**3  # for which a step waits on the device: 20 ms
_SAVED_STEPS = 2  # steps whose allocations lose no block: the stores of a step end beside the next
_SWAP_BATCH = 16  # blocks of a copy; a step that needs one of them waits for its copy alone
_NEWEST = 0.2  # weight of the newest copy in the mean of a block's seconds
Wait = Literal["none", "loading", "full"]


@dataclass(frozen=True, slots=True)
class _Store:
    copy: BlockCopy
    blocks: tuple[int, ...]
    names: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class _Load:
    copy: BlockCopy
    sequence: Sequence  # whose tokens name the prefixes; it may have ended meanwhile
    kept: tuple[int, ...]  # the blocks of its prefix on the device, which would be useless alone
    found: tuple[HostBlock, ...]
    blocks: tuple[int, ...]  # one for each found
    is_awaited: bool  # its blocks are published, and the next step waits for them


class KVOffload:
    def __init__(
        self,
        pool: OffloadedPool,
        host: HostBlocks,
        tables: HostTables,
        copier: BlockCopier,
        cost: StepCost,
        step_blocks: int,
    ) -> None:
        """`step_blocks`: the most blocks that a step allocates."""
        self._pool, self._host, self._tables = pool, host, tables
        self._copier, self._cost = copier, cost
        self._stores: deque[_Store] = deque()  # in flight, in the order of their begin
        self._loads: deque[_Load] = deque()
        self._store_of: dict[int, _Store] = {}  # in flight, by the block that is read
        self._loading: set[bytes] = set()
        self._num_loading = 0  # blocks in flight
        self._is_for_load = False  # the allocation that takes place
        self._most_loading = max(1, _LOAD_BYTES // copier.block_bytes)
        self._most_awaited = _AWAITED_BYTES // copier.block_bytes
        self._is_awaited = False  # a load, by the next step
        self._step_blocks = step_blocks
        # Allocations that must lose no block; with more, a small host would store some in turns.
        self._num_ahead = min(host.num_slots, _SAVED_STEPS * step_blocks)
        self._store_block_s = self._load_block_s = 0.0  # means; 0: unknown
        self._counts = KVHostLoad(num_blocks=host.num_slots)
        pool.on_take = self._before_write

    @property
    def has_pending_loads(self) -> bool:
        """Returns True if a sequence that waits for a load may be admitted after the next
        `begin_step`."""
        return bool(self._loads)

    def begin_step(self) -> None:
        """Makes blocks whose copies have ended findable, and stores the next to be evicted."""
        self._tables.num_reserved = 0
        self._land()
        self._store_next(self._num_ahead)

    def wait(self) -> None:
        """Blocks until the next `begin_step` finds a load that has ended."""
        if self._loads:
            self._loads[0].copy.synchronize()

    def drain(self) -> bool:
        """Waits for all loads and frees the blocks that they hold. Returns False if there was
        none."""
        if not self._loads:
            return False
        self._loads[-1].copy.synchronize()
        self._land()
        return True

    def takes_wait(self) -> bool:
        """Returns True if the step that is launched now waits for a load, which no other does."""
        is_awaited, self._is_awaited = self._is_awaited, False
        return is_awaited

    def wait_for(self, sequence: Sequence, *, is_alone: bool = False) -> Wait:
        """Begins to load the part of a waiting sequence's prefix that only the host has, if it has
        room for the whole sequence and a load is cheaper than computing.

        `is_alone`: there is no other request. Returns "none" if nothing is to be loaded or the next
        step waits for it, "loading" if the sequence waits for copies, and "full" if no further copy
        can begin in this step.
        """
        if not self._pool.num_free or not self._host.num_used:
            return "none"
        hit = self._tables.find_on_host(sequence, self._host)
        if hit is None or not self._pays(hit):
            return "none"
        needed = self._tables.blocks_to_allocate(sequence, hit)
        idle = sum(map(self._pool.is_idle, hit.kept))
        if needed + idle + self._tables.num_reserved > self._pool.num_free:
            return "none"  # it cannot be placed either
        missing = [one for one in hit.found if one.name not in self._loading]
        if is_alone and len(hit.found) == len(missing) <= self._most_awaited:
            in_step = min(needed, len(hit.found) + self._step_blocks)
            self._load(sequence, hit.kept, hit.found, in_step, is_awaited=True)
            sequence.num_host_tokens = max(sequence.num_host_tokens, hit.num_tokens)
            return "none"
        started = tuple(missing[: max(0, self._most_loading - self._num_loading)])
        if missing and not started:
            return "full"
        if started:
            self._load(sequence, hit.kept, started, len(started), is_awaited=False)
        sequence.num_host_tokens = max(sequence.num_host_tokens, hit.num_tokens)
        self._tables.num_reserved += needed - len(started)
        return "loading"

    def swap_out(self, sequence: Sequence) -> None:
        """Stores the blocks of a running sequence that is about to be preempted, unless it is
        cheaper to compute them again. They stay findable on the device until they are evicted."""
        pool = self._pool
        wanted = [
            block
            for block in self._tables.held_blocks(sequence)
            if pool.num_references(block) == 1 and self._is_lost_with(block)
        ]
        copy_s = len(wanted) * (self._store_block_s + self._load_block_s)
        if copy_s > len(wanted) * self._tables.tokens_per_block * self._token_s:
            return
        # The end of the sequence is evicted first: it is stored first, in copies of its own.
        wanted.reverse()
        for start in range(0, len(wanted), _SWAP_BATCH):
            count = self._store(wanted[start : start + _SWAP_BATCH])
            self._count(num_swapped_blocks=count)

    def with_counts(self, load: EngineLoad) -> EngineLoad:
        counts = replace(
            self._counts,
            num_used_blocks=self._host.num_used,
            hit_tokens=self._tables.host_hits,
            num_dropped_blocks=self._pool.num_dropped,
        )
        return replace(load, kv_host=counts)

    @property
    def _token_s(self) -> float:
        """The seconds to compute a token of a prompt; infinite while unknown, as copies are
        cheaper on every device so far."""
        return self._cost.added_token_s or self._cost.token_s or float("inf")

    def _pays(self, hit: HostHit) -> bool:
        """Returns True if the copies take less of the device's time than the computation."""
        copied = sum(one.name not in self._loading for one in hit.found)
        return copied * self._load_block_s <= hit.num_tokens * self._token_s

    def _is_lost_with(self, block: int) -> bool:
        name = self._pool.name_of(block)
        return name is not None and not self._host.knows(name)

    def _store_next(self, num_allocations: int) -> None:
        """Begins to store the blocks that the next allocations evict, and again if the host dropped
        others of these blocks for them."""
        while self._store(self._pool.next_unsaved(num_allocations)):
            pass

    def _store(self, blocks: Iterable[int]) -> int:
        """Begins to copy findable blocks to the host, as many as there is room for, and returns
        their number."""
        taken: list[tuple[int, bytes, int]] = []
        for block in blocks:
            name = self._pool.name_of(block)
            assert name is not None, f"block {block} has no content to store"
            slot = self._host.reserve(name)
            if slot is None:
                break
            self._pool.note_stored(block)
            taken.append((block, name, slot))
        if not taken:
            return 0
        stored, names, slots = zip(*taken, strict=True)
        store = _Store(self._copier.store(stored, slots), stored, names)
        self._stores.append(store)
        self._store_of |= dict.fromkeys(stored, store)
        return len(stored)

    def _load(
        self,
        sequence: Sequence,
        kept: tuple[int, ...],
        found: tuple[HostBlock, ...],
        num_allocations: int,
        *,
        is_awaited: bool,
    ) -> None:
        """`num_allocations`: for the sequence in this step, with the blocks of the load. The load
        follows their stores."""
        self._pool.hold(kept)  # before the allocation, which evicts idle blocks
        slots = [self._host.hold(one.name) for one in found]
        self._store_next(num_allocations)  # a load may be larger than a step
        self._is_for_load = True
        taken = sorted(self._pool.allocate(len(found)))
        self._is_for_load = False
        # Any block will do for any slot, and neighbours are one copy: both in order.
        block_of = dict(zip(sorted(slots), taken, strict=True))
        copy = self._copier.load(tuple(block_of), taken, in_parts=is_awaited)
        blocks = tuple(block_of[slot] for slot in slots)
        load = _Load(copy, sequence, kept, found, blocks, is_awaited)
        self._loads.append(load)
        self._loading |= {one.name for one in found}
        self._num_loading += len(found)
        if is_awaited:
            self._copier.hold_steps(copy)
            self._publish(load)
            self._is_awaited = True

    def _publish(self, load: _Load) -> None:
        for one, block in zip(load.found, load.blocks, strict=True):
            self._loading.discard(one.name)
            self._tables.publish_loaded(load.sequence, one, block)

    def _land(self) -> None:
        while self._stores and self._stores[0].copy.query():
            store = self._stores.popleft()
            for block, name in zip(store.blocks, store.names, strict=True):
                self._host.stored(name)
                if self._store_of.get(block) is store:
                    del self._store_of[block]
            self._store_block_s = self._observe(store.copy, len(store.blocks), stored=True)
        while self._loads and self._loads[0].copy.query():
            load = self._loads.popleft()
            if not load.is_awaited:
                self._publish(load)
            for one in reversed(load.found):  # the tail of a prefix is evicted before its head
                self._host.release(one.name)
            self._num_loading -= len(load.blocks)
            self._pool.release((*load.kept, *load.blocks))
            self._load_block_s = self._observe(load.copy, len(load.blocks), stored=False)

    def _observe(self, copy: BlockCopy, num_blocks: int, *, stored: bool) -> float:
        """Counts an ended copy. Returns the new mean of the seconds of a block."""
        seconds, num_bytes = copy.seconds(), num_blocks * self._copier.block_bytes
        if stored:
            self._count(stored_bytes=num_bytes, store_s=seconds)
        else:
            self._count(loaded_bytes=num_bytes, load_s=seconds)
        mean_s = self._store_block_s if stored else self._load_block_s
        return mean_s + (seconds / num_blocks - mean_s) * (_NEWEST if mean_s else 1.0)

    def _count(self, **added: float) -> None:
        counts = {name: getattr(self._counts, name) + more for name, more in added.items()}
        self._counts = replace(self._counts, **counts)

    def _before_write(self, block: int) -> None:
        """Has the steps that will write an allocated block wait for the copy that reads it. Steps
        write no block of a load before it has landed, and the copies themselves are in order."""
        store = self._store_of.pop(block, None)
        if store is not None and not self._is_for_load:
            self._copier.hold_steps(store.copy)


def open_tables(
    config: EngineConfig, runner: Runner, num_uncommitted: int, cost: StepCost
) -> tuple[BlockPool, BlockTables, KVOffload | None]:
    """Returns the device's blocks, the tables of sequences, and the host tier, if there is one.
    `num_uncommitted`: see `engine.kv_layout`."""
    num_blocks, layout, copier = runner.num_blocks, runner.kv_layout, runner.kv_copies
    if copier is None:
        can_share = config.enable_prefix_caching
        blocks = BlockPool(num_blocks, config.block_size, config.base_digest, can_share=can_share)
        return blocks, make_tables(blocks, layout, num_uncommitted), None
    host = HostBlocks(copier.num_slots)
    pool = OffloadedPool(num_blocks, config.block_size, config.base_digest, host)
    tables = HostTables(pool, layout, num_uncommitted)
    step_blocks = math.ceil(config.max_num_batched_tokens / tables.tokens_per_block)
    step_blocks += config.max_num_seqs  # each may begin a block with one token
    return pool, tables, KVOffload(pool, host, tables, copier, cost, step_blocks)

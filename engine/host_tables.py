"""The block tables of an engine with a host tier of KV: prefixes that continue on the host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from engine.blocks import BlockPool
from engine.host_blocks import HostBlocks
from engine.kv_layout import KVLayout
from engine.types import Sequence
from engine.window_tables import WindowTables

_ON_HOST = -1  # instead of a block of the device


@dataclass(frozen=True, slots=True)
class HostBlock:
    """A block of a sequence's prefix that only the host has."""

    name: bytes
    group: int  # of layers, see `engine.kv_layout`
    index: int  # among the sequence's blocks of the group


@dataclass(frozen=True, slots=True)
class HostHit:
    """A prefix that is longer than the device's with blocks of the host."""

    end: int  # tokens of the prefix
    num_tokens: int  # of these, beyond what the device has
    kept: tuple[int, ...]  # its blocks on the device
    found: tuple[HostBlock, ...]  # in the order of each group


class _BothTiers:
    """The index of the device and the host."""

    def __init__(self, pool: BlockPool, host: HostBlocks) -> None:
        self._pool, self._host = pool, host

    def find_one(self, block_hash: bytes) -> int | None:
        block = self._pool.find_one(block_hash)
        return _ON_HOST if block is None and self._host.has(block_hash) else block

    def find(self, chain: Iterable[bytes]) -> list[int]:
        found: list[int] = []
        for block_hash in chain:
            block = self.find_one(block_hash)
            if block is None:
                break
            found.append(block)
        return found


class HostTables(WindowTables):
    def __init__(self, pool: BlockPool, layout: KVLayout, num_uncommitted: int) -> None:
        super().__init__(pool, layout, num_uncommitted)
        self.host_hits = 0  # tokens of `prefix_hits` whose KV came from the host

    @property
    def tokens_per_block(self) -> float:
        """The tokens of a block of all layers: with two groups of layers, of the blocks of both."""
        return 1 / sum(1 / group.size for group in self._layout.groups)

    def find_on_host(self, sequence: Sequence, host: HostBlocks) -> HostHit | None:
        """Returns the longest prefix of both tiers, or None if the device has one as long."""
        end, blocks = self._find_hit(sequence, _BothTiers(self.pool, host))
        if not any(_ON_HOST in of_group for of_group in blocks):
            return None
        num_tokens = end - self._find_hit(sequence)[0]
        if num_tokens <= 0:
            return None  # in parts of a window, at most
        found: list[HostBlock] = []
        for (group, layers), of_group in zip(self._groups, blocks, strict=True):
            first = layers.first_needed(end)
            for index, block in enumerate(of_group, first):
                if block == _ON_HOST:
                    found.append(HostBlock(self._name(sequence, group, index), group, index))
        kept = tuple(b for of_group in blocks for b in of_group if b != _ON_HOST)
        return HostHit(end, num_tokens, kept, tuple(found))

    def blocks_to_allocate(self, sequence: Sequence, hit: HostHit) -> int:
        """Returns the most blocks that a sequence with this prefix needs beside the prefix's blocks
        on the device."""
        return self._most_blocks(len(sequence.token_ids), hit.end) - len(hit.kept)

    def publish_loaded(self, sequence: Sequence, one: HostBlock, block: int) -> None:
        """Makes a held block findable into which the content of the host was copied."""
        is_new = self.pool.publish(block, one.name)
        if is_new and one.group == 0 and (one.index + 1) % self._blocks_per_chunk == 0:
            num_chunks = (one.index + 1) // self._blocks_per_chunk
            self.pool.name_prefix(block, self._digest_of(sequence, num_chunks))

    def held_blocks(self, sequence: Sequence) -> Iterator[int]:
        """Yields the blocks that a running sequence holds, of each group in order."""
        for index, _ in self._groups:
            yield from self._blocks(sequence, index)

    def _begin(self, sequence: Sequence, num_cached: int) -> None:
        if sequence.num_preemptions == 0 and self.can_share(sequence):
            self.host_hits += min(sequence.num_host_tokens, num_cached)
        super()._begin(sequence, num_cached)

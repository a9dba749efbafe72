"""The block tables of models with windows: as `BlockTables`, for one or two groups of layers, and
for blocks whose entries are not their numbers.

A windowed group holds the blocks from the first key that the next query to be committed can see.
When a step is committed, the blocks that its successor does not read are dropped: their entries
point to a null block from then on. Steps are committed in order, at most one is launched beyond the
committed one, and it begins where that ended: no launched step reads a dropped block. Blocks are
published before they are dropped, so that they can be found until they are evicted.

A prefix is in the cache up to a token if the full group has all its blocks and the windowed group
the blocks that a query at that token reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Protocol

from engine.block_tables import BlockTables
from engine.blocks import BlockPool
from engine.kv_layout import KVLayout
from engine.prefix_digests import chunk_size
from engine.types import Sequence

# After the hash of a chain, in the name of a block of the second group.
_GROUP_NAMES = (b"", b"w")
Hit = tuple[int, list[list[int]]]  # tokens, and the blocks of each group


class BlockIndex(Protocol):
    """A lookup of blocks by their names. `engine.blocks.BlockPool` implements it."""

    def find_one(self, block_hash: bytes) -> int | None: ...
    def find(self, chain: Iterable[bytes]) -> list[int]: ...


class WindowTables(BlockTables):
    def __init__(self, pool: BlockPool, layout: KVLayout, num_uncommitted: int) -> None:
        """`num_uncommitted`: see `engine.kv_layout`."""
        super().__init__(pool)
        self._layout = layout
        self._groups = tuple(enumerate(layout.groups))
        self.num_groups = len(layout.groups)
        self._windowed = len(layout.groups) - 1  # the group with the window, if there is one
        self._has_full = layout.groups[0].window is None
        # Blocks that the next placements leave: promised to sequences that wait for their KV.
        self.num_reserved = 0
        self._num_uncommitted = num_uncommitted
        self._null = layout.entry(self._windowed, pool.num_blocks)
        self._chunk = chunk_size(layout.hit_size)
        self._blocks_per_chunk = self._chunk // layout.groups[0].size

    def place(self, sequence: Sequence, budget: int) -> int:
        num_cached, hits = self._find_hit(sequence)
        held = [block for blocks in hits for block in blocks]
        wanted = self._most_blocks(len(sequence.token_ids), num_cached) - len(held)
        if wanted + sum(map(self.pool.is_idle, held)) > self.pool.num_free - self.num_reserved:
            return 0
        count = min(len(sequence.token_ids) - num_cached, budget)
        self.pool.hold(held)
        sequence.num_dropped = self._num_unneeded(num_cached)
        _table(sequence, self._windowed).extend([self._null] * sequence.num_dropped)
        for (index, _), blocks in zip(self._groups, hits, strict=True):
            _table(sequence, index).extend(self._layout.entries(index, blocks))
        has_room = self.grow(sequence, num_cached + count)
        assert has_room, "a placed sequence has room for its first chunk"
        self._begin(sequence, num_cached)
        return count

    def num_missing(self, sequence: Sequence, num_tokens: int) -> int:
        return sum(self._missing(sequence, num_tokens))

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        missing = self._missing(sequence, num_tokens)
        if not any(missing):
            return True
        if sum(missing) > self.pool.num_free:
            return False
        for (index, _), count in zip(self._groups, missing, strict=True):
            entries = self._layout.entries(index, self.pool.allocate(count))
            _table(sequence, index).extend(entries)
        return True

    def _missing(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """Returns the number of blocks to allocate for each group."""
        return [
            max(0, group.blocks_for(num_tokens) - len(_table(sequence, index)) // group.num_spans)
            for index, group in self._groups
        ]

    def commit(self, sequence: Sequence, start: int, end: int) -> None:
        """Makes the blocks that a step filled with these positions available to other sequences,
        and frees those that no later query sees."""
        if self.pool.can_share:
            self._publish(sequence, start, end)
        unneeded = self._num_unneeded(end)
        if unneeded > sequence.num_dropped:
            dropped = list(self._blocks(sequence, self._windowed, unneeded))
            table = _table(sequence, self._windowed)
            table[sequence.num_dropped : unneeded] = [self._null] * (
                unneeded - sequence.num_dropped
            )
            sequence.num_dropped = unneeded
            self.pool.release(dropped[::-1])  # hits need the last of them: evicted at the end

    def release(self, sequence: Sequence) -> None:
        placed = []  # (first token, block): the end of a prefix is evicted before its beginning
        for index, group in self._groups:
            first = self._first_live(sequence, index) // group.num_spans
            for i, block in enumerate(self._blocks(sequence, index), first):
                placed.append((i * group.size, block))
        self.pool.release([block for _, block in sorted(placed)])
        sequence.block_table, sequence.window_table = [], []
        sequence.num_dropped = 0

    def _publish(self, sequence: Sequence, start: int, end: int) -> None:
        if end // self.pool.block_size == start // self.pool.block_size:
            return
        self._extend_chain(sequence, end)
        for index, group in self._groups:
            table = _table(sequence, index)
            for i in range(start // group.size, end // group.size):
                block = table[i * group.num_spans] // self._layout.stride
                is_new = self.pool.publish(block, self._name(sequence, index, i))
                if is_new and index == 0 and (i + 1) % self._blocks_per_chunk == 0:
                    self.pool.name_prefix(block, self._prefix_digest(sequence, i))

    def _find_hit(self, sequence: Sequence, index: BlockIndex | None = None) -> Hit:
        """Returns the longest prefix in the cache, or in another index, without the very last
        token. Lazily: as many names are looked up as blocks are found, and one for each window's
        length without one."""
        nothing: Hit = 0, [[] for _ in self._groups]
        index = self.pool if index is None else index
        if not self.can_share(sequence):
            return nothing
        size, last = self._layout.hit_size, len(sequence.token_ids) - 1
        self._extend_chain(sequence, last)
        end = last // size * size
        full: list[int] = []
        if self._has_full:
            group = self._layout.groups[0]
            spans, stop = group.num_spans, end // self.pool.block_size
            full = index.find(islice(sequence.block_hashes, spans - 1, stop, spans))
            end = len(full) * group.size // size * size
            if not self._layout.has_windows:
                return end, [full]
        end, windowed = self._find_window(sequence, end, index)
        if not end:
            return nothing
        if not self._windowed:
            return end, [windowed]
        return end, [full[: end // self._layout.groups[0].size], windowed]

    def _find_window(
        self, sequence: Sequence, end: int, index: BlockIndex
    ) -> tuple[int, list[int]]:
        """Returns the largest number of tokens up to `end` whose last window is in the cache, and
        its blocks. A missing block rules out every end within a window after it: the first block of
        a window is looked up first, to go back as far as possible."""
        group, size = self._layout.groups[self._windowed], self._layout.hit_size
        while end:
            found: list[int] = []
            for i in range(group.first_needed(end), end // group.size):
                block = index.find_one(self._name(sequence, self._windowed, i))
                if block is None:
                    end = i * group.size // size * size
                    break
                found.append(block)
            else:
                return end, found
        return 0, []

    def _most_blocks(self, num_tokens: int, num_cached: int) -> int:
        """Returns the most blocks that a sequence with a cached prefix holds at a time until it has
        so many tokens."""
        most = 0.0
        for _, group in self._groups:
            count = group.blocks_for(num_tokens) - group.first_needed(num_cached)
            most += min(count, group.most_blocks(self._num_uncommitted))
        return int(most)

    def _num_unneeded(self, position: int) -> int:
        """Returns the entries of the windowed group whose keys no query from here on sees."""
        group = self._layout.groups[self._windowed]
        return group.first_needed(position) * group.num_spans

    def _name(self, sequence: Sequence, index: int, block: int) -> bytes:
        spans = self._layout.groups[index].num_spans
        return sequence.block_hashes[(block + 1) * spans - 1] + _GROUP_NAMES[index]

    def _first_live(self, sequence: Sequence, index: int) -> int:
        return sequence.num_dropped if index == self._windowed else 0

    def _blocks(self, sequence: Sequence, index: int, end: int | None = None) -> Iterator[int]:
        """Yields the blocks that a sequence holds for a group, up to an entry of its table."""
        first, spans = self._first_live(sequence, index), self._layout.groups[index].num_spans
        for entry in _table(sequence, index)[first:end:spans]:
            yield entry // self._layout.stride

    def _block(self, sequence: Sequence, index: int) -> int:
        spans = self._layout.groups[0].num_spans
        return sequence.block_table[index * spans] // self._layout.stride


def make_tables(pool: BlockPool, layout: KVLayout, num_uncommitted: int) -> BlockTables:
    if layout.has_windows:
        return WindowTables(pool, layout, num_uncommitted)
    return BlockTables(pool)


def _table(sequence: Sequence, group: int) -> list[int]:
    return sequence.window_table if group else sequence.block_table

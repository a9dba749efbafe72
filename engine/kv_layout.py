"""The layout of KV blocks: which layers share a block table, and how many blocks a sequence needs.

Layers whose queries see every key and layers with a window are two groups, each with a block table
of its own: blocks of the windowed group are freed when the window has passed them. Both take their
blocks from one pool, so all blocks have equal bytes, as in vLLM's hybrid KV cache manager. A block
is a row of *layer blocks*, `block_size` tokens of one layer. The larger group fills a block with
`block_size` tokens; the smaller one has several such *spans* in a block, of consecutive tokens.
Gemma 3 4B, 5 full and 29 windowed layers, 30 layer blocks:

    windowed block   | 29 layers of 16 tokens                                        |  |
    full block       | 5 layers | 5 layers | 5 layers | 5 layers | 5 layers | 5 layers |   96 tokens

An entry of a block table is the number of a span's first layer block. A layer's tensors begin with
its place in a span, so that all layers of a group read one table. A model with one group of layers
has one tensor per layer, and its entries are block numbers, unless blocks are contiguous.

A contiguous block is one piece of memory, to be copied at once: the layer blocks of K, then those
of V. Layers then have views of one tensor in models of one group, too, so kernels see the same
tensors as in models of two groups: contiguous ones, with tables whose entries are not block
numbers.
Free of tensors.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """The layers that share a block table."""

    layers: tuple[int, ...]
    window: int | None  # tokens that a query sees, itself included; None: all
    num_spans: int  # of a block
    size: int  # tokens of a block

    def first_needed(self, position: int) -> int:
        """Returns the index of the first block that holds a key for a query at this position or a
        later one."""
        return 0 if self.window is None else max(0, position - self.window + 1) // self.size

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.size)

    def most_blocks(self, num_uncommitted: int) -> float:
        """Returns the most blocks of a sequence at a time, whatever its length: the blocks of the
        window before its uncommitted tokens, and of these tokens."""
        if self.window is None:
            return float("inf")
        return (self.window - 1 + num_uncommitted + 2 * self.size - 2) // self.size


@dataclass(frozen=True, slots=True)
class KVLayout:
    block_size: int  # tokens of a layer block, and of an entry of a block table
    groups: tuple[LayerGroup, ...]  # full before windowed
    stride: int  # entries per block: from a block to the next in the tables' numbers
    num_layer_blocks: int  # of a block, of K or of V
    is_contiguous: bool = False  # a block is one piece of memory, K before V

    @property
    def has_windows(self) -> bool:
        return self.groups[-1].window is not None

    @property
    def num_null_blocks(self) -> int:
        """The blocks behind the pool's own to which freed entries point: zeros, never written.
        Kernels read whole tiles and mask the keys before a window, which must be finite."""
        return int(self.has_windows)

    @property
    def hit_size(self) -> int:
        """The tokens of which a prefix found in the cache is a multiple."""
        return max(group.size for group in self.groups)

    def entry(self, group: int, block: int, span: int = 0) -> int:
        """Returns the entry of a block table for a span of a block."""
        step = len(self.groups[group].layers) if len(self.groups) > 1 else 0
        return block * self.stride + span * step

    def entries(self, group: int, blocks: Sequence[int]) -> list[int]:
        """Returns the entries of whole blocks, in order."""
        if self.stride == 1:
            return list(blocks)
        spans = range(self.groups[group].num_spans)
        return [self.entry(group, block, span) for block in blocks for span in spans]

    def blocks_needed(self, num_tokens: int, num_uncommitted: int) -> int:
        """Returns the most blocks that a sequence holds at a time until it has so many tokens.
        `num_uncommitted`: the tokens of one sequence in steps that are launched or scheduled and
        not committed, at most."""
        return sum(
            int(min(group.blocks_for(num_tokens), group.most_blocks(num_uncommitted)))
            for group in self.groups
        )

    def longest(self, num_blocks: int, num_uncommitted: int, max_model_len: int) -> int:
        """Returns the tokens of the longest sequence that all blocks hold, at most
        `max_model_len`."""
        lengths = range(1, max_model_len + 1)
        return bisect_right(
            lengths, num_blocks, key=lambda length: self.blocks_needed(length, num_uncommitted)
        )

    def num_tokens(self, num_blocks: int, num_uncommitted: int, max_model_len: int) -> int:
        """Returns the tokens that all blocks hold. With windows it depends on the lengths of the
        sequences, and is given for sequences of twice the window, or for one of the longest if
        that has more."""
        if not self.has_windows:
            return num_blocks * self.block_size
        window = self.groups[-1].window
        assert window is not None
        usual = min(2 * window, max_model_len)
        # Few of many sequences compute a chunk of their prompt at a time.
        count = num_blocks // self.blocks_needed(usual, 1)
        return max(count * usual, self.longest(num_blocks, num_uncommitted, max_model_len))


def kv_layout(
    windows: Sequence[int | None],  # one per layer
    block_size: int,
    max_model_len: int,
    *,
    is_contiguous: bool = False,
) -> KVLayout:
    """Returns the layout for sequences of up to `max_model_len` tokens: a window of as many hides
    no key. Layers have one window or none. `is_contiguous`: with each block in one piece."""
    full: list[int] = []
    windowed: list[int] = []
    for layer, window in enumerate(windows):
        (full if window is None or window >= max_model_len else windowed).append(layer)
    window = windows[windowed[0]] if windowed else None
    assert all(windows[layer] == window for layer in windowed), f"several windows: {windows}"
    kinds = [(tuple(layers), w) for layers, w in ((full, None), (windowed, window)) if layers]
    if len(kinds) == 1:
        group = LayerGroup(*kinds[0], 1, block_size)
        stride = 2 * len(windows) if is_contiguous else 1
        return KVLayout(block_size, (group,), stride, len(windows), is_contiguous)
    counts = [len(layers) for layers, _ in kinds]
    room = _layer_blocks(*counts)
    groups = tuple(
        LayerGroup(layers, w, room // len(layers), room // len(layers) * block_size)
        for layers, w in kinds
    )
    return KVLayout(block_size, groups, 2 * room if is_contiguous else room, room, is_contiguous)


def _layer_blocks(*counts: int) -> int:
    """Returns the layer blocks of a block for two groups of so many layers: as many as the larger
    group has, or more where the smaller one then wastes less."""

    def waste(room: int) -> float:
        product = 1.0
        for count in counts:
            product *= room / (room // count * count)
        return product

    return min(range(max(counts), 2 * max(counts)), key=waste)


def num_uncommitted(max_num_batched_tokens: int, *, runs_ahead: bool) -> int:
    """Returns the most tokens of one sequence in steps that are not committed when the next step
    has its blocks: the tokens of that step and of the step that runs."""
    return max_num_batched_tokens * (2 if runs_ahead else 1)

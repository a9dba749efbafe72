"""The inputs of attention for one step, as static device tensors: the keys that each query reads.

The host writes them once per step (`write_work`) and all layers share them; a CUDA graph captured
over these tensors stays right when their contents change. A sequence with one query is a row of
*items*, stretches of its keys that are processed apart and merged; a sequence with several is a row
of *tiles*, TILE_ROWS (query, head) pairs each. Both lists are heaviest first. In a plan of decodes
with drafts, whose `max_queries` is above 1, sequences of up to so many queries are items as well.

Layers with a window need no items: their kernels cut the keys of each window themselves.

The cuts of a sequence depend on its own length, and on whether the step has few sequences, where
more items are needed to occupy the device: a decode result is the same to the last bit in all steps
with few sequences, and in all steps with many. Queries that attend together have the cuts of the
last one. Uses numpy and tensors; the kernels are elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kernels.lora_runs import count_within, spread

Ints = npt.NDArray[np.int32]

TILE_ROWS = 128  # (query, head of a group) pairs per prefill program
HEADER = 4  # [num_items, sequences, 1 if they are few, num_tiles]
# [sequence, first key, last key + 1, (first slot << 9) + (split << 5) + splits]: int32 holds the
# slots of 262,144 sequences
ITEM = 4
TILE = 2  # [sequence, first row of q]
# Keys per item, unless the sequence is shorter. Per layer of Llama-3-8B on an H200, 1 x 1024 keys
# and 64 x 1024: 8.0 and 76.9 us in items of 256, 10.4 and 72.8 of 512, 13.8 and 67.4 of 1024.
MIN_CHUNK = 1024
MIN_CHUNK_OF_FEW = 256
FEW = 64  # sequences times KV heads; 16 x 2048 keys: 43 us in items of 256, 38 of 1024
CHUNK_STEP = 64  # a chunk is a multiple: no tile of keys crosses two items
MAX_SPLITS = 16
LOG2_E = 1.4426950408889634  # the kernels use powers of 2: they get the scale times this


def kernel_scale(scale: float, soft_cap: float | None) -> tuple[float, float]:
    """Returns the kernels' factor of q k and their cap, 0 without one. In powers of 2 a logit is
    factor * q k, or cap * tanh(x) = cap - 2 * cap / (2^(factor * q k) + 1) with x = scale * q k /
    soft_cap."""
    if soft_cap is None:
        return scale * LOG2_E, 0.0
    return 2 * scale * LOG2_E / soft_cap, soft_cap * LOG2_E


def window_splits(window: int, is_few: bool) -> int:
    """Returns the most items into which the kernels cut the keys of a window, which begin with the
    tile of its first one: of the least size, or more keys where there would be too many items."""
    keys = window + CHUNK_STEP
    largest = -(-keys // (MAX_SPLITS * CHUNK_STEP)) * CHUNK_STEP
    return -(-keys // max(MIN_CHUNK_OF_FEW if is_few else MIN_CHUNK, largest))


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The heads of this device, of one layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def tile_tokens(self) -> int:
        return TILE_ROWS // self.group


@dataclass(frozen=True, slots=True)
class WorkCounts:
    """The counts of `write_work`, for grids of launches outside a graph."""

    num_items: int
    num_tiles: int


@dataclass(frozen=True, slots=True)
class AttentionScratch:
    """The merge buffer of sequences' splits, one for all layers and graphs of one stream."""

    partial: torch.Tensor  # [slots, Hq, D] float32
    lse: torch.Tensor  # [slots, Hq] float32, base 2
    arrived: torch.Tensor  # [sequences * Hkv] int32, zero between launches
    tickets: torch.Tensor  # [2] int32, zero between launches: units drawn, programs that left


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """One step. The tensors may be views of larger static buffers."""

    query_start: torch.Tensor  # [S + 1] int32
    kv_lens: torch.Tensor  # [S] int32; 0: padding, whose output is zeros
    block_tables: torch.Tensor  # [S, W] int32, rows contiguous in themselves
    work: torch.Tensor  # [work_size] int32
    scratch: AttentionScratch
    num_sequences: int
    max_items: int  # of the decode launch; 0: there is none
    max_tiles: int  # of the prefill launch; 0: there is none
    max_queries: int = 1  # of a sequence that is cut into items

    def max_decode_items(self, window: int | None) -> int:
        """Returns the limit of the decode launch of a layer, for its grid."""
        if window is None:
            return self.max_items
        return self.num_sequences * window_splits(window, is_few=True)

    @classmethod
    def for_graph(
        cls,
        query_start: torch.Tensor,
        kv_lens: torch.Tensor,
        block_tables: torch.Tensor,
        work: torch.Tensor,
        scratch: AttentionScratch,
        num_sequences: int,
        max_queries: int = 1,
        max_tiles: int = 0,
    ) -> PagedPlan:
        """Returns the plan of up to so many sequences and tiles. Without tiles, the sequences are
        decodes with one query each, or with up to `max_queries`, as `write_decode_work` writes
        them; with tiles, any mix, as `write_work` does. Stays valid for any later contents of the
        tensors."""
        items = num_sequences * MAX_SPLITS
        tensors = (query_start, kv_lens, block_tables, work)
        return cls(*tensors, scratch, num_sequences, items, max_tiles, max_queries)

    @classmethod
    def for_step(
        cls,
        query_start: torch.Tensor,
        kv_lens: torch.Tensor,
        block_tables: torch.Tensor,
        work: torch.Tensor,
        scratch: AttentionScratch,
        counts: WorkCounts,
    ) -> PagedPlan:
        """Returns the plan of any mix of sequences with one query and with several, in any
        order."""
        return cls(
            query_start,
            kv_lens,
            block_tables,
            work,
            scratch,
            kv_lens.shape[0],
            counts.num_items,
            counts.num_tiles,
        )


def work_size(max_seqs: int, max_tokens: int, shape: HeadShape) -> int:
    """Returns the numbers in `work` that any step with up to these sequences and tokens can
    need."""
    items = max_seqs * MAX_SPLITS
    return HEADER + ITEM * items + TILE * max_tiles(max_seqs, max_tokens, shape)


def max_tiles(max_seqs: int, max_tokens: int, shape: HeadShape) -> int:
    """Returns the most tiles of a step with up to these sequences and tokens: each sequence has two
    queries at least, and one tile that is not full."""
    return min(max_seqs, max_tokens // 2) + -(-max_tokens // shape.tile_tokens)


def attention_scratch(
    max_seqs: int, shape: HeadShape, device: torch.device | str
) -> AttentionScratch:
    slots = max_seqs * MAX_SPLITS
    return AttentionScratch(
        torch.empty(slots, shape.num_heads, shape.head_dim, device=device),
        torch.empty(slots, shape.num_heads, device=device),
        torch.zeros(max_seqs * shape.num_kv_heads, dtype=torch.int32, device=device),
        torch.zeros(2, dtype=torch.int32, device=device),
    )


def write_work(out: Ints, query_start: Ints, kv_lens: Ints, shape: HeadShape) -> WorkCounts:
    """Fills `out`; for a graph, pass all the sequences it was captured with (padding: kv_len 0)."""
    queries = np.diff(query_start)
    decodes = np.flatnonzero(queries == 1)
    is_few = int(np.count_nonzero(kv_lens[decodes])) * shape.num_kv_heads <= FEW
    num_items = 0
    if len(decodes):
        num_items = _write_items(out, decodes, kv_lens, is_few, queries[decodes])
    start = HEADER + ITEM * num_items
    prefills = np.flatnonzero(queries > 1)
    num_tiles = 0
    if len(prefills):
        num_tiles = _write_tiles(out[start:], prefills, query_start, kv_lens, shape.tile_tokens)
    out[:HEADER] = (num_items, len(kv_lens), is_few, num_tiles)
    return WorkCounts(num_items, num_tiles)


def write_decode_work(out: Ints, kv_lens: Ints, shape: HeadShape, queries: Ints) -> WorkCounts:
    """Fills `out` as `write_work` does, for decodes: sequences with so many queries. Padding has 0
    keys."""
    is_few = int(np.count_nonzero(kv_lens)) * shape.num_kv_heads <= FEW
    if kv_lens.max() > (MIN_CHUNK_OF_FEW if is_few else MIN_CHUNK):
        num_items = _write_items(out, np.arange(len(kv_lens)), kv_lens, is_few, queries)
    else:  # an item each
        num_items = len(kv_lens)
        items = out[HEADER : HEADER + ITEM * num_items].reshape(-1, ITEM)
        order = (-kv_lens).argsort(kind="stable")
        items[:, 0], items[:, 1], items[:, 2], items[:, 3] = order, 0, kv_lens[order], 1
    out[:HEADER] = (num_items, len(kv_lens), is_few, 0)
    return WorkCounts(num_items, 0)


def _write_items(
    out: Ints,
    decodes: npt.NDArray[np.intp],
    kv_lens: Ints,
    is_few: bool,
    queries: Ints,
) -> int:
    """`queries`: of each decode. A split has a slot for each of them."""
    lengths = kv_lens[decodes].astype(np.int64)
    splits, chunks = _cut(lengths, MIN_CHUNK_OF_FEW if is_few else MIN_CHUNK)
    used = np.where(splits > 1, splits * queries, 0)
    order = np.argsort(-np.minimum(chunks, lengths), kind="stable")
    first_slot = np.cumsum(used) - used
    source = np.repeat(order, splits[order])  # of every item, its sequence among `decodes`
    split = count_within(splits[order])
    items = out[HEADER : HEADER + ITEM * len(source)].reshape(-1, ITEM)
    begin = split * chunks[source]
    items[:, 0] = decodes[source]
    items[:, 1] = begin
    items[:, 2] = np.minimum(begin + chunks[source], lengths[source])
    items[:, 3] = (first_slot[source] << 9) + (split << 5) + splits[source]
    return len(source)


def _cut(
    lengths: npt.NDArray[np.int64], min_chunk: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Returns the number of items of each sequence (at least one) and the keys of each item."""
    wanted = np.clip(-(-lengths // min_chunk), 1, MAX_SPLITS)
    chunks = np.maximum(-(-lengths // (wanted * CHUNK_STEP)) * CHUNK_STEP, CHUNK_STEP)
    return np.maximum(-(-lengths // chunks), 1), chunks


def _write_tiles(
    out: Ints,
    prefills: npt.NDArray[np.intp],
    query_start: Ints,
    kv_lens: Ints,
    tile_tokens: int,
) -> int:
    starts = query_start[prefills].astype(np.int64)
    lengths = query_start[prefills + 1] - starts
    counts = -(-lengths // tile_tokens)
    source, index = spread(counts)
    first = index * tile_tokens
    # The keys that its last query sees.
    keys = kv_lens[prefills][source] - lengths[source] + first + tile_tokens
    order = np.argsort(-keys, kind="stable")
    tiles = out[: TILE * len(source)].reshape(-1, TILE)
    tiles[:, 0] = prefills[source[order]]
    tiles[:, 1] = (starts[source] + first)[order]
    return len(source)

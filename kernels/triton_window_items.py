"""The items of decode attention in layers with a window, whose keys the kernels cut themselves.

The items of a PagedPlan are those of whole sequences: most of a long one lie before its window. An
item here is one of `window_splits` stretches from the tile with the window's first key on. The
first stretches of all sequences come before all second ones, and so on: the last ones are short or
empty. In the order of the sequences, every fifth item of a window of 4,096 keys would be empty, and
a program that takes every 264th item would get more work than another. Plain Triton on numbers,
which the Gluon kernels call as well.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.paged_plan import CHUNK_STEP, MIN_CHUNK, MIN_CHUNK_OF_FEW

_STEP = tl.constexpr(CHUNK_STEP)
_MIN_CHUNK = tl.constexpr(MIN_CHUNK)
_MIN_CHUNK_OF_FEW = tl.constexpr(MIN_CHUNK_OF_FEW)


@triton.jit
def window_cut(work_ptr, window, MAX_SPLITS: tl.constexpr):
    """Returns the number of items and of sequences of this step, and the keys of each item."""
    sequences = tl.load(work_ptr + 1)
    is_few = tl.load(work_ptr + 2) != 0
    keys = window + _STEP
    largest = (keys + MAX_SPLITS * _STEP - 1) // (MAX_SPLITS * _STEP) * _STEP
    chunk = tl.maximum(tl.where(is_few, _MIN_CHUNK_OF_FEW, _MIN_CHUNK), largest)
    return sequences * ((keys + chunk - 1) // chunk), sequences, chunk


@triton.jit
def window_item(
    item, exists, sequences, chunk, query_start_ptr, kv_lens_ptr, window, BLOCK_N: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):  # fmt: skip
    """Returns an item as the plan has them, and the window's first key, which is in its first tile.
    The last field is 0 if there is nothing to do: a sequence has several queries, or no such
    item."""
    seq = item % sequences
    split = item // sequences
    row = tl.load(query_start_ptr + seq, mask=exists, other=0)
    queries = tl.load(query_start_ptr + seq + 1, mask=exists, other=0) - row
    kv_len = tl.load(kv_lens_ptr + seq, mask=exists, other=0)
    seen = tl.maximum(kv_len - window, 0)
    first = seen // BLOCK_N * BLOCK_N
    count = tl.maximum((kv_len - first + chunk - 1) // chunk, 1)
    live = exists & (queries == 1) & (split < count)
    begin = tl.where(live, first + split * chunk, 0)
    end = tl.where(live, tl.minimum(first + (split + 1) * chunk, kv_len), 0)
    merge = tl.where(live, seq * (MAX_SPLITS << 9) + (split << 5) + count, 0)
    return seq, begin, end, merge, seen

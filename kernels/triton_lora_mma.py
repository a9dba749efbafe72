"""The shared parts of kernels that add h B to y on tensor cores, with the product in registers.

A warp holds an mma's product scattered: a thread has two neighbouring columns of every eight. So
the columns of B enter in another order: then a thread's part of the product is eight neighbouring
columns of y, which it reads and writes 16 bytes at a time, and the rows of B and columns of h enter
so that it reads h in the same way. The orders are the registers' alone: no data moves between
threads. y is where the mma's sums begin.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.lora_plan import SMALL_ROWS
from kernels.triton_int8 import widen
from kernels.triton_lora_tiles import PAGE, load_rows, page_dot, strip_at

BLOCK_ROWS = 16  # of an mma
BLOCK_COLUMNS = 32  # of the four products whose columns change places
_SMALL_ROWS = tl.constexpr(SMALL_ROWS)


@triton.jit
def swap_columns(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Puts column 8 i + 2 j + k of each 32 in place of 8 j + 2 i + k. Its own inverse."""
    parted = tl.reshape(x, [ROWS, COLUMNS // 32, 4, 4, 2])
    return tl.reshape(tl.permute(parted, [0, 1, 3, 2, 4]), [ROWS, COLUMNS])


@triton.jit
def order_ranks(h, ROWS: tl.constexpr):
    """Puts column 4 i + 2 j + k of [ROWS, PAGE] in place of 8 j + 2 i + k."""
    parted = tl.reshape(h, [ROWS, 4, 2, 2])
    return tl.reshape(tl.permute(parted, [0, 2, 1, 3]), [ROWS, PAGE])


@triton.jit
def load_block(heap_ptr, entry, columns, width, COLUMNS: tl.constexpr, IS_EVEN: tl.constexpr):
    """Returns a page of B for `add_page`: `load_strip` with its rows in the order of `order_ranks`,
    in int8 in their own."""
    at, rows = strip_at(heap_ptr, entry)
    lanes = tl.arange(0, PAGE)
    if heap_ptr.dtype.element_ty == tl.int8:
        b = load_rows(at, rows, lanes, columns, width, IS_EVEN)
    else:
        lanes = lanes // 2 % 4 * 4 + lanes // 8 * 2 + lanes % 2
        b = load_rows(at, rows, lanes, columns, width, IS_EVEN)
        b = swap_columns(b, PAGE, COLUMNS)
    return b


@triton.jit
def add_page(
    total, h, b, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TYPE: tl.constexpr, UPCAST: tl.constexpr
):
    """Returns total + h b, the total [ROWS, COLUMNS] float32 with swapped columns."""
    if b.dtype == tl.int32:
        # An operand out of words has, in Triton, four neighbouring ranks in a thread: those that a
        # thread reads of h.
        b = swap_columns(widen(b, TYPE), PAGE, COLUMNS)
    else:
        h = order_ranks(h, ROWS)
    return page_dot(h, b, total, TYPE, UPCAST)


@triton.jit
def rows_of_small(offsets, rows):
    """Returns True for row offsets of an mma that are rows of a small tile. The compiler finds the
    offsets that a small tile never has, and omits the work that they alone need."""
    return (offsets < rows) & (offsets < _SMALL_ROWS)


@triton.jit
def drop_rows(x, ROWS: tl.constexpr):
    """Returns x [ROWS, columns] with zeros in the rows that a small tile never has: constants,
    which take no register from page to page."""
    return tl.where((tl.arange(0, ROWS) < _SMALL_ROWS)[:, None], x, 0.0)


@triton.jit
def load_bridge_rows(
    planes_ptr,
    block,  # slice * rank pages + page
    num_blocks,  # slices * rank pages
    row,  # in the bridge
    rows,
    num_rows,
    NUM_PLANES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Returns the bridge of a small tile [ROWS, PAGE]: its planes added in order, zeros beyond
    `rows`."""
    offsets = tl.arange(0, ROWS)
    mask = rows_of_small(offsets, rows)[:, None]
    stride = num_blocks.to(tl.int64) * num_rows * PAGE
    at = planes_ptr + (block * num_rows.to(tl.int64) + row) * PAGE
    at_lanes = at + offsets[:, None] * PAGE + tl.arange(0, PAGE)[None, :]
    total = tl.load(at_lanes, mask=mask, other=0.0)
    for plane in tl.static_range(1, NUM_PLANES):
        total += tl.load(at_lanes + plane * stride, mask=mask, other=0.0)
    return total

"""The shared parts of the multi-LoRA Triton kernels: tiles of the plan, bridges, pages of weights.

Programs walk the tiles in strides: the grid fills the device and no more, because the limit of a
CUDA graph is far above the tiles of most steps. Programs request their reads of the pools before
they wait for the preceding kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.backend import IS_INTERPRETED
from kernels.lora_plan import COUNTERS, PAGE_ROWS, TILE_FIELDS, UNIT_FIELDS
from kernels.lora_rows import INT8_GROUP, ROW_BITS, SCALE_BYTES, UNIT_BYTES
from kernels.triton_int8 import widen

# For a program for a small tile, all in one warp: it then holds a page's 16 rows of a column in one
# thread. The same everywhere, for the order of a sum depends on it.
COLUMNS = 256
PAGE = tl.constexpr(PAGE_ROWS)
INTERPRETED = tl.constexpr(IS_INTERPRETED)
_TILE = tl.constexpr(TILE_FIELDS)
_UNIT = tl.constexpr(UNIT_FIELDS)
COUNTERS_OF_TILE = tl.constexpr(COUNTERS)
_ROW_BITS = tl.constexpr(ROW_BITS)
_ROW_MASK = tl.constexpr((1 << ROW_BITS) - 1)
_UNIT_BITS = tl.constexpr(8 * UNIT_BYTES)
_SCALE_BYTES = tl.constexpr(SCALE_BYTES)
# Neighbouring columns that a thread reads of a row, in every type: a thread of one warp then has
# all rows of its columns. int8 is read in words: a thread would hold each byte in a register.
_GROUP = tl.constexpr(INT8_GROUP)


@triton.jit
def read_unit(units_ptr, unit, live):
    """Returns row, rows, page, page index, row in the bridge and weight. `live`: known to be inside
    the table."""
    p = units_ptr + unit * _UNIT
    return (
        tl.load(p, mask=live, other=0),
        tl.load(p + 1, mask=live, other=0),
        tl.load(p + 2, mask=live, other=0),
        tl.load(p + 3, mask=live, other=0),
        tl.load(p + 4, mask=live, other=0),
        tl.load(p + 5, mask=live, other=0).to(tl.float32, bitcast=True),
    )


@triton.jit
def read_tile(tiles_ptr, tile, live, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """Returns row, rows, pages, offset in the page list, first page and row in the bridge. A tile
    of the plan is read in PARTS of ROWS each. `live`: known to be inside the table."""
    p = tiles_ptr + (tile // PARTS) * _TILE
    start = (tile % PARTS) * ROWS
    rows = tl.load(p + 1, mask=live, other=0)
    return (
        tl.load(p, mask=live, other=0) + start,
        tl.minimum(rows - start, ROWS),
        tl.load(p + 2, mask=live, other=0),
        tl.load(p + 3, mask=live, other=0),
        tl.load(p + 4, mask=live, other=0),
        tl.load(p + 5, mask=live, other=0) + start,
    )


@triton.jit
def find_strip(entries_ptr, page, live, STRIDE: tl.constexpr):
    """Returns the page's entry, 0 if the adapter lacks the matrix or if not `live`."""
    return tl.load(entries_ptr + page.to(tl.int64) * STRIDE, mask=live, other=0)


@triton.jit
def strip_at(heap_ptr, entry):
    """Returns the strip's address, and its number of rows."""
    ELEMENTS: tl.constexpr = _UNIT_BITS // heap_ptr.dtype.element_ty.primitive_bitwidth
    rows = (entry & _ROW_MASK).to(tl.int32)
    return heap_ptr + (entry >> _ROW_BITS) * ELEMENTS, rows


@triton.jit
def read_columns(heap_ptr, COLUMNS: tl.constexpr):
    """Returns the columns by which strips are read: all, or the first of every group in int8."""
    if heap_ptr.dtype.element_ty == tl.int8:
        columns = tl.arange(0, COLUMNS // _GROUP) * _GROUP
    else:
        columns = tl.arange(0, COLUMNS)
    return columns


@triton.jit
def a_at(heap_ptr, entry):
    """Returns the address of the numbers of a strip of A, and its number of rows."""
    at, rows = strip_at(heap_ptr, entry)
    if heap_ptr.dtype.element_ty == tl.int8:
        at += _SCALE_BYTES
    return at, rows


@triton.jit
def load_scales(heap_ptr, entry):
    """Returns the scales [PAGE] float32 of a strip of A in int8, 1 beyond its rows."""
    at, rows = strip_at(heap_ptr, entry)
    lanes = tl.arange(0, PAGE)
    scales_at = at.to(tl.pointer_type(tl.float32), bitcast=True) + lanes
    return tl.load(scales_at, mask=lanes < rows, other=1.0)


@triton.jit
def load_strip(heap_ptr, entry, columns, width, IS_EVEN: tl.constexpr):
    """Returns the `columns`, of `read_columns`, of a strip of B [rows, width] for `widen`: [PAGE,
    columns], in int8 in words; zeros beyond its rows, of which no byte is read. IS_EVEN: all
    columns exist."""
    at, rows = strip_at(heap_ptr, entry)
    return load_rows(at, rows, tl.arange(0, PAGE), columns, width, IS_EVEN)


@triton.jit
def load_a(heap_ptr, entry, columns, width, IS_EVEN: tl.constexpr):
    """Returns columns of a strip of A [rows, width] as `load_strip` does."""
    at, rows = a_at(heap_ptr, entry)
    return load_rows(at, rows, tl.arange(0, PAGE), columns, width, IS_EVEN)


@triton.jit
def load_rows(at, rows, lanes, columns, width, IS_EVEN: tl.constexpr):
    """Returns the rows `lanes` and the `columns`, of `read_columns`, of a strip at this address."""
    mask = (lanes < rows)[:, None]
    if not IS_EVEN:
        mask = mask & (columns < width)[None, :]
    if at.dtype.element_ty == tl.int8:
        words = at.to(tl.pointer_type(tl.int32), bitcast=True) + lanes[:, None] * (width // 4)
        words = (words + (columns // 4)[None, :])[:, :, None] + tl.arange(0, _GROUP // 4)
        # Not true of more than the last two, but so Triton has groups of a row follow each other
        # in its threads, not the rows.
        words = tl.max_contiguous(words, (1, 2, 4))
        found = tl.load(words, mask=mask[:, :, None], other=0)
    else:
        found = tl.load(at + lanes[:, None] * width + columns[None, :], mask=mask, other=0)
    return found


@triton.jit
def find_affine(entries_ptr, page, live, STRIDE: tl.constexpr, AFFINE: tl.constexpr):
    """Returns the entry of the affine rows of the adapter whose first page this is, 0 if it has
    none. entries_ptr: of the slice's B. AFFINE: `SiteRows.affine`."""
    entry = tl.full((), 0, tl.int64)
    if AFFINE:
        entry = find_strip(entries_ptr + AFFINE, page, live, STRIDE)
    return entry


@triton.jit
def affine_at(heap_ptr, entry, TYPE: tl.constexpr):
    """Returns the address of affine rows, which are in the activations' TYPE in any heap, and their
    number."""
    if heap_ptr.dtype.element_ty == tl.int8:
        heap_ptr = heap_ptr.to(tl.pointer_type(TYPE), bitcast=True)
    return strip_at(heap_ptr, entry)


@triton.jit
def load_affine(heap_ptr, entry, columns, width, TYPE: tl.constexpr):
    """Returns gains and offsets, [columns] float32 each, zeros without."""
    at, rows = affine_at(heap_ptr, entry, TYPE)
    gain = tl.load(at + columns, mask=columns < tl.where(rows > 0, width, 0), other=0.0)
    offset_at = at + width + columns
    offset = tl.load(offset_at, mask=columns < tl.where(rows > 1, width, 0), other=0.0)
    return gain.to(tl.float32), offset.to(tl.float32)


@triton.jit
def add_row(y, delta, heap_ptr, affine, columns, width, AFFINE: tl.constexpr):
    """Returns y [columns] plus the delta, after the affine rows of the entry `affine`, rounded
    once."""
    wide = y.to(tl.float32)
    if AFFINE:  # noqa: SIM102  this condition is the compiler's
        if affine != 0:
            gain, offset = load_affine(heap_ptr, affine, columns, width, y.dtype)
            wide += wide * gain + offset
    return (wide + delta).to(y.dtype)


@triton.jit
def load_pair(ptr, stride, columns, width, left):
    """Returns [columns] of this row and the next one; rows beyond `left` are zeros."""
    first = tl.load(ptr + columns, mask=columns < tl.where(left > 0, width, 0), other=0.0)
    at = ptr + stride + columns
    return first, tl.load(at, mask=columns < tl.where(left > 1, width, 0), other=0.0)


@triton.jit
def store_pair(ptr, stride, columns, width, left, first, second):
    tl.store(ptr + columns, first, mask=columns < width)
    tl.store(ptr + stride + columns, second, mask=columns < tl.where(left > 1, width, 0))


@triton.jit
def load_planes(planes_ptr, block, num_blocks, row, left, num_rows, NUM_PLANES: tl.constexpr):
    """Returns the bridge of this row and the next one, [planes, PAGE] each, not yet summed. block =
    slice * rank pages + page, num_blocks = slices * rank pages."""
    PLANES: tl.constexpr = triton.next_power_of_2(NUM_PLANES)
    planes = tl.arange(0, PLANES)
    stride = num_blocks.to(tl.int64) * num_rows * PAGE
    at = planes_ptr + (block * num_rows.to(tl.int64) + row) * PAGE
    at_lanes = at + planes[:, None] * stride + tl.arange(0, PAGE)[None, :]
    first = (planes < tl.where(left > 0, NUM_PLANES, 0))[:, None]
    second = (planes < tl.where(left > 1, NUM_PLANES, 0))[:, None]
    return (
        tl.load(at_lanes, mask=first, other=0.0),
        tl.load(at_lanes + PAGE, mask=second, other=0.0),
    )


@triton.jit
def _add_both(a_0, a_1, b_0, b_1):
    return a_0 + b_0, a_1 + b_1


@triton.jit
def page_delta(planes_0, planes_1, b, TYPE: tl.constexpr):
    """Returns h B of two rows, [columns] each; the bridge h is summed, then rounded to the
    activations' TYPE. One pass over B for both: two passes would keep it in float32 in between, in
    twice the registers."""
    h_0 = tl.sum(planes_0, axis=0).to(TYPE).to(tl.float32)[:, None]
    h_1 = tl.sum(planes_1, axis=0).to(TYPE).to(tl.float32)[:, None]
    wide = widen(b, tl.float32)
    if INTERPRETED:  # the interpreter would call a separate function for every element
        delta_0, delta_1 = tl.sum(h_0 * wide, axis=0), tl.sum(h_1 * wide, axis=0)
    else:
        delta_0, delta_1 = tl.reduce((h_0 * wide, h_1 * wide), 0, _add_both)
    return delta_0, delta_1


@triton.jit
def pair_delta(
    heap_ptr,
    entries_ptr,  # of the slice's B
    entry,  # of the first page
    b,  # the first page
    planes_0,  # the first page's of the pair
    planes_1,
    columns,  # of `read_columns`
    width,
    num_pages,
    first,
    pages_ptr,
    planes_ptr,
    block,
    num_blocks,
    row,  # in the bridge
    left,  # rows of the tile from this one on
    num_rows,
    NUM_PLANES: tl.constexpr,
    STRIDE: tl.constexpr,
    IS_EVEN: tl.constexpr,
    TYPE: tl.constexpr,
):
    """Returns h B of a pair of rows, [COLUMNS] float32 each, and the first page again for the next
    pair."""
    delta_0, delta_1 = page_delta(planes_0, planes_1, b, TYPE)
    if num_pages > 1:
        for i in range(1, num_pages):
            more = find_strip(entries_ptr, tl.load(pages_ptr + first + i), True, STRIDE)
            b = load_strip(heap_ptr, more, columns, width, IS_EVEN)
            # Beyond the rank of this module the bridge holds arbitrary values.
            planes_0, planes_1 = load_planes(
                planes_ptr, block + i, num_blocks, row, tl.where(more != 0, left, 0), num_rows,
                NUM_PLANES,
            )  # fmt: skip
            more_0, more_1 = page_delta(planes_0, planes_1, b, TYPE)
            delta_0 += more_0
            delta_1 += more_1
        b = load_strip(heap_ptr, tl.where(left > 2, entry, 0), columns, width, IS_EVEN)
    return delta_0, delta_1, b


@triton.jit
def add_delta(y, delta, live, heap_ptr, affine, columns, width, AFFINE: tl.constexpr):
    """Adds the delta [rows, columns] to y, after the affine rows of the entry `affine`, rounded
    once. A row without a delta keeps its bits, also those of -0."""
    wide = y.to(tl.float32)
    if AFFINE:  # noqa: SIM102  this condition is the compiler's
        if affine != 0:
            gain, offset = load_affine(heap_ptr, affine, columns, width, y.dtype)
            wide += wide * gain[None, :] + offset[None, :]
    return tl.where(live, (wide + delta).to(y.dtype), y)


@triton.jit
def page_dot(h, b, acc, TYPE: tl.constexpr, UPCAST: tl.constexpr):
    """Returns acc + h b, with both in TYPE first."""
    h = widen(h, TYPE)
    b = widen(b, TYPE)
    if UPCAST:
        return tl.dot(h.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(h, b, acc, input_precision="ieee")


def num_programs(limit: int, others: int, wanted: int) -> int:
    """Returns the programs along the tiles, if there are `others` along the rest of the grid."""
    return max(1, min(limit, -(-wanted // others)))

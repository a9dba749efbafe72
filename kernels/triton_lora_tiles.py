"""What the multi-LoRA Triton kernels share: tiles read from the plan, bridges, pages of weights.

Programs walk the tiles in strides: the grid fills the device, and no more, for the limit of a CUDA
graph is far above what most steps bring. What they read of the pools they ask for before they wait
for the kernel ahead.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.backend import IS_INTERPRETED
from kernels.lora_plan import COUNTERS, PAGE_ROWS, TILE_FIELDS, UNIT_FIELDS

if not IS_INTERPRETED:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

PAGE = tl.constexpr(PAGE_ROWS)
_TILE = tl.constexpr(TILE_FIELDS)
_UNIT = tl.constexpr(UNIT_FIELDS)
COUNTERS_OF_TILE = tl.constexpr(COUNTERS)


@triton.jit
def start_dependents(OVERLAPPED: tl.constexpr):
    """The next kernel of the stream may start: it waits by itself for what this one writes."""
    if OVERLAPPED:
        gdc_launch_dependents()


@triton.jit
def wait_for_inputs(OVERLAPPED: tl.constexpr):
    """Every program must come here, else the next kernel but one could start before the last but
    one has ended. Before it, only what no kernel of a step writes may be read."""
    if OVERLAPPED:
        gdc_wait()


@triton.jit
def read_unit(units_ptr, unit, live):
    """-> row, rows, page, page index, row in the bridge. `live`: known to be inside the table."""
    p = units_ptr + unit * _UNIT
    return (
        tl.load(p, mask=live, other=0),
        tl.load(p + 1, mask=live, other=0),
        tl.load(p + 2, mask=live, other=0),
        tl.load(p + 3, mask=live, other=0),
        tl.load(p + 4, mask=live, other=0),
    )


@triton.jit
def read_tile(tiles_ptr, tile, live, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """-> row, rows, pages, offset in the page list, first page, row in the bridge. A tile of the
    plan is read in PARTS of ROWS each. `live`: known to be inside the table."""
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
def load_page(ptr, page, live, columns, width, IS_EVEN: tl.constexpr):
    """[PAGE, columns] of a pool [rows, width], zeros if not `live`: ranks are never masked, pages
    are. IS_EVEN: all columns exist."""
    lanes = tl.arange(0, PAGE)
    rows = page.to(tl.int64) * PAGE + lanes
    mask = (lanes < tl.where(live, PAGE, 0))[:, None]
    if not IS_EVEN:
        mask = mask & (columns < width)[None, :]
    return tl.load(ptr + rows[:, None] * width + columns[None, :], mask=mask, other=0.0)


@triton.jit
def load_bridge(planes_ptr, block, num_blocks, row, live, num_rows, NUM_PLANES: tl.constexpr):
    """Sum over the planes of one row, [PAGE] float32; zeros if not `live`. block = slice * rank
    pages + page, num_blocks = slices * rank pages. The same shape in every kernel: one order."""
    PLANES: tl.constexpr = triton.next_power_of_2(NUM_PLANES)
    planes = tl.arange(0, PLANES)
    stride = num_blocks.to(tl.int64) * num_rows * PAGE
    at = planes_ptr + (block * num_rows.to(tl.int64) + row) * PAGE
    at_lanes = at + planes[:, None] * stride + tl.arange(0, PAGE)[None, :]
    mask = (planes < tl.where(live, NUM_PLANES, 0))[:, None]
    return tl.sum(tl.load(at_lanes, mask=mask, other=0.0), axis=0)


@triton.jit
def pair_delta(
    b_ptr,
    b,  # the first page [PAGE, columns]
    columns,
    width,
    num_pages,
    first,
    pages_ptr,
    planes_ptr,
    block,
    num_blocks,
    row,  # in the bridge; the next one is the second of the pair
    has_second,
    num_rows,
    NUM_PLANES: tl.constexpr,
    IS_EVEN: tl.constexpr,
):
    """h B of two rows, [columns] float32 each; the bridge h is rounded to B's type."""
    delta_0 = tl.zeros([b.shape[1]], dtype=tl.float32)
    delta_1 = tl.zeros([b.shape[1]], dtype=tl.float32)
    page = tl.load(pages_ptr + first + 1, mask=num_pages > 1, other=0)
    for i in range(num_pages):
        more = i + 1 < num_pages
        after = load_page(b_ptr, page, more, columns, width, IS_EVEN)
        page = tl.load(pages_ptr + first + i + 2, mask=i + 2 < num_pages, other=0)
        h_0 = load_bridge(planes_ptr, block + i, num_blocks, row, True, num_rows, NUM_PLANES)
        h_1 = load_bridge(
            planes_ptr, block + i, num_blocks, row + 1, has_second, num_rows, NUM_PLANES
        )
        wide = b.to(tl.float32)
        delta_0 += tl.sum(h_0.to(b.dtype).to(tl.float32)[:, None] * wide, axis=0)
        delta_1 += tl.sum(h_1.to(b.dtype).to(tl.float32)[:, None] * wide, axis=0)
        b = after
    return delta_0, delta_1


@triton.jit
def add_delta(y, delta, num_pages):
    """Rounded once. A row without adapter keeps its bits, also those of -0."""
    return tl.where(num_pages > 0, (y.to(tl.float32) + delta).to(y.dtype), y)


@triton.jit
def page_dot(h, b, acc, UPCAST: tl.constexpr):
    """acc + h b, h rounded to the type of b first."""
    h = h.to(b.dtype)
    if UPCAST:
        return tl.dot(h.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(h, b, acc, input_precision="ieee")


def num_programs(limit: int, others: int, wanted: int) -> int:
    """Along the tiles, if there are `others` along the rest of the grid."""
    return max(1, min(limit, -(-wanted // others)))

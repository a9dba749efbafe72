"""What the multi-LoRA Triton kernels share: how a tile is read from the plan, and its bridge."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.backend import IS_INTERPRETED
from kernels.lora_plan import PAGE_ROWS, TILE_FIELDS, UNIT_FIELDS

if not IS_INTERPRETED:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

PAGE = tl.constexpr(PAGE_ROWS)
_TILE = tl.constexpr(TILE_FIELDS)
_UNIT = tl.constexpr(UNIT_FIELDS)


@triton.jit
def start_dependents(OVERLAPS: tl.constexpr):
    """The next kernel of the stream may start: it waits by itself for what this one writes."""
    if OVERLAPS:
        gdc_launch_dependents()


@triton.jit
def wait_for_inputs(OVERLAPS: tl.constexpr):
    """Every program of an overlapping kernel must come here, else the next but one could start
    before the last but one has ended. What no kernel of a step writes may be read before."""
    if OVERLAPS:
        gdc_wait()


@triton.jit
def read_unit(units_ptr, unit, count):
    """-> row, rows, page, page index; zeros beyond the end."""
    p = units_ptr + unit * _UNIT
    live = unit < count
    return (
        tl.load(p, mask=live, other=0),
        tl.load(p + 1, mask=live, other=0),
        tl.load(p + 2, mask=live, other=0),
        tl.load(p + 3, mask=live, other=0),
    )


@triton.jit
def read_tile(tiles_ptr, tile, count):
    """-> row, rows, pages, offset in the page list, first page; zeros beyond the end."""
    p = tiles_ptr + tile * _TILE
    live = tile < count
    return (
        tl.load(p, mask=live, other=0),
        tl.load(p + 1, mask=live, other=0),
        tl.load(p + 2, mask=live, other=0),
        tl.load(p + 3, mask=live, other=0),
        tl.load(p + 4, mask=live, other=0),
    )


@triton.jit
def page_rows(page, live):
    """Row numbers of a page and a mask of all or none of them: ranks are never masked."""
    lanes = tl.arange(0, PAGE)
    return page.to(tl.int64) * PAGE + lanes, lanes < tl.where(live, PAGE, 0)


@triton.jit
def load_page(ptr, page, live, columns, exists, stride, IS_EVEN: tl.constexpr):
    """[PAGE, columns] of a pool, zeros if not `live`. IS_EVEN: all columns exist."""
    rows, mask = page_rows(page, live)
    mask = mask[:, None]
    if not IS_EVEN:
        mask = mask & exists[None, :]
    return tl.load(ptr + rows[:, None] * stride + columns[None, :], mask=mask, other=0.0)


@triton.jit
def load_bridge(planes_ptr, block, rows, mask, num_tokens, num_blocks, NUM_PLANES: tl.constexpr):
    """Sum of the planes in their order, [rows, PAGE] float32. block = slice * rank pages + page,
    num_blocks = slices * rank pages."""
    lanes = tl.arange(0, PAGE)
    plane_stride = num_blocks.to(tl.int64) * num_tokens * PAGE
    at = planes_ptr + (block * num_tokens + rows[:, None]) * PAGE + lanes[None, :]
    total = tl.load(at, mask=mask[:, None], other=0.0)
    for plane in tl.static_range(1, NUM_PLANES):
        total += tl.load(at + plane * plane_stride, mask=mask[:, None], other=0.0)
    return total


@triton.jit
def page_dot(h, b, acc, UPCAST: tl.constexpr):
    h = h.to(b.dtype)
    if UPCAST:
        h, b = h.to(tl.float32), b.to(tl.float32)
    return tl.dot(h, b, acc, input_precision="ieee")


@dataclass(frozen=True, slots=True)
class Slices:
    """Where the slices of a site's B pools and outputs begin. Beside the first pool a kernel gets
    the distances of the others, in elements: chosen by a program, they keep their alignment."""

    sizes: tuple[int, int, int]  # 0: no such slice
    distances: tuple[int, int]


def slices_of(b_pools: tuple[torch.Tensor, ...]) -> Slices:
    assert 1 <= len(b_pools) <= 3
    first = b_pools[0]
    width = first.element_size()
    sizes, distances = [0, 0, 0], [0, 0]
    for i, b in enumerate(b_pools):
        assert b.stride(1) == 1
        sizes[i] = b.shape[1]
        if i:
            distances[i - 1] = (b.data_ptr() - first.data_ptr()) // width
    return Slices((sizes[0], sizes[1], sizes[2]), (distances[0], distances[1]))


def num_programs(limit: int, others: int, wanted: int) -> int:
    """Along the tiles, which programs walk in strides: enough to fill the device, and no more, for
    the limit of a graph is far above what most steps bring."""
    return max(1, min(limit, -(-wanted // others)))

"""y += bridge B of adapters' rank rows, in place, for all slices of a site in one launch.

Small tiles: one warp processes 256 columns of a tile, keeps a page of B in registers and walks the
rows two by two; with so few rows tensor cores would mostly multiply padding (64 tokens of 32
adapters, gate and up: 30 us against 13). Large tiles: 16 rows at a time on tensor cores. A row's
bits depend on its adapter and on its kind of tile, not on its neighbours.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.backend import IS_INTERPRETED
from kernels.lora_plan import LARGE_ROWS, SMALL_ROWS, Bridge, LoraPlan
from kernels.lora_rows import SiteRows
from kernels.triton_int8 import widen
from kernels.triton_launch import (
    BESIDE_SIBLING,
    OVERLAPS,
    Launcher,
    start_dependents,
    wait_for_inputs,
    wait_for_sibling,
)
from kernels.triton_lora_tiles import (
    COLUMNS,
    PAGE,
    add_row,
    find_affine,
    find_strip,
    load_affine,
    load_pair,
    load_planes,
    load_strip,
    num_programs,
    page_dot,
    pair_delta,
    read_columns,
    read_tile,
    store_pair,
)

NUM_WARPS = 1
NUM_PROGRAMS = (
    4096  # one program per tile for 32 adapters; walking tiles is slower than new programs
)
# Of small tiles beside large ones: those of most steps with prompts find no tile. 1,024 rows of 4
# adapters: 103 us a layer, 109 with 2,112 programs, 113 with 4,096 (H200).
NUM_PROGRAMS_BESIDE = 1056
LARGE_PART = 16  # rows of a program; mma.sync, whose left operand may come from registers
LARGE_COLUMNS = 128
LARGE_WARPS = 4
LARGE_STAGES = 3


@triton.jit
def _pick_slice(
    block,
    SIZE_0: tl.constexpr,
    SIZE_1: tl.constexpr,
    SIZE_2: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Returns slice, its width, where it begins in y, the block in it."""
    BLOCKS_0: tl.constexpr = (SIZE_0 + COLUMNS - 1) // COLUMNS
    BLOCKS_1: tl.constexpr = (SIZE_1 + COLUMNS - 1) // COLUMNS
    in_1 = block >= BLOCKS_0
    in_2 = block >= BLOCKS_0 + BLOCKS_1
    return (
        in_1.to(tl.int32) + in_2.to(tl.int32),
        tl.where(in_2, SIZE_2, tl.where(in_1, SIZE_1, SIZE_0)),
        tl.where(in_2, SIZE_0 + SIZE_1, tl.where(in_1, SIZE_0, 0)),
        block - tl.where(in_2, BLOCKS_0 + BLOCKS_1, tl.where(in_1, BLOCKS_0, 0)),
    )


@triton.jit(do_not_specialize_on_alignment=["header_ptr", "tiles_ptr", "pages_ptr", "entries_ptr"])
def _expand_kernel(
    y_ptr,  # [T, SIZE_0 + SIZE_1 + SIZE_2]
    planes_ptr,
    heap_ptr,
    header_ptr,
    tiles_ptr,
    pages_ptr,
    entries_ptr,  # of B, [pages, slices], STRIDE apart
    SIZE_0: tl.constexpr,
    SIZE_1: tl.constexpr,
    SIZE_2: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    STRIDE_Y: tl.constexpr,
    STRIDE: tl.constexpr,
    AFFINE: tl.constexpr,
    NUM_PLANES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    start_dependents(OVERLAPPED)
    IS_EVEN: tl.constexpr = (SIZE_0 % COLUMNS + SIZE_1 % COLUMNS + SIZE_2 % COLUMNS) == 0
    part, width, begin, block = _pick_slice(tl.program_id(0), SIZE_0, SIZE_1, SIZE_2, COLUMNS)
    entries_ptr += part
    columns = block * COLUMNS + tl.arange(0, COLUMNS)
    b_columns = block * COLUMNS + read_columns(heap_ptr, COLUMNS)
    count = tl.load(header_ptr)
    num_rows = tl.load(header_ptr + 3)
    rank_pages = tl.load(header_ptr + 5)
    tile = tl.program_id(1)
    row, rows, num_pages, first, page, at_bridge = read_tile(tiles_ptr, tile, True, ROWS, 1)
    live = (num_pages > 0) & (tile < count)
    entry = find_strip(entries_ptr, page, live, STRIDE)
    affine = find_affine(entries_ptr, page, live, STRIDE, AFFINE)
    b = load_strip(heap_ptr, entry, b_columns, width, IS_EVEN)
    wait_for_inputs(OVERLAPPED)
    while tile < count:
        tile += tl.num_programs(1)
        next_row, next_rows, next_num_pages, next_first, next_page, next_at = read_tile(
            tiles_ptr, tile, tile < count, ROWS, 1
        )
        next_entry = find_strip(entries_ptr, next_page, next_num_pages > 0, STRIDE)
        next_affine = find_affine(entries_ptr, next_page, next_num_pages > 0, STRIDE, AFFINE)
        # Rows of the base are in tiles too, without pages, as are rows of adapters that lack
        # this module: they are not touched.
        left = tl.where(entry != 0, rows, 0)
        y_at = y_ptr + row.to(tl.int64) * STRIDE_Y + begin
        block = part * rank_pages
        blocks = NUM_SLICES * rank_pages
        y_0, y_1 = load_pair(y_at, STRIDE_Y, columns, width, left)
        h_0, h_1 = load_planes(planes_ptr, block, blocks, at_bridge, left, num_rows, NUM_PLANES)
        while left > 0:
            # Loads the next pair while this one is processed.
            after_0, after_1 = load_pair(y_at + 2 * STRIDE_Y, STRIDE_Y, columns, width, left - 2)
            after_h_0, after_h_1 = load_planes(
                planes_ptr, block, blocks, at_bridge + 2, left - 2, num_rows, NUM_PLANES
            )
            delta_0, delta_1, b = pair_delta(
                heap_ptr, entries_ptr, entry, b, h_0, h_1, b_columns, width, num_pages, first,
                pages_ptr, planes_ptr, block, blocks, at_bridge, left, num_rows, NUM_PLANES, STRIDE,
                IS_EVEN, y_0.dtype,
            )  # fmt: skip
            y_0 = add_row(y_0, delta_0, heap_ptr, affine, columns, width, AFFINE)
            y_1 = add_row(y_1, delta_1, heap_ptr, affine, columns, width, AFFINE)
            store_pair(y_at, STRIDE_Y, columns, width, left, y_0, y_1)
            y_0, y_1, h_0, h_1 = after_0, after_1, after_h_0, after_h_1
            y_at += 2 * STRIDE_Y
            at_bridge += 2
            left -= 2
        row, rows, num_pages, first, at_bridge = (
            next_row, next_rows, next_num_pages, next_first, next_at,
        )  # fmt: skip
        entry, affine = next_entry, next_affine
        b = load_strip(heap_ptr, entry, b_columns, width, IS_EVEN)
    wait_for_sibling(OVERLAPPED)


@triton.jit
def _add_to_rows(
    y_ptr,  # of the first row and the slice's first column
    sums_ptr,  # likewise, of the bridge
    heap_ptr,
    pages_ptr,
    entries_ptr,
    b,  # the first page
    affine,
    rows,
    num_pages,
    first,
    num_rows,
    columns,
    b_columns,
    width,
    IS_EVEN: tl.constexpr,
    STRIDE_Y: tl.constexpr,
    STRIDE: tl.constexpr,
    AFFINE: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    COLUMNS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Adds h B to `rows` rows, ROWS at a time."""
    offsets = tl.arange(0, ROWS)
    lanes = tl.arange(0, PAGE)
    page_stride = num_rows.to(tl.int64) * PAGE
    if AFFINE:
        gain, offset = load_affine(heap_ptr, affine, columns, width, y_ptr.dtype.element_ty)
    for start in tl.range(0, rows, ROWS, num_stages=STAGES):
        mask = (offsets < rows - start)[:, None]
        y_at = y_ptr + (start + offsets).to(tl.int64)[:, None] * STRIDE_Y + columns[None, :]
        y_mask = mask
        if not IS_EVEN:
            y_mask = y_mask & (columns < width)[None, :]
        y = tl.load(y_at, mask=y_mask, other=0.0)
        h_at = sums_ptr + (start + offsets)[:, None] * PAGE + lanes[None, :]
        h = tl.load(h_at, mask=mask, other=0.0)
        delta = page_dot(h, b, tl.zeros([ROWS, COLUMNS], dtype=tl.float32), y.dtype, UPCAST)
        for i in range(1, num_pages):
            more = find_strip(entries_ptr, tl.load(pages_ptr + first + i), True, STRIDE)
            more_b = load_strip(heap_ptr, more, b_columns, width, IS_EVEN)
            h = tl.load(h_at + i * page_stride, mask=mask & (more != 0), other=0.0)
            delta = page_dot(h, more_b, delta, y.dtype, UPCAST)
        wide = y.to(tl.float32)
        if AFFINE:
            wide += wide * gain[None, :] + offset[None, :]
        tl.store(y_at, (wide + delta).to(y.dtype), mask=y_mask)


@triton.jit(do_not_specialize_on_alignment=["header_ptr", "tiles_ptr", "pages_ptr", "entries_ptr"])
def _expand_large_kernel(
    y_ptr,
    sums_ptr,
    heap_ptr,
    header_ptr,
    tiles_ptr,
    pages_ptr,
    entries_ptr,
    SIZE_0: tl.constexpr,
    SIZE_1: tl.constexpr,
    SIZE_2: tl.constexpr,
    STRIDE_Y: tl.constexpr,
    STRIDE: tl.constexpr,
    AFFINE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    COLUMNS: tl.constexpr,
    UPCAST: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait_for_inputs(OVERLAPPED)
    start_dependents(OVERLAPPED)  # the sibling of small tiles, which does not wait
    IS_EVEN: tl.constexpr = (SIZE_0 % COLUMNS + SIZE_1 % COLUMNS + SIZE_2 % COLUMNS) == 0
    part, width, begin, block = _pick_slice(tl.program_id(0), SIZE_0, SIZE_1, SIZE_2, COLUMNS)
    entries_ptr += part
    columns = block * COLUMNS + tl.arange(0, COLUMNS)
    b_columns = block * COLUMNS + read_columns(heap_ptr, COLUMNS)
    count = tl.load(header_ptr + 2)
    num_rows = tl.load(header_ptr + 4)
    rank_pages = tl.load(header_ptr + 5)
    tile = tl.program_id(1)
    row, rows, num_pages, first, page, at_bridge = read_tile(tiles_ptr, tile, True, TILE_ROWS, 1)
    entry = find_strip(entries_ptr, page, (tile < count) & (num_pages > 0), STRIDE)
    if entry == 0:
        return
    affine = find_affine(entries_ptr, page, True, STRIDE, AFFINE)
    b = widen(load_strip(heap_ptr, entry, b_columns, width, IS_EVEN), y_ptr.dtype.element_ty)
    y_ptr += row.to(tl.int64) * STRIDE_Y + begin
    sums_ptr += (at_bridge + part * rank_pages * num_rows.to(tl.int64)) * PAGE
    if num_pages <= 1:  # a constant, without which no load of the loop over rows runs ahead
        _add_to_rows(
            y_ptr, sums_ptr, heap_ptr, pages_ptr, entries_ptr, b, affine, rows, 1, first, num_rows,
            columns, b_columns, width, IS_EVEN, STRIDE_Y, STRIDE, AFFINE, ROWS, STAGES, COLUMNS,
            UPCAST,
        )  # fmt: skip
    else:
        _add_to_rows(
            y_ptr, sums_ptr, heap_ptr, pages_ptr, entries_ptr, b, affine, rows, num_pages, first,
            num_rows, columns, b_columns, width, IS_EVEN, STRIDE_Y, STRIDE, AFFINE, ROWS, 1,
            COLUMNS, UPCAST,
        )  # fmt: skip


_launch = Launcher(_expand_kernel, launch_pdl=OVERLAPS)
_launch_large = Launcher(_expand_large_kernel, launch_pdl=OVERLAPS)


def expand_(y: torch.Tensor, bridge: Bridge, site: SiteRows, plan: LoraPlan) -> None:
    assert y.stride(1) == 1
    sizes = (*site.sizes, 0, 0)[:3]
    wanted, overlapped = NUM_PROGRAMS, int(OVERLAPS)
    if bridge.sums is not None:
        _expand_large_(y, bridge.sums, site, sizes, plan)
        wanted, overlapped = NUM_PROGRAMS_BESIDE, BESIDE_SIBLING
    if plan.max_units:
        blocks = sum(-(-size // COLUMNS) for size in sizes)
        _launch(
            (blocks, num_programs(plan.max_small, blocks, wanted), 1),
            (y, bridge.planes, site.heap),
            (plan.header, plan.small, plan.pages, site.b_entries),
            (
                *sizes,
                site.num_slices,
                y.stride(0),
                site.stride,
                site.affine,
                bridge.planes.shape[0],
                SMALL_ROWS,
                COLUMNS,
                overlapped,
            ),
            NUM_WARPS,
        )


def _expand_large_(
    y: torch.Tensor, sums: torch.Tensor, site: SiteRows, sizes: tuple[int, ...], plan: LoraPlan
) -> None:
    blocks = sum(-(-size // LARGE_COLUMNS) for size in sizes)
    _launch_large(
        (blocks, plan.max_large, 1),
        (y, sums, site.heap),
        (plan.header, plan.large, plan.pages, site.b_entries),
        (
            *sizes,
            y.stride(0),
            site.stride,
            site.affine,
            LARGE_ROWS,
            LARGE_PART,
            LARGE_STAGES,
            LARGE_COLUMNS,
            IS_INTERPRETED,
            OVERLAPS,
        ),
        LARGE_WARPS,
    )

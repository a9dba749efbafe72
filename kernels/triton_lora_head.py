"""The Triton kernel of `lora_head_`: a program adds some columns of B to the logits of small tiles,
after the shrink of every other site.

One warp processes 256 columns of a tile as in the expand of small tiles: it keeps a page of B in
registers and walks the rows two by two. In a step whose adapters lack the head the counts of the
plan's header are zero, and programs end at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.lora_plan import HEAD_TILES, HEAD_UNITS, SMALL_ROWS, LoraPlan
from kernels.lora_rows import SiteRows
from kernels.triton_launch import OVERLAPS, Launcher, start_dependents, wait_for_inputs
from kernels.triton_lora_shrink import new_planes, shrink_small_
from kernels.triton_lora_tiles import (
    COLUMNS,
    find_strip,
    load_pair,
    load_planes,
    load_strip,
    num_programs,
    pair_delta,
    read_columns,
    read_tile,
    store_pair,
)

NUM_WARPS = 1
NUM_PROGRAMS = 4096


@triton.jit(do_not_specialize_on_alignment=["header_ptr", "tiles_ptr", "pages_ptr", "entries_ptr"])
def _lora_head_kernel(
    logits_ptr,  # [R, VOCAB]
    x_ptr,  # of the activations' type, not read
    planes_ptr,
    heap_ptr,
    header_ptr,
    tiles_ptr,
    pages_ptr,
    entries_ptr,  # of B, [pages, pieces], STRIDE apart
    VOCAB: tl.constexpr,
    PIECE: tl.constexpr,
    STRIDE_Y: tl.constexpr,
    STRIDE: tl.constexpr,
    NUM_PLANES: tl.constexpr,
    COUNT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    start_dependents(OVERLAPPED)
    IS_EVEN: tl.constexpr = PIECE % COLUMNS == 0
    BLOCKS: tl.constexpr = (PIECE + COLUMNS - 1) // COLUMNS
    piece = tl.program_id(0) // BLOCKS
    start = tl.program_id(0) % BLOCKS * COLUMNS
    columns = start + tl.arange(0, COLUMNS)
    b_columns = start + read_columns(heap_ptr, COLUMNS)
    begin = piece * PIECE
    width = tl.minimum(PIECE, VOCAB - begin)  # of the logits; a strip has PIECE columns
    entries_ptr += piece
    count = tl.load(header_ptr + COUNT)
    num_rows = tl.load(header_ptr + 3)
    rank_pages = tl.load(header_ptr + 5)
    tile = tl.program_id(1)
    row, rows, num_pages, first, page, at_bridge = read_tile(tiles_ptr, tile, True, ROWS, 1)
    entry = find_strip(entries_ptr, page, (num_pages > 0) & (tile < count), STRIDE)
    b = load_strip(heap_ptr, entry, b_columns, PIECE, IS_EVEN)
    wait_for_inputs(OVERLAPPED)
    while tile < count:
        tile += tl.num_programs(1)
        next_row, next_rows, next_num_pages, next_first, next_page, next_at = read_tile(
            tiles_ptr, tile, tile < count, ROWS, 1
        )
        next_entry = find_strip(entries_ptr, next_page, next_num_pages > 0, STRIDE)
        left = tl.where(entry != 0, rows, 0)  # rows without the head are not touched
        y_at = logits_ptr + row.to(tl.int64) * STRIDE_Y + begin
        y_0, y_1 = load_pair(y_at, STRIDE_Y, columns, width, left)
        h_0, h_1 = load_planes(planes_ptr, 0, rank_pages, at_bridge, left, num_rows, NUM_PLANES)
        while left > 0:
            # Loads the next pair while this one is processed.
            after_0, after_1 = load_pair(y_at + 2 * STRIDE_Y, STRIDE_Y, columns, width, left - 2)
            after_h_0, after_h_1 = load_planes(
                planes_ptr, 0, rank_pages, at_bridge + 2, left - 2, num_rows, NUM_PLANES
            )
            delta_0, delta_1, b = pair_delta(
                heap_ptr, entries_ptr, entry, b, h_0, h_1, b_columns, PIECE, num_pages, first,
                pages_ptr, planes_ptr, 0, rank_pages, at_bridge, left, num_rows, NUM_PLANES, STRIDE,
                IS_EVEN, x_ptr.dtype.element_ty,
            )  # fmt: skip
            store_pair(y_at, STRIDE_Y, columns, width, left, y_0 + delta_0, y_1 + delta_1)
            y_0, y_1, h_0, h_1 = after_0, after_1, after_h_0, after_h_1
            y_at += 2 * STRIDE_Y
            at_bridge += 2
            left -= 2
        row, rows, num_pages, first, at_bridge = (
            next_row, next_rows, next_num_pages, next_first, next_at,
        )  # fmt: skip
        entry = next_entry
        b = load_strip(heap_ptr, entry, b_columns, PIECE, IS_EVEN)


_launch = Launcher(_lora_head_kernel, launch_pdl=OVERLAPS)


def launch_lora_head_(
    logits: torch.Tensor, x: torch.Tensor, site: SiteRows, plan: LoraPlan
) -> None:
    assert logits.dtype == torch.float32
    assert logits.stride(1) == x.stride(1) == 1
    if not plan.max_units:
        return
    planes = new_planes(x, site, plan)
    shrink_small_(planes, x, site, plan, HEAD_UNITS)
    (vocab,) = site.sizes
    blocks = site.b_entries.shape[1] * -(-site.piece // COLUMNS)
    _launch(
        (blocks, num_programs(plan.max_small, blocks, NUM_PROGRAMS), 1),
        (logits, x, planes, site.heap),
        (plan.header, plan.small, plan.pages, site.b_entries),
        (
            vocab,
            site.piece,
            logits.stride(0),
            site.stride,
            planes.shape[0],
            HEAD_TILES,
            SMALL_ROWS,
            COLUMNS,
            OVERLAPS,
        ),
        NUM_WARPS,
    )

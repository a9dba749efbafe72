"""y += bridge B over the rank-row pools, in place, for all slices of a site in one launch.

A program takes a block of columns of one tile; weights of the next page are requested before the
product with this one's. A row's bits depend on its adapter and on its kind of tile, not on its
neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.backend import IS_INTERPRETED
from kernels.lora_plan import SMALL_ROWS, Bridge, LoraPlan
from kernels.triton_lora_tiles import (
    load_bridge,
    load_page,
    num_programs,
    page_dot,
    read_tile,
    slices_of,
    start_dependents,
    wait_for_inputs,
)


@dataclass(frozen=True, slots=True)
class ExpandConfig:
    columns: int
    num_warps: int
    num_programs: int = 2048
    overlaps: bool = True


def expand_config(out_features: int) -> ExpandConfig:
    return ExpandConfig(columns=256, num_warps=4)


@triton.jit(do_not_specialize=["num_tokens", "max_rank_pages", "num_blocks"])
def _kernel(
    y_ptr,
    planes_ptr,
    b_ptr,
    header_ptr,
    tiles_ptr,
    pages_ptr,
    size_0,
    size_1,
    size_2,
    distance_1: tl.int64,
    distance_2: tl.int64,
    blocks_0,
    blocks_1,
    num_tokens,
    max_rank_pages,
    num_blocks,
    stride_y,
    NUM_PLANES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    UPCAST: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    start_dependents(OVERLAPS)
    block = tl.program_id(0)
    tile = tl.program_id(1)
    count = tl.load(header_ptr)
    in_1 = block >= blocks_0
    in_2 = block >= blocks_0 + blocks_1
    part = in_1.to(tl.int32) + in_2.to(tl.int32)
    size = tl.where(in_2, size_2, tl.where(in_1, size_1, size_0))
    block -= tl.where(in_2, blocks_0 + blocks_1, tl.where(in_1, blocks_0, 0))
    y_ptr += tl.where(in_2, size_0 + size_1, tl.where(in_1, size_0, 0))
    zero = distance_1 * 0
    b_ptr += tl.where(in_2, distance_2, tl.where(in_1, distance_1, zero))
    columns = block * COLUMNS + tl.arange(0, COLUMNS)
    exists = columns < size
    row, rows, num_pages, first, page = read_tile(tiles_ptr, tile, count)
    b = load_page(b_ptr, page, num_pages > 0, columns, exists, size, IS_EVEN)
    wait_for_inputs(OVERLAPS)
    offsets = tl.arange(0, ROWS)
    while tile < count:
        if num_pages > 0:
            token = row + offsets
            mask = offsets < rows
            at = y_ptr + token.to(tl.int64)[:, None] * stride_y + columns[None, :]
            y_mask = mask[:, None]
            if not IS_EVEN:
                y_mask = y_mask & exists[None, :]
            y = tl.load(at, mask=y_mask, other=0.0)
            delta = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
            for i in range(num_pages):
                h = load_bridge(
                    planes_ptr,
                    part * max_rank_pages + i,
                    token,
                    mask,
                    num_tokens,
                    num_blocks,
                    NUM_PLANES,
                )
                more = i + 1 < num_pages
                page = tl.load(pages_ptr + first + i + 1, mask=more, other=0)
                after = load_page(b_ptr, page, more, columns, exists, size, IS_EVEN)
                delta = page_dot(h, b, delta, UPCAST)
                b = after
            tl.store(at, (y.to(tl.float32) + delta).to(y.dtype), mask=y_mask)
        tile += tl.num_programs(1)
        row, rows, num_pages, first, page = read_tile(tiles_ptr, tile, count)
        b = load_page(b_ptr, page, num_pages > 0, columns, exists, size, IS_EVEN)


def expand_(
    y: torch.Tensor,
    bridge: Bridge,
    b_pools: tuple[torch.Tensor, ...],
    plan: LoraPlan,
    config: ExpandConfig | None = None,
) -> None:
    assert y.stride(1) == 1
    config = config or expand_config(y.shape[1])
    slices = slices_of(b_pools)
    width = config.columns
    blocks = [-(-size // width) for size in slices.sizes]
    num_planes, slices_here = bridge.planes.shape[:2]
    overlaps = config.overlaps and not IS_INTERPRETED
    if plan.max_small:
        grid = (sum(blocks), num_programs(plan.max_small, sum(blocks), config.num_programs))
        _kernel[grid](
            y,
            bridge.planes,
            b_pools[0],
            plan.header,
            plan.small,
            plan.pages,
            *slices.sizes,
            *slices.distances,
            blocks[0],
            blocks[1],
            plan.num_tokens,
            plan.max_rank_pages,
            slices_here * plan.max_rank_pages,
            y.stride(0),
            NUM_PLANES=num_planes,
            ROWS=SMALL_ROWS,
            COLUMNS=width,
            IS_EVEN=all(size % width == 0 for size in slices.sizes),
            UPCAST=IS_INTERPRETED,
            OVERLAPS=overlaps,
            num_warps=config.num_warps,
            launch_pdl=overlaps,
        )

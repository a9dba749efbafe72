"""x A^T over the rank-row pool, for all slices of a site in one launch.

A program takes one page of one tile, one slice and one chunk of K, whole, in one piece: weights are
requested before anything that an earlier kernel writes is waited for. Chunks are fixed by K alone
and their sums (planes) are added in order by the reader, so a row's bits depend neither on its
neighbours nor on how many there are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.backend import IS_INTERPRETED
from kernels.lora_plan import PAGE_ROWS, SMALL_ROWS, Bridge, LoraPlan
from kernels.triton_lora_tiles import (
    PAGE,
    load_page,
    num_programs,
    read_unit,
    start_dependents,
    wait_for_inputs,
)


@dataclass(frozen=True, slots=True)
class ShrinkConfig:
    chunk: int  # of K, a power of two
    num_warps: int
    num_programs: int = 1536
    overlaps: bool = True  # programmatic dependent launch


def shrink_config(in_features: int) -> ShrinkConfig:
    return ShrinkConfig(chunk=512, num_warps=4)


@triton.jit(do_not_specialize=["num_tokens", "max_rank_pages"])
def _small_kernel(
    x_ptr,
    a_ptr,
    planes_ptr,
    header_ptr,
    units_ptr,
    in_features,
    num_tokens,
    max_rank_pages,
    stride_x,
    stride_slice: tl.int64,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    UPCAST: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    start_dependents(OVERLAPS)
    chunk = tl.program_id(0)
    part = tl.program_id(1)
    unit = tl.program_id(2)
    count = tl.load(header_ptr + 1)
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    in_row = columns < in_features
    lanes = tl.arange(0, PAGE)
    a_ptr += part * stride_slice
    row, rows, page, index = read_unit(units_ptr, unit, count)
    a = load_page(a_ptr, page, unit < count, columns, in_row, in_features, IS_EVEN)
    wait_for_inputs(OVERLAPS)
    while unit < count:
        offsets = tl.arange(0, ROWS)
        mask = (offsets < rows)[:, None]
        x_mask = mask
        if not IS_EVEN:
            x_mask = mask & in_row[None, :]
        x_rows = (row + offsets).to(tl.int64) * stride_x
        x = tl.load(x_ptr + x_rows[:, None] + columns[None, :], mask=x_mask, other=0.0)
        if UPCAST:
            bridge = tl.dot(x.to(tl.float32), tl.trans(a.to(tl.float32)), input_precision="ieee")
        else:
            bridge = tl.dot(x, tl.trans(a), input_precision="ieee")  # [ROWS, PAGE]
        block = part * max_rank_pages + index
        at = chunk.to(tl.int64) * tl.num_programs(1) * max_rank_pages * num_tokens * PAGE
        at += (block * num_tokens + row).to(tl.int64) * PAGE
        tl.store(planes_ptr + at + offsets[:, None] * PAGE + lanes[None, :], bridge, mask=mask)
        unit += tl.num_programs(2)
        row, rows, page, index = read_unit(units_ptr, unit, count)
        a = load_page(a_ptr, page, unit < count, columns, in_row, in_features, IS_EVEN)


def shrink(
    x: torch.Tensor, a_pool: torch.Tensor, plan: LoraPlan, config: ShrinkConfig | None = None
) -> Bridge:
    num_slices, _, in_features = a_pool.shape
    config = config or shrink_config(in_features)
    assert x.stride(1) == 1
    assert a_pool.is_contiguous()
    num_chunks = -(-in_features // config.chunk)
    tokens, pages = plan.num_tokens, plan.max_rank_pages
    shape = (num_chunks, num_slices, pages, tokens, PAGE_ROWS)
    planes = torch.empty(shape, dtype=torch.float32, device=x.device)
    if plan.max_units:
        others = num_chunks * num_slices
        overlaps = config.overlaps and not IS_INTERPRETED
        grid = (num_chunks, num_slices, num_programs(plan.max_units, others, config.num_programs))
        _small_kernel[grid](
            x,
            a_pool,
            planes,
            plan.header,
            plan.units,
            in_features,
            tokens,
            pages,
            x.stride(0),
            a_pool.stride(0),
            CHUNK=config.chunk,
            ROWS=SMALL_ROWS,
            IS_EVEN=in_features % config.chunk == 0,
            UPCAST=IS_INTERPRETED,
            OVERLAPS=overlaps,
            num_warps=config.num_warps,
            launch_pdl=overlaps,
        )
    return Bridge(planes)

"""The Triton kernel of `lora_add_rms_norm`: a program processes a whole row and finds its tile in
the plan.

The first page of B is requested before the preceding kernel has ended, and waits in registers. The
block and its warps are those of `add_rms_norm`, so the squares add up in the same order: a row
without adapter gets the bits of that op.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.lora_plan import Bridge, LoraPlan
from kernels.lora_rows import SiteRows
from kernels.triton_launch import OVERLAPS, Launcher, start_dependents, wait_for_inputs
from kernels.triton_lora_rows import (
    LENGTHS,
    METADATA,
    add_requested,
    load_bridge,
    max_tiles,
    read_planes,
    request_row,
)
from kernels.triton_lora_tiles import read_columns
from kernels.triton_rms_norm import add_and_norm, shape_of


@triton.jit(do_not_specialize=LENGTHS, do_not_specialize_on_alignment=METADATA)
def _lora_add_rms_norm_kernel(
    x_ptr,  # [T, HIDDEN]
    residual_ptr,  # becomes SCALE * (x + delta) + residual
    weight_ptr,
    out_ptr,
    planes_ptr,
    heap_ptr,
    header_ptr,
    tiles_ptr,
    pages_ptr,
    entries_ptr,
    num_tiles,
    num_planes,
    PLANES: tl.constexpr,
    STRIDE_X: tl.constexpr,
    STRIDE_RESIDUAL: tl.constexpr,
    STRIDE: tl.constexpr,
    AFFINE: tl.constexpr,
    HIDDEN: tl.constexpr,
    EPS: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    start_dependents(OVERLAPPED)
    IS_EVEN: tl.constexpr = HIDDEN == BLOCK
    token = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    b_columns = read_columns(heap_ptr, BLOCK)
    inside = columns < HIDDEN
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    num_rows, rank_pages, num_pages, first, entry, affine, b = request_row(
        header_ptr, tiles_ptr, heap_ptr, entries_ptr, token, num_tiles, b_columns, HIDDEN, STRIDE,
        AFFINE, TILES, IS_EVEN,
    )  # fmt: skip
    wait_for_inputs(OVERLAPPED)
    row = token.to(tl.int64)
    x = tl.load(x_ptr + row * STRIDE_X + columns, mask=inside, other=0.0)
    there = residual_ptr + row * STRIDE_RESIDUAL + columns
    residual = tl.load(there, mask=inside, other=0.0)
    h = load_bridge(planes_ptr, 0, rank_pages, token, entry != 0, num_rows, num_planes, PLANES)
    x = add_requested(
        x, h, b, entry, affine, num_pages, first, num_rows, rank_pages, heap_ptr, entries_ptr,
        pages_ptr, planes_ptr, token, num_planes, columns, b_columns, HIDDEN, PLANES, STRIDE,
        AFFINE, IS_EVEN,
    )  # fmt: skip
    normed = add_and_norm(x, residual, there, weight, inside, HIDDEN, EPS, SCALE)
    tl.store(out_ptr + row * HIDDEN + columns, normed, mask=inside)


_launch = Launcher(_lora_add_rms_norm_kernel, launch_pdl=OVERLAPS)


def launch_lora_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    bridge: Bridge,
    site: SiteRows,
    plan: LoraPlan,
    scale: float,
) -> torch.Tensor:
    rows, hidden = x.shape
    assert x.stride(1) == 1
    out = x.new_empty(x.shape)
    block, num_warps = shape_of(hidden)
    _launch(
        (rows, 1, 1),
        (x, residual, weight, out, bridge.planes, site.heap),
        (plan.header, plan.small, plan.pages, site.b_entries),
        (
            plan.max_small,
            *read_planes(bridge),
            x.stride(0),
            residual.stride(0),
            site.stride,
            site.affine,
            hidden,
            eps,
            scale,
            block,
            max_tiles(rows),
            OVERLAPS,
        ),
        num_warps,
    )
    return out

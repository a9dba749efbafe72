"""The Triton kernel of `lora_all_reduce_add_rms_norm`: `triton_lora_add_rms_norm` over ranks. A
program sends its row of the bridge beside its row of the product.

Each rank has a part of A's columns, so the bridge is the sum of all ranks' bridges, and B, which is
whole on every rank, is applied once to that sum. In the memory of a rank the bridges of all ranks
are planes of one bridge.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.collective import MAX_BRIDGE_PAGES, MAX_BRIDGE_ROWS, RowMemory
from kernels.lora_plan import Bridge, LoraPlan
from kernels.lora_rows import SiteRows
from kernels.triton_exchange_norm import receive_sum, send_row, send_signal
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
from kernels.triton_lora_tiles import PAGE, read_columns
from kernels.triton_rms_norm import add_and_norm, shape_of

_PAGES = tl.constexpr(MAX_BRIDGE_PAGES)
_ROWS = tl.constexpr(MAX_BRIDGE_ROWS)


@triton.jit
def _send_bridge(
    planes_ptr, num_pages, rank_pages, row, num_rows, num_planes, ranks_ptr,
    PLANES: tl.constexpr, BRIDGE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Writes this rank's bridge of a row to the memory of every rank. Pages in which the module has
    no rows are sent with any content, and not read."""
    rank = tl.load(ranks_ptr + SIZE)
    for page in range(num_pages):
        planes = load_bridge(planes_ptr, page, rank_pages, row, True, num_rows, num_planes, PLANES)
        h = tl.sum(planes, axis=0)
        place = ((rank * _PAGES + page) * _ROWS + row) * PAGE + tl.arange(0, PAGE)
        for peer in tl.static_range(SIZE):
            bridge = (tl.load(ranks_ptr + peer) + BRIDGE).to(tl.pointer_type(tl.float32))
            tl.store(tl.multiple_of(bridge, 16) + place, h)


@triton.jit(do_not_specialize=LENGTHS, do_not_specialize_on_alignment=METADATA)
def _lora_exchange_norm_kernel(
    x_ptr,  # [T, HIDDEN], this rank's part
    residual_ptr,  # becomes SCALE * (the sum of the parts + delta) + residual
    weight_ptr,
    out_ptr,
    planes_ptr,
    heap_ptr,
    ranks_ptr,
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
    HIDDEN: tl.constexpr,
    EPS: tl.constexpr,
    SCALE: tl.constexpr,
    PARTS_BYTES: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BRIDGE: tl.constexpr,
    PARTS: tl.constexpr,
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
        0, TILES, IS_EVEN,
    )  # fmt: skip
    wait_for_inputs(OVERLAPPED)
    row = token.to(tl.int64)
    x = tl.load(x_ptr + row * STRIDE_X + columns, mask=inside, other=0.0)
    send_row(x, columns, token, ranks_ptr, HIDDEN, SIZE, ROWS)
    _send_bridge(
        planes_ptr, num_pages, rank_pages, token, num_rows, num_planes, ranks_ptr, PLANES, BRIDGE,
        SIZE,
    )  # fmt: skip
    send_signal(token, ranks_ptr, PARTS_BYTES, SIZE, ROWS)
    there = residual_ptr + row * STRIDE_RESIDUAL + columns
    residual = tl.load(there, mask=inside, other=0.0)
    x = receive_sum(columns, token, ranks_ptr, x.dtype, HIDDEN, BLOCK, PARTS_BYTES, SIZE, ROWS)
    own = tl.load(ranks_ptr + tl.load(ranks_ptr + SIZE)) + BRIDGE
    bridges = tl.multiple_of(own.to(tl.pointer_type(tl.float32)), 16)
    h = load_bridge(bridges, 0, _PAGES, token, entry != 0, _ROWS, SIZE, PARTS)
    x = add_requested(
        x, h, b, entry, affine, num_pages, first, _ROWS, _PAGES, heap_ptr, entries_ptr, pages_ptr,
        bridges, token, SIZE, columns, b_columns, HIDDEN, PARTS, STRIDE, 0, IS_EVEN,
    )  # fmt: skip
    normed = add_and_norm(x, residual, there, weight, inside, HIDDEN, EPS, SCALE)
    tl.store(out_ptr + row * HIDDEN + columns, normed, mask=inside)


_launch = Launcher(_lora_exchange_norm_kernel, launch_pdl=OVERLAPS)


def launch_lora_exchange_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    bridge: Bridge,
    site: SiteRows,
    plan: LoraPlan,
    scale: float,
    memory: RowMemory,
) -> torch.Tensor:
    """Returns the normed sum [T, H]; the residual is the sum. The adapters have no affine rows."""
    rows, hidden = x.shape
    assert x.stride(1) == 1
    assert rows <= MAX_BRIDGE_ROWS
    assert not site.affine
    out = x.new_empty(x.shape)
    block, num_warps = shape_of(hidden)
    row_bytes = hidden * x.itemsize
    _, size, _ = layout = memory.layout(row_bytes)
    _launch(
        (rows, 1, 1),
        (x, residual, weight, out, bridge.planes, site.heap, memory.ranks),
        (plan.header, plan.small, plan.pages, site.b_entries),
        (
            plan.max_small,
            *read_planes(bridge),
            x.stride(0),
            residual.stride(0),
            site.stride,
            hidden,
            eps,
            scale,
            *layout,
            memory.bridge_start(row_bytes),
            triton.next_power_of_2(size),
            block,
            max_tiles(rows),
            OVERLAPS,
        ),
        num_warps,
    )
    return out

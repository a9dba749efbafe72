"""The Triton kernels of `lora_silu_mul`: a program processes columns of gate and those of up.

Small tiles of adapters in 16 bits have a kernel of their own on Hopper, gluon_lora_silu_mul, whose
sums may be rounded the other way. Otherwise the sums are computed as in `lora_expand_` and rounded
to the activations' type before the activation: the bits are those of the two ops apart.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.backend import IS_INTERPRETED, is_hopper
from kernels.few_rows import HALF_TYPES
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
    add_delta,
    add_row,
    find_affine,
    find_strip,
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
from kernels.triton_silu_mul import gated

NUM_WARPS = 1
NUM_PROGRAMS = 4224
LARGE_PART = 16
LARGE_COLUMNS = 128
LARGE_WARPS = 4
LARGE_STAGES = 3


@triton.jit(do_not_specialize_on_alignment=["header_ptr", "tiles_ptr", "pages_ptr", "entries_ptr"])
def _lora_silu_mul_kernel(
    x_ptr,  # [T, 2 * WIDTH]
    planes_ptr,
    heap_ptr,
    out_ptr,  # [T, WIDTH]
    header_ptr,
    tiles_ptr,
    pages_ptr,
    entries_ptr,  # of B, [pages, 2], STRIDE apart
    WIDTH: tl.constexpr,
    STRIDE_X: tl.constexpr,
    STRIDE: tl.constexpr,
    AFFINE: tl.constexpr,
    NUM_PLANES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GELU: tl.constexpr,
    EXACT: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    start_dependents(OVERLAPPED)
    IS_EVEN: tl.constexpr = WIDTH % COLUMNS == 0
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    b_columns = tl.program_id(0) * COLUMNS + read_columns(heap_ptr, COLUMNS)
    count = tl.load(header_ptr)
    num_rows = tl.load(header_ptr + 3)
    rank_pages = tl.load(header_ptr + 5)
    tile = tl.program_id(1)
    row, rows, num_pages, first, page, at_bridge = read_tile(tiles_ptr, tile, True, ROWS, 1)
    live = (num_pages > 0) & (tile < count)
    gate_entry = find_strip(entries_ptr, page, live, STRIDE)
    up_entry = find_strip(entries_ptr + 1, page, live, STRIDE)
    gate_affine = find_affine(entries_ptr, page, live, STRIDE, AFFINE)
    up_affine = find_affine(entries_ptr + 1, page, live, STRIDE, AFFINE)
    gate_b = load_strip(heap_ptr, gate_entry, b_columns, WIDTH, IS_EVEN)
    up_b = load_strip(heap_ptr, up_entry, b_columns, WIDTH, IS_EVEN)
    wait_for_inputs(OVERLAPPED)
    blocks = 2 * rank_pages
    while tile < count:
        tile += tl.num_programs(1)
        next_row, next_rows, next_num_pages, next_first, next_page, next_at = read_tile(
            tiles_ptr, tile, tile < count, ROWS, 1
        )
        live = next_num_pages > 0
        next_gate_entry = find_strip(entries_ptr, next_page, live, STRIDE)
        next_up_entry = find_strip(entries_ptr + 1, next_page, live, STRIDE)
        next_gate_affine = find_affine(entries_ptr, next_page, live, STRIDE, AFFINE)
        next_up_affine = find_affine(entries_ptr + 1, next_page, live, STRIDE, AFFINE)
        left = rows
        x_at = x_ptr + row.to(tl.int64) * STRIDE_X
        out_at = out_ptr + row.to(tl.int64) * WIDTH
        gate_0, gate_1 = load_pair(x_at, STRIDE_X, columns, WIDTH, left)
        up_0, up_1 = load_pair(x_at + WIDTH, STRIDE_X, columns, WIDTH, left)
        while left > 0:
            owned = tl.where(gate_entry != 0, left, 0)
            g_0, g_1 = load_planes(planes_ptr, 0, blocks, at_bridge, owned, num_rows, NUM_PLANES)
            owned = tl.where(up_entry != 0, left, 0)
            u_0, u_1 = load_planes(
                planes_ptr, rank_pages, blocks, at_bridge, owned, num_rows, NUM_PLANES
            )
            # Loads the next pair while this one is processed.
            x_at += 2 * STRIDE_X
            next_gate_0, next_gate_1 = load_pair(x_at, STRIDE_X, columns, WIDTH, left - 2)
            next_up_0, next_up_1 = load_pair(x_at + WIDTH, STRIDE_X, columns, WIDTH, left - 2)
            if gate_entry != 0:
                delta_0, delta_1, gate_b = pair_delta(
                    heap_ptr, entries_ptr, gate_entry, gate_b, g_0, g_1, b_columns, WIDTH,
                    num_pages, first, pages_ptr, planes_ptr, 0, blocks, at_bridge, left, num_rows,
                    NUM_PLANES, STRIDE, IS_EVEN, gate_0.dtype,
                )  # fmt: skip
                gate_0 = add_row(gate_0, delta_0, heap_ptr, gate_affine, columns, WIDTH, AFFINE)
                gate_1 = add_row(gate_1, delta_1, heap_ptr, gate_affine, columns, WIDTH, AFFINE)
            if up_entry != 0:
                delta_0, delta_1, up_b = pair_delta(
                    heap_ptr, entries_ptr + 1, up_entry, up_b, u_0, u_1, b_columns, WIDTH,
                    num_pages, first, pages_ptr, planes_ptr, rank_pages, blocks, at_bridge, left,
                    num_rows, NUM_PLANES, STRIDE, IS_EVEN, up_0.dtype,
                )  # fmt: skip
                up_0 = add_row(up_0, delta_0, heap_ptr, up_affine, columns, WIDTH, AFFINE)
                up_1 = add_row(up_1, delta_1, heap_ptr, up_affine, columns, WIDTH, AFFINE)
            out_0 = gated(gate_0, up_0, GELU, EXACT)
            out_1 = gated(gate_1, up_1, GELU, EXACT)
            store_pair(out_at, WIDTH, columns, WIDTH, left, out_0, out_1)
            gate_0, gate_1, up_0, up_1 = next_gate_0, next_gate_1, next_up_0, next_up_1
            out_at += 2 * WIDTH
            at_bridge += 2
            left -= 2
        row, rows, num_pages, first, at_bridge = (
            next_row, next_rows, next_num_pages, next_first, next_at,
        )  # fmt: skip
        gate_entry, up_entry = next_gate_entry, next_up_entry
        gate_affine, up_affine = next_gate_affine, next_up_affine
        gate_b = load_strip(heap_ptr, gate_entry, b_columns, WIDTH, IS_EVEN)
        up_b = load_strip(heap_ptr, up_entry, b_columns, WIDTH, IS_EVEN)
    wait_for_sibling(OVERLAPPED)


@triton.jit
def _activate_rows(
    x_ptr,  # of the first row
    sums_ptr,
    heap_ptr,
    out_ptr,
    pages_ptr,
    entries_ptr,
    gate_b,  # the first pages
    up_b,
    gate_entry,
    up_entry,
    gate_affine,
    up_affine,
    rows,
    num_pages,
    first,
    at_bridge,
    num_rows,
    rank_pages,
    columns,
    b_columns,
    WIDTH: tl.constexpr,
    STRIDE_X: tl.constexpr,
    STRIDE: tl.constexpr,
    AFFINE: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    COLUMNS: tl.constexpr,
    GELU: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Stores the activation of `rows` rows, ROWS at a time."""
    IS_EVEN: tl.constexpr = WIDTH % COLUMNS == 0
    offsets = tl.arange(0, ROWS)
    lanes = tl.arange(0, PAGE)
    page_stride = num_rows.to(tl.int64) * PAGE
    adds_gate = gate_entry != 0
    adds_up = up_entry != 0
    for start in tl.range(0, rows, ROWS, num_stages=STAGES):
        token = (start + offsets).to(tl.int64)[:, None]
        live = (offsets < rows - start)[:, None]
        mask = live
        if not IS_EVEN:
            mask = mask & (columns < WIDTH)[None, :]
        x_at = x_ptr + token * STRIDE_X + columns[None, :]
        gate = tl.load(x_at, mask=mask, other=0.0)
        up = tl.load(x_at + WIDTH, mask=mask, other=0.0)
        h_at = sums_ptr + (at_bridge + start + offsets)[:, None] * PAGE + lanes[None, :]
        gate_h = tl.load(h_at, mask=live & adds_gate, other=0.0)
        up_h = tl.load(h_at + rank_pages * page_stride, mask=live & adds_up, other=0.0)
        zeros = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        gate_delta = page_dot(gate_h, gate_b, zeros, gate.dtype, not EXACT)
        up_delta = page_dot(up_h, up_b, zeros, up.dtype, not EXACT)
        for i in range(1, num_pages):
            page = tl.load(pages_ptr + first + i)
            more_gate = find_strip(entries_ptr, page, True, STRIDE)
            more_up = find_strip(entries_ptr + 1, page, True, STRIDE)
            more_gate_b = load_strip(heap_ptr, more_gate, b_columns, WIDTH, IS_EVEN)
            more_up_b = load_strip(heap_ptr, more_up, b_columns, WIDTH, IS_EVEN)
            more_at = h_at + i * page_stride
            gate_h = tl.load(more_at, mask=live & (more_gate != 0), other=0.0)
            more_at += rank_pages * page_stride
            up_h = tl.load(more_at, mask=live & (more_up != 0), other=0.0)
            gate_delta = page_dot(gate_h, more_gate_b, gate_delta, gate.dtype, not EXACT)
            up_delta = page_dot(up_h, more_up_b, up_delta, up.dtype, not EXACT)
        gate = add_delta(gate, gate_delta, adds_gate, heap_ptr, gate_affine, columns, WIDTH, AFFINE)
        up = add_delta(up, up_delta, adds_up, heap_ptr, up_affine, columns, WIDTH, AFFINE)
        out_at = out_ptr + token * WIDTH + columns[None, :]
        tl.store(out_at, gated(gate, up, GELU, EXACT), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["header_ptr", "tiles_ptr", "pages_ptr", "entries_ptr"])
def _lora_silu_mul_large_kernel(
    x_ptr,
    sums_ptr,
    heap_ptr,
    out_ptr,
    header_ptr,
    tiles_ptr,
    pages_ptr,
    entries_ptr,  # of B, [pages, 2], STRIDE apart
    WIDTH: tl.constexpr,
    STRIDE_X: tl.constexpr,
    STRIDE: tl.constexpr,
    AFFINE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    COLUMNS: tl.constexpr,
    GELU: tl.constexpr,
    EXACT: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait_for_inputs(OVERLAPPED)
    start_dependents(OVERLAPPED)  # the sibling of small tiles, which does not wait
    IS_EVEN: tl.constexpr = WIDTH % COLUMNS == 0
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    b_columns = tl.program_id(0) * COLUMNS + read_columns(heap_ptr, COLUMNS)
    count = tl.load(header_ptr + 2)
    num_rows = tl.load(header_ptr + 4)
    rank_pages = tl.load(header_ptr + 5)
    tile = tl.program_id(1)
    row, rows, num_pages, first, page, at_bridge = read_tile(tiles_ptr, tile, True, TILE_ROWS, 1)
    if tile >= count:
        return
    gate_entry = find_strip(entries_ptr, page, num_pages > 0, STRIDE)
    up_entry = find_strip(entries_ptr + 1, page, num_pages > 0, STRIDE)
    gate_affine = find_affine(entries_ptr, page, num_pages > 0, STRIDE, AFFINE)
    up_affine = find_affine(entries_ptr + 1, page, num_pages > 0, STRIDE, AFFINE)
    gate_b = widen(
        load_strip(heap_ptr, gate_entry, b_columns, WIDTH, IS_EVEN), x_ptr.dtype.element_ty
    )
    up_b = widen(load_strip(heap_ptr, up_entry, b_columns, WIDTH, IS_EVEN), x_ptr.dtype.element_ty)
    x_ptr += row.to(tl.int64) * STRIDE_X
    out_ptr += row.to(tl.int64) * WIDTH
    if num_pages <= 1:  # a constant, without which no load of the loop over rows runs ahead
        _activate_rows(
            x_ptr, sums_ptr, heap_ptr, out_ptr, pages_ptr, entries_ptr, gate_b, up_b, gate_entry,
            up_entry, gate_affine, up_affine, rows, 1, first, at_bridge, num_rows, rank_pages,
            columns, b_columns, WIDTH, STRIDE_X, STRIDE, AFFINE, ROWS, STAGES, COLUMNS, GELU, EXACT,
        )  # fmt: skip
    else:
        _activate_rows(
            x_ptr, sums_ptr, heap_ptr, out_ptr, pages_ptr, entries_ptr, gate_b, up_b, gate_entry,
            up_entry, gate_affine, up_affine, rows, num_pages, first, at_bridge, num_rows,
            rank_pages, columns, b_columns, WIDTH, STRIDE_X, STRIDE, AFFINE, ROWS, 1, COLUMNS,
            GELU, EXACT,
        )  # fmt: skip


_launch = Launcher(_lora_silu_mul_kernel, launch_pdl=OVERLAPS)
_launch_large = Launcher(_lora_silu_mul_large_kernel, launch_pdl=OVERLAPS)


def launch_lora_silu_mul(
    gate_up: torch.Tensor, bridge: Bridge, site: SiteRows, plan: LoraPlan, is_gelu: bool
) -> torch.Tensor:
    width = gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1
    out = gate_up.new_empty((gate_up.shape[0], width))
    overlapped: int = OVERLAPS
    if plan.max_large:
        _launch_large_tiles(out, gate_up, bridge, site, plan, is_gelu)
        overlapped = BESIDE_SIBLING
    if plan.max_small and shares_units(gate_up, site):
        from kernels.gluon_lora_silu_mul import launch_silu_mul_units

        launch_silu_mul_units(out, gate_up, bridge, site, plan, is_gelu, overlapped)
    elif plan.max_small:
        blocks = -(-width // COLUMNS)
        _launch(
            (blocks, num_programs(plan.max_small, blocks, NUM_PROGRAMS), 1),
            (gate_up, bridge.planes, site.heap, out),
            (plan.header, plan.small, plan.pages, site.b_entries),
            (
                width,
                gate_up.stride(0),
                site.stride,
                site.affine,
                bridge.planes.shape[0],
                SMALL_ROWS,
                COLUMNS,
                is_gelu,
                not IS_INTERPRETED,
                overlapped,
            ),
            NUM_WARPS,
        )
    return out


def _launch_large_tiles(
    out: torch.Tensor,
    gate_up: torch.Tensor,
    bridge: Bridge,
    site: SiteRows,
    plan: LoraPlan,
    is_gelu: bool,
) -> None:
    width = out.shape[1]
    _launch_large(
        (-(-width // LARGE_COLUMNS), plan.max_large, 1),
        (gate_up, bridge.planes if bridge.sums is None else bridge.sums, site.heap, out),
        (plan.header, plan.large, plan.pages, site.b_entries),
        (
            width,
            gate_up.stride(0),
            site.stride,
            site.affine,
            LARGE_ROWS,
            LARGE_PART,
            LARGE_STAGES,
            LARGE_COLUMNS,
            is_gelu,
            not IS_INTERPRETED,
            OVERLAPS,
        ),
        LARGE_WARPS,
    )


def shares_units(gate_up: torch.Tensor, site: SiteRows) -> bool:
    """Returns True where small tiles have the kernel in Gluon. A row of B must be a multiple of 16
    bytes, which a copy has."""
    is_half = gate_up.dtype in HALF_TYPES and not site.is_int8
    return is_half and is_hopper(gate_up) and site.sizes[0] % 8 == 0

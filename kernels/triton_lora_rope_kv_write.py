"""The Triton kernel of `lora_rope_kv_write`: a program processes some heads of a tile.

The sums are rounded to the activations' type, then rotated as `rope_kv_write` does it, product by
product; the expand of small tiles is the same code as `lora_expand_`'s. So the bits are those of
the two ops apart for heads of 128. For 64 and 80 the compiler may contract a rotation's products
and sums differently (a unit in the last place, seen on an H200), and with q_norm and k_norm the
squares of a head may add up in another order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.backend import IS_INTERPRETED
from kernels.lora_plan import SMALL_ROWS, Bridge, LoraPlan
from kernels.lora_rows import SiteRows
from kernels.rope_write import RopeWrite
from kernels.triton_launch import OVERLAPS, Launcher, start_dependents, wait_for_inputs
from kernels.triton_lora_heads import norm_heads, pick_heads, turn
from kernels.triton_lora_rope_large import launch_lora_rope_large
from kernels.triton_lora_tiles import (
    COLUMNS,
    find_strip,
    load_pair,
    load_planes,
    load_strip,
    num_programs,
    pair_delta,
    read_tile,
)

NUM_WARPS = 1
NUM_PROGRAMS = 2112


@triton.jit
def _finish_row(
    low,
    high,
    token,
    part,
    head,  # of each lane, within its slice
    lane,
    exists,
    cos_sin_ptr,
    k_cache_ptr,
    v_cache_ptr,
    q_norm_ptr,
    k_norm_ptr,
    q_ptr,
    positions_ptr,
    slots_ptr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    EPS: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Norms, rotates and writes one token's heads, [LANES] of either half."""
    position = tl.load(positions_ptr + token).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    table = cos_sin_ptr + position * (2 * HALF) + lane
    cos = tl.load(table, mask=exists, other=0.0)
    sin = tl.load(table + HALF, mask=exists, other=0.0)
    turning_low, turning_high = low, high
    if HAS_NORM:
        LANES: tl.constexpr = low.shape[0]
        norm_ptr = tl.where(part == 0, q_norm_ptr, k_norm_ptr) + lane
        weight_low = tl.load(norm_ptr, mask=exists, other=0.0)
        weight_high = tl.load(norm_ptr + HALF, mask=exists, other=0.0)
        normed_low, normed_high = norm_heads(
            tl.reshape(low, [HEADS, LANES // HEADS]),
            tl.reshape(high, [HEADS, LANES // HEADS]),
            tl.reshape(weight_low, [HEADS, LANES // HEADS]),
            tl.reshape(weight_high, [HEADS, LANES // HEADS]),
            2 * HALF,
            EPS,
        )
        turning_low = tl.reshape(normed_low, [LANES])
        turning_high = tl.reshape(normed_high, [LANES])
    turned_low, turned_high = turn(turning_low, turning_high, cos, sin, EXACT)
    if part == 0:
        q_at = q_ptr + (token.to(tl.int64) * NUM_HEADS + head) * (2 * HALF) + lane
        tl.store(q_at, turned_low, mask=exists)
        tl.store(q_at + HALF, turned_high, mask=exists)
    else:
        # A negative slot marks a padding row of a CUDA graph.
        written = exists & (lane < tl.where(slot >= 0, HALF, 0))
        kv_at = (slot * NUM_KV_HEADS + head) * (2 * HALF) + lane
        cached: tl.constexpr = k_cache_ptr.dtype.element_ty
        if part == 1:
            tl.store(k_cache_ptr + kv_at, turned_low.to(cached), mask=written)
            tl.store(k_cache_ptr + kv_at + HALF, turned_high.to(cached), mask=written)
        else:
            tl.store(v_cache_ptr + kv_at, low.to(cached), mask=written)
            tl.store(v_cache_ptr + kv_at + HALF, high.to(cached), mask=written)


@triton.jit(
    do_not_specialize_on_alignment=[
        "header_ptr",
        "tiles_ptr",
        "pages_ptr",
        "entries_ptr",
        "positions_ptr",
        "slots_ptr",
    ]
)
def _lora_rope_kernel(
    qkv_ptr,  # [T, (Hq + 2 * Hkv) * D]
    planes_ptr,
    heap_ptr,
    cos_sin_ptr,  # [max_positions, 2, D / 2]
    k_cache_ptr,  # [slots, Hkv, D]
    v_cache_ptr,
    q_norm_ptr,
    k_norm_ptr,
    q_ptr,  # [T, Hq, D]
    header_ptr,
    tiles_ptr,
    pages_ptr,
    entries_ptr,
    positions_ptr,
    slots_ptr,
    STRIDE_QKV: tl.constexpr,
    STRIDE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
    EPS: tl.constexpr,
    NUM_PLANES: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,  # halves of heads side by side: as many columns as the expand's
    EXACT: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    start_dependents(OVERLAPPED)
    WIDTH: tl.constexpr = triton.next_power_of_2(HALF)
    HEADS: tl.constexpr = LANES // WIDTH
    IS_EVEN: tl.constexpr = WIDTH == HALF and NUM_HEADS % HEADS == 0 and NUM_KV_HEADS % HEADS == 0
    part, heads, head, before = pick_heads(tl.program_id(0), NUM_HEADS, NUM_KV_HEADS, HEADS)
    entries_ptr += part
    lane = tl.arange(0, LANES) % WIDTH
    head += tl.arange(0, LANES) // WIDTH
    exists = (lane < HALF) & (head < heads)
    width = heads * (2 * HALF)
    low_columns = head * (2 * HALF) + lane
    if not IS_EVEN:
        low_columns = tl.where(exists, low_columns, width)  # beyond its end: masked
    high_columns = low_columns + HALF
    count = tl.load(header_ptr)
    num_rows = tl.load(header_ptr + 3)
    rank_pages = tl.load(header_ptr + 5)
    tile = tl.program_id(1)
    row, rows, num_pages, first, page, at_bridge = read_tile(tiles_ptr, tile, True, ROWS, 1)
    entry = find_strip(entries_ptr, page, (num_pages > 0) & (tile < count), STRIDE)
    low_b = load_strip(heap_ptr, entry, low_columns, width, IS_EVEN)
    high_b = load_strip(heap_ptr, entry, high_columns, width, IS_EVEN)
    wait_for_inputs(OVERLAPPED)
    block = part * rank_pages
    blocks = 3 * rank_pages
    begin = before * (2 * HALF)
    while tile < count:
        tile += tl.num_programs(1)
        next_row, next_rows, next_num_pages, next_first, next_page, next_at = read_tile(
            tiles_ptr, tile, tile < count, ROWS, 1
        )
        next_entry = find_strip(entries_ptr, next_page, next_num_pages > 0, STRIDE)
        left = rows
        while left > 0:
            owned = tl.where(entry != 0, left, 0)
            x_at = qkv_ptr + row.to(tl.int64) * STRIDE_QKV + begin
            h_0, h_1 = load_planes(
                planes_ptr, block, blocks, at_bridge, owned, num_rows, NUM_PLANES
            )
            low_0, low_1 = load_pair(x_at, STRIDE_QKV, low_columns, width, left)
            high_0, high_1 = load_pair(x_at, STRIDE_QKV, high_columns, width, left)
            if entry != 0:
                delta_0, delta_1, low_b = pair_delta(
                    heap_ptr, entries_ptr, entry, low_b, h_0, h_1, low_columns, width,
                    num_pages, first, pages_ptr, planes_ptr, block, blocks, at_bridge, left,
                    num_rows, NUM_PLANES, STRIDE, IS_EVEN,
                )  # fmt: skip
                low_0 = (low_0.to(tl.float32) + delta_0).to(low_0.dtype)
                low_1 = (low_1.to(tl.float32) + delta_1).to(low_1.dtype)
                delta_0, delta_1, high_b = pair_delta(
                    heap_ptr, entries_ptr, entry, high_b, h_0, h_1, high_columns, width,
                    num_pages, first, pages_ptr, planes_ptr, block, blocks, at_bridge, left,
                    num_rows, NUM_PLANES, STRIDE, IS_EVEN,
                )  # fmt: skip
                high_0 = (high_0.to(tl.float32) + delta_0).to(high_0.dtype)
                high_1 = (high_1.to(tl.float32) + delta_1).to(high_1.dtype)
            _finish_row(
                low_0, high_0, row, part, head, lane, exists, cos_sin_ptr, k_cache_ptr,
                v_cache_ptr, q_norm_ptr, k_norm_ptr, q_ptr, positions_ptr, slots_ptr, NUM_HEADS,
                NUM_KV_HEADS, HALF, HEADS, HAS_NORM, EPS, EXACT,
            )  # fmt: skip
            if left > 1:
                _finish_row(
                    low_1, high_1, row + 1, part, head, lane, exists, cos_sin_ptr, k_cache_ptr,
                    v_cache_ptr, q_norm_ptr, k_norm_ptr, q_ptr, positions_ptr, slots_ptr,
                    NUM_HEADS, NUM_KV_HEADS, HALF, HEADS, HAS_NORM, EPS, EXACT,
                )  # fmt: skip
            row += 2
            at_bridge += 2
            left -= 2
        row, rows, num_pages, first, at_bridge = (
            next_row, next_rows, next_num_pages, next_first, next_at,
        )  # fmt: skip
        entry = next_entry
        low_b = load_strip(heap_ptr, entry, low_columns, width, IS_EVEN)
        high_b = load_strip(heap_ptr, entry, high_columns, width, IS_EVEN)


_launch = Launcher(_lora_rope_kernel, launch_pdl=OVERLAPS)


def launch_lora_rope_kv_write(
    qkv: torch.Tensor,
    bridge: Bridge,
    site: SiteRows,
    plan: LoraPlan,
    write: RopeWrite,
) -> torch.Tensor:
    q = write.new_q(qkv)
    num_heads, num_kv_heads, half = write.num_heads, write.num_kv_heads, write.head_dim // 2
    tensors = (
        site.heap,
        write.cos_sin,
        write.k_cache,
        write.v_cache,
        write.q_norm if write.q_norm is not None else qkv,
        write.k_norm if write.k_norm is not None else qkv,
        q,
    )
    constants = (
        qkv.stride(0),
        site.stride,
        num_heads,
        num_kv_heads,
        half,
        write.has_norm,
        write.eps,
    )
    if plan.max_small:
        heads = COLUMNS // (1 << (half - 1).bit_length())
        blocks = -(-num_heads // heads) + 2 * -(-num_kv_heads // heads)
        _launch(
            (blocks, num_programs(plan.max_small, blocks, NUM_PROGRAMS), 1),
            (qkv, bridge.planes, *tensors),
            (plan.header, plan.small, plan.pages, site.b_entries, write.positions, write.slots),
            (
                *constants,
                bridge.planes.shape[0],
                SMALL_ROWS,
                COLUMNS,
                not IS_INTERPRETED,
                OVERLAPS,
            ),
            NUM_WARPS,
        )
    if plan.max_large:
        launch_lora_rope_large(qkv, bridge, site, plan, write, tensors, constants)
    return q

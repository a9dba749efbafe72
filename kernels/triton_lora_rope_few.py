"""The Triton kernel of `lora_rope_kv_write` for few rows and without norms: one program per head of
a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.backend import IS_INTERPRETED
from kernels.lora_plan import Bridge, LoraPlan
from kernels.lora_rows import SiteRows
from kernels.rope_write import RopeWrite
from kernels.triton_e4m3 import to_cached
from kernels.triton_launch import OVERLAPS, Launcher, start_dependents, wait_for_inputs
from kernels.triton_lora_heads import is_partial, place_lanes, query_factor, turn_lanes
from kernels.triton_lora_rows import (
    LENGTHS,
    METADATA,
    find_row,
    load_bridge,
    more_delta,
    read_planes,
    row_delta,
)
from kernels.triton_lora_tiles import (
    add_row,
    find_affine,
    find_strip,
    load_strip,
    read_columns,
)

NUM_WARPS = 4


@triton.jit(
    do_not_specialize=LENGTHS,
    do_not_specialize_on_alignment=(*METADATA, "positions_ptr", "slots_ptr"),
)
def _rope_few_kernel(
    qkv_ptr,  # [T, (NUM_HEADS + 2 * NUM_KV_HEADS) * 2 * HALF]
    planes_ptr,
    heap_ptr,
    cos_sin_ptr,
    k_cache_ptr,
    v_cache_ptr,
    q_ptr,
    header_ptr,
    tiles_ptr,
    pages_ptr,
    entries_ptr,
    positions_ptr,
    slots_ptr,
    num_tiles,
    num_planes,
    PLANES: tl.constexpr,
    STRIDE_QKV: tl.constexpr,
    STRIDE: tl.constexpr,
    AFFINE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    TURNING: tl.constexpr,
    Q_BETA: tl.constexpr,
    Q_LENGTH: tl.constexpr,
    EXACT: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    start_dependents(OVERLAPPED)
    WIDTH: tl.constexpr = triton.next_power_of_2(HALF)
    IS_EVEN: tl.constexpr = WIDTH == HALF
    token = tl.program_id(1)
    head = tl.program_id(0)
    is_k = head >= NUM_HEADS
    is_v = head >= NUM_HEADS + NUM_KV_HEADS
    part = is_k.to(tl.int32) + is_v.to(tl.int32)
    entries_ptr += part
    width = tl.where(is_k, NUM_KV_HEADS, NUM_HEADS) * (2 * HALF)
    local = head - tl.where(is_v, NUM_HEADS + NUM_KV_HEADS, tl.where(is_k, NUM_HEADS, 0))
    lane = tl.arange(0, WIDTH)
    exists = lane < HALF
    place, gap = place_lanes(lane, HALF, TURNING)
    turns = exists
    if is_partial(HALF, TURNING):
        turns = lane < TURNING
    low_columns = local * (2 * HALF) + place
    high_columns = low_columns + gap
    b_lane = read_columns(heap_ptr, WIDTH)
    b_place, b_gap = place_lanes(b_lane, HALF, TURNING)
    low_b_columns = local * (2 * HALF) + b_place
    high_b_columns = low_b_columns + b_gap
    if not IS_EVEN:
        low_b_columns = tl.where(b_lane < HALF, low_b_columns, width)
        high_b_columns = tl.where(b_lane < HALF, high_b_columns, width)
        low_columns = tl.where(exists, low_columns, width)  # beyond its end: masked
        high_columns = tl.where(exists, high_columns, width)
    position = tl.load(positions_ptr + token).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    num_rows = tl.load(header_ptr + 3)
    rank_pages = tl.load(header_ptr + 5)
    num_pages, first, page = find_row(header_ptr, tiles_ptr, token, num_tiles)
    entry = find_strip(entries_ptr, page, num_pages > 0, STRIDE)
    affine = find_affine(entries_ptr, page, num_pages > 0, STRIDE, AFFINE)
    live = entry != 0
    low_b = load_strip(heap_ptr, entry, low_b_columns, width, IS_EVEN)
    high_b = load_strip(heap_ptr, entry, high_b_columns, width, IS_EVEN)
    if TURNING > 0:
        table = cos_sin_ptr + position * (2 * TURNING) + lane
        cos = tl.load(table, mask=turns, other=0.0)
        sin = tl.load(table + TURNING, mask=turns, other=0.0)
    wait_for_inputs(OVERLAPPED)
    x_at = qkv_ptr + token.to(tl.int64) * STRIDE_QKV + head * (2 * HALF) + place
    low = tl.load(x_at, mask=exists, other=0.0)
    high = tl.load(x_at + gap, mask=exists, other=0.0)
    block, blocks = part * rank_pages, 3 * rank_pages
    h = load_bridge(planes_ptr, block, blocks, token, live, num_rows, num_planes, PLANES)
    if live:
        low_delta = row_delta(h, low_b, low.dtype)
        high_delta = row_delta(h, high_b, high.dtype)
        for i in range(1, num_pages):
            low_delta = more_delta(
                low_delta, i, heap_ptr, entries_ptr, pages_ptr, first, planes_ptr, block, blocks,
                token, num_rows, num_planes, low_b_columns, width, PLANES, STRIDE, IS_EVEN,
                low.dtype,
            )  # fmt: skip
            high_delta = more_delta(
                high_delta, i, heap_ptr, entries_ptr, pages_ptr, first, planes_ptr, block, blocks,
                token, num_rows, num_planes, high_b_columns, width, PLANES, STRIDE, IS_EVEN,
                high.dtype,
            )  # fmt: skip
        low = add_row(low, low_delta, heap_ptr, affine, low_columns, width, AFFINE)
        high = add_row(high, high_delta, heap_ptr, affine, high_columns, width, AFFINE)
    if TURNING > 0:
        turned_low, turned_high = turn_lanes(low, high, cos, sin, turns, HALF, TURNING, EXACT)
        low = tl.where(is_v, low, turned_low)
        high = tl.where(is_v, high, turned_high)
    if is_k:
        # A negative slot marks a padding row of a CUDA graph.
        written = exists & (lane < tl.where(slot >= 0, HALF, 0))
        cache_ptr = tl.where(is_v, v_cache_ptr, k_cache_ptr)
        kv_at = cache_ptr + (slot * NUM_KV_HEADS + local) * (2 * HALF) + place
        tl.store(kv_at, to_cached(low, cache_ptr.dtype.element_ty), mask=written)
        tl.store(kv_at + gap, to_cached(high, cache_ptr.dtype.element_ty), mask=written)
    else:
        if Q_BETA != 0.0:
            factor = query_factor(position, Q_BETA, Q_LENGTH)
            low = (low.to(tl.float32) * factor).to(low.dtype)
            high = (high.to(tl.float32) * factor).to(low.dtype)
        at = q_ptr + (token.to(tl.int64) * NUM_HEADS + local) * (2 * HALF) + place
        tl.store(at, low, mask=exists)
        tl.store(at + gap, high, mask=exists)


_launch = Launcher(_rope_few_kernel, launch_pdl=OVERLAPS)


def launch_rope_few(
    qkv: torch.Tensor,
    bridge: Bridge,
    site: SiteRows,
    plan: LoraPlan,
    write: RopeWrite,  # its positions and slots: copied to the device before the step, by no kernel
) -> torch.Tensor:
    q = write.new_q(qkv)
    _launch(
        (write.num_heads + 2 * write.num_kv_heads, qkv.shape[0], 1),
        (
            qkv,
            bridge.planes,
            site.heap,
            write.cos_sin if write.cos_sin is not None else qkv,
            write.k_cache,
            write.v_cache,
            q,
        ),
        (plan.header, plan.small, plan.pages, site.b_entries, write.positions, write.slots),
        (
            plan.max_small,
            *read_planes(bridge),
            qkv.stride(0),
            site.stride,
            site.affine,
            write.num_heads,
            write.num_kv_heads,
            write.head_dim // 2,
            *write.constants,
            not IS_INTERPRETED,
            OVERLAPS,
        ),
        NUM_WARPS,
    )
    return q

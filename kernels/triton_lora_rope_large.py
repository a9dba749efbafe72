"""Large tiles of the expand inside RoPE and the KV write: some heads of 32 tokens per program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.backend import IS_INTERPRETED
from kernels.lora_plan import LARGE_ROWS, Bridge, LoraPlan
from kernels.lora_rows import SiteRows
from kernels.rope_write import RopeWrite
from kernels.triton_e4m3 import to_cached
from kernels.triton_launch import OVERLAPS, Launcher, start_dependents, wait_for_inputs
from kernels.triton_lora_heads import (
    is_partial,
    norm_heads,
    pick_heads,
    place_lanes,
    query_factor,
    turn_lanes,
)
from kernels.triton_lora_tiles import (
    PAGE,
    add_delta,
    find_affine,
    find_strip,
    load_strip,
    page_dot,
    read_columns,
    read_tile,
)

PART = 32
HEADS = 4
NUM_WARPS = 4
STAGES = 3


@triton.jit
def _find_delta(
    h, h_at, page_stride, owned, entry, num_pages, first, heap_ptr, entries_ptr, pages_ptr,
    b_columns, b_gap, width, TYPE: tl.constexpr, STRIDE: tl.constexpr, ROWS: tl.constexpr,
    LANES: tl.constexpr, IS_EVEN: tl.constexpr, IS_SINGLE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Returns h times B for both halves of a head. `h`: that of the first page, which all heads of
    the program have in common; further pages' are loaded from `h_at` with each B."""
    delta_low = tl.zeros([ROWS, LANES], dtype=tl.float32)
    delta_high = tl.zeros([ROWS, LANES], dtype=tl.float32)
    low_b = load_strip(heap_ptr, entry, b_columns, width, IS_EVEN)
    high_b = load_strip(heap_ptr, entry, b_columns + b_gap, width, IS_EVEN)
    delta_low = page_dot(h, low_b, delta_low, TYPE, not EXACT)
    delta_high = page_dot(h, high_b, delta_high, TYPE, not EXACT)
    if not IS_SINGLE:
        for i in range(1, num_pages):
            more = find_strip(entries_ptr, tl.load(pages_ptr + first + i), True, STRIDE)
            low_b = load_strip(heap_ptr, more, b_columns, width, IS_EVEN)
            high_b = load_strip(heap_ptr, more, b_columns + b_gap, width, IS_EVEN)
            h = tl.load(h_at + i * page_stride, mask=owned & (more != 0), other=0.0)
            delta_low = page_dot(h, low_b, delta_low, TYPE, not EXACT)
            delta_high = page_dot(h, high_b, delta_high, TYPE, not EXACT)
    return delta_low, delta_high


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
def _lora_rope_large_kernel(
    qkv_ptr,
    sums_ptr,
    heap_ptr,
    cos_sin_ptr,
    k_cache_ptr,
    v_cache_ptr,
    q_norm_ptr,
    k_norm_ptr,
    q_ptr,
    header_ptr,
    tiles_ptr,
    pages_ptr,
    entries_ptr,
    positions_ptr,
    slots_ptr,
    STRIDE_QKV: tl.constexpr,
    STRIDE: tl.constexpr,
    AFFINE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    TURNING: tl.constexpr,
    Q_BETA: tl.constexpr,
    Q_LENGTH: tl.constexpr,
    HAS_NORM: tl.constexpr,
    EPS: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    HEADS: tl.constexpr,  # of a program, one after the other
    IS_SINGLE: tl.constexpr,  # no adapter has more than a page
    STAGES: tl.constexpr,
    EXACT: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait_for_inputs(OVERLAPPED)
    start_dependents(OVERLAPPED)  # the sibling of small tiles, which does not wait
    WIDTH: tl.constexpr = triton.next_power_of_2(HALF)
    LANES: tl.constexpr = WIDTH if WIDTH >= 16 else 16  # an mma's
    part, heads, first_head, before = pick_heads(tl.program_id(0), NUM_HEADS, NUM_KV_HEADS, HEADS)
    entries_ptr += part
    count = tl.load(header_ptr + 2) * PARTS
    num_rows = tl.load(header_ptr + 4)
    rank_pages = tl.load(header_ptr + 5)
    tile = tl.program_id(1)
    row, rows, num_pages, first, page, at_bridge = read_tile(tiles_ptr, tile, True, ROWS, PARTS)
    if (rows <= 0) | (tile >= count):
        return
    entry = find_strip(entries_ptr, page, num_pages > 0, STRIDE)
    affine = find_affine(entries_ptr, page, num_pages > 0, STRIDE, AFFINE)
    owns = entry != 0
    IS_EVEN: tl.constexpr = LANES == HALF
    lane = tl.arange(0, LANES)
    exists = lane < HALF
    place, gap = place_lanes(lane, HALF, TURNING)
    b_lane = read_columns(heap_ptr, LANES)
    b_place, b_gap = place_lanes(b_lane, HALF, TURNING)
    width = heads * (2 * HALF)
    offsets = tl.arange(0, ROWS)
    token = (row + offsets).to(tl.int64)
    live = offsets < rows
    inside = live[:, None] & exists[None, :]
    position = tl.load(positions_ptr + token, mask=live, other=0).to(tl.int64)
    slot = tl.load(slots_ptr + token, mask=live, other=-1).to(tl.int64)
    written = inside & (slot >= 0)[:, None]
    turns = inside
    if is_partial(HALF, TURNING):
        turns = live[:, None] & (lane < TURNING)[None, :]
    if TURNING > 0:
        table = cos_sin_ptr + position[:, None] * (2 * TURNING) + lane[None, :]
        cos = tl.load(table, mask=turns, other=0.0)
        sin = tl.load(table + TURNING, mask=turns, other=0.0)
    owned = (offsets < tl.where(owns, rows, 0))[:, None]
    page_stride = num_rows.to(tl.int64) * PAGE
    h_at = sums_ptr + (at_bridge + offsets)[:, None] * PAGE + tl.arange(0, PAGE)[None, :]
    h_at += part * rank_pages * page_stride
    h = tl.load(h_at, mask=owned, other=0.0)
    cached: tl.constexpr = k_cache_ptr.dtype.element_ty
    cache_ptr = tl.where(part == 1, k_cache_ptr, v_cache_ptr)
    end = tl.minimum(first_head + HEADS, heads)
    for head in tl.range(first_head, end, num_stages=STAGES):
        low_columns = head * (2 * HALF) + place
        b_columns = head * (2 * HALF) + b_place
        if not IS_EVEN:
            low_columns = tl.where(exists, low_columns, width)
            b_columns = tl.where(b_lane < HALF, b_columns, width)
        x_at = qkv_ptr + token[:, None] * STRIDE_QKV + (before * (2 * HALF) + low_columns)[None, :]
        low = tl.load(x_at, mask=inside, other=0.0)
        high = tl.load(x_at + gap, mask=inside, other=0.0)
        delta_low, delta_high = _find_delta(
            h, h_at, page_stride, owned, entry, num_pages, first, heap_ptr, entries_ptr, pages_ptr,
            b_columns, b_gap, width, low.dtype, STRIDE, ROWS, LANES, IS_EVEN, IS_SINGLE, EXACT,
        )  # fmt: skip
        low = add_delta(low, delta_low, owns, heap_ptr, affine, low_columns, width, AFFINE)
        high = add_delta(high, delta_high, owns, heap_ptr, affine, low_columns + gap, width, AFFINE)
        if part != 2:
            if HAS_NORM:
                norm_ptr = tl.where(part == 0, q_norm_ptr, k_norm_ptr) + place
                low, high = norm_heads(
                    low,
                    high,
                    tl.load(norm_ptr, mask=exists, other=0.0)[None, :],
                    tl.load(norm_ptr + gap, mask=exists, other=0.0)[None, :],
                    2 * HALF,
                    EPS,
                )
            if TURNING > 0:
                low, high = turn_lanes(low, high, cos, sin, turns, HALF, TURNING, EXACT)
        if part == 0:
            if Q_BETA != 0.0:
                factor = query_factor(position, Q_BETA, Q_LENGTH)[:, None]
                low = (low.to(tl.float32) * factor).to(low.dtype)
                high = (high.to(tl.float32) * factor).to(low.dtype)
            q_at = q_ptr + (token[:, None] * NUM_HEADS + head) * (2 * HALF) + place[None, :]
            tl.store(q_at, low, mask=inside)
            tl.store(q_at + gap, high, mask=inside)
        else:
            kv_at = cache_ptr + (slot[:, None] * NUM_KV_HEADS + head) * (2 * HALF) + place[None, :]
            tl.store(kv_at, to_cached(low, cached), mask=written)
            tl.store(kv_at + gap, to_cached(high, cached), mask=written)


_launch = Launcher(_lora_rope_large_kernel, launch_pdl=OVERLAPS)


def launch_lora_rope_large(
    qkv: torch.Tensor,
    bridge: Bridge,
    site: SiteRows,
    plan: LoraPlan,
    write: RopeWrite,
    tensors: tuple[torch.Tensor, ...],  # in the order of the kernel of small tiles
    constants: tuple[object, ...],  # likewise
) -> None:
    parts = LARGE_ROWS // PART
    sums = bridge.planes if bridge.sums is None else bridge.sums
    is_single = plan.max_rank_pages <= 1
    blocks = -(-write.num_heads // HEADS) + 2 * -(-write.num_kv_heads // HEADS)
    _launch(
        (blocks, plan.max_large * parts, 1),
        (qkv, sums, *tensors),
        (plan.header, plan.large, plan.pages, site.b_entries, write.positions, write.slots),
        (
            *constants,
            PART,
            parts,
            HEADS,
            is_single,
            STAGES if is_single else 1,
            not IS_INTERPRETED,
            OVERLAPS,
        ),
        NUM_WARPS,
    )

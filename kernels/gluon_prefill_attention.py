"""Prefill attention for Hopper in Gluon, Triton's lower level: the three parts of a program run
concurrently.

One warp fetches pages of K and V with the bulk copy engine; two warpgroups attend, 64 of the tile's
128 rows each, so that the softmax of one overlaps the matrix products of the other, and its own:
the scores of the next keys are computed while the last weights meet their values (FlashAttention-3,
arXiv 2407.08608, without its barriers between warpgroups). Programs are persistent and draw tiles,
heaviest first; the copies of a tile start while the last one ends. On an H200, bfloat16, 32 heads
of 128 over 8: 533 TFLOP/s for 4096 queries and 537 for 2048 after 6144, where cuDNN without pages
gives 535 for the former and plain Triton 443. Same plan, same results up to rounding as
triton_prefill_attention, which covers the remaining cases: other head sizes, other machines.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from kernels.backend import num_sms
from kernels.e4m3 import E4M3
from kernels.gluon_attention import (
    WIDENERS,
    barrier,
    describe_rows,
    draw,
    fetch,
    first_step,
    hand_on,
    last_values,
    leave,
    make_ring,
    make_tickets,
    second_unit,
    sink_weight,
    step,
    take,
    wide_layout,
    widen,
)
from kernels.paged_plan import TILE_ROWS, PagedPlan, kernel_scale
from kernels.triton_launch import launch

BLOCK_N = 128
STAGES = 2


def paged_prefill(
    q: torch.Tensor,  # [T, Hq, D]
    k_cache: torch.Tensor,  # [num_blocks, block_size, Hkv, D]
    v_cache: torch.Tensor,
    out: torch.Tensor,  # [T, Hq, D]; the rows of sequences with several queries are written
    plan: PagedPlan,
    scale: float,
    sliding_window: int | None = None,
    *,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,  # [Hq] float32
) -> None:
    _, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    assert all(tensor.is_contiguous() for tensor in (q, k_cache, v_cache, out))
    factor, cap = kernel_scale(scale, soft_cap)
    launch(
        _prefill_kernel,
        (min(num_sms(q.device), plan.max_tiles * num_kv_heads),),
        q,
        describe_rows(k_cache, BLOCK_N),
        describe_rows(v_cache, BLOCK_N),
        out,
        plan.work,
        plan.scratch.tickets,
        plan.query_start,
        plan.kv_lens,
        plan.block_tables,
        plan.block_tables.stride(0),
        factor,
        sinks,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        PAGE=block_size,
        TILE_ROWS=TILE_ROWS,
        BLOCK_N=BLOCK_N,
        STAGES=STAGES,
        STAGED=1 if k_cache.dtype == E4M3 else 0,
        WINDOW=sliding_window or 0,
        SOFT_CAP=cap,
        num_warps=4,
    )


@gluon.jit
def _tile(
    unit,
    num_units,
    work_ptr,
    tiles_start,
    query_start_ptr,
    kv_lens_ptr,
    NUM_KV_HEADS: gl.constexpr,
):
    """Returns the sequence, the first row of q, the end of its queries, and a query's position
    minus its row of q."""
    exists = unit < num_units
    tile_ptr = work_ptr + tiles_start + 2 * (unit // NUM_KV_HEADS)
    seq = gl.load(tile_ptr, mask=exists, other=0)
    first = gl.load(tile_ptr + 1, mask=exists, other=0)
    query_end = gl.load(query_start_ptr + seq + 1)
    return seq, first, query_end, gl.load(kv_lens_ptr + seq) - query_end


@gluon.jit
def _first_tile(first, before, WINDOW: gl.constexpr, BLOCK_N: gl.constexpr):
    """Returns the number of the first BLOCK_N keys of which the tile's first query sees one."""
    tile = 0
    if WINDOW > 0:
        tile = gl.maximum(first + before - WINDOW + 1, 0) // BLOCK_N
    return tile


@gluon.jit
def _fetch_tiles(
    k_desc, v_desc, k_smem, v_smem, bars, tickets, work_ptr, counter_ptr, tiles_start, num_units,
    query_start_ptr, kv_lens_ptr, tables_ptr, stride_table,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
    PAGE: gl.constexpr, TILE_ROWS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    WINDOW: gl.constexpr,
):  # fmt: skip
    unit = gl.program_id(0)
    next_unit = second_unit()
    seq, first, query_end, before = _tile(
        unit,
        num_units,
        work_ptr,
        tiles_start,
        query_start_ptr,
        kv_lens_ptr,
        NUM_KV_HEADS,
    )
    turn = 0
    count = 0
    while unit < num_units:
        next_seq, next_first, next_query_end, next_before = _tile(
            next_unit,
            num_units,
            work_ptr,
            tiles_start,
            query_start_ptr,
            kv_lens_ptr,
            NUM_KV_HEADS,
        )
        end = gl.minimum(first + TILE_ROWS // GROUP, query_end) + before
        count = fetch(
            k_desc, v_desc, k_smem, v_smem, bars, count,
            tables_ptr + seq.to(gl.int64) * stride_table, unit % NUM_KV_HEADS * HEAD_DIM,
            _first_tile(first, before, WINDOW, BLOCK_N) * BLOCK_N, end, PAGE, HEAD_DIM,
            BLOCK_N, STAGES,
        )  # fmt: skip
        unit = next_unit
        seq, first, query_end, before = (
            next_seq,
            next_first,
            next_query_end,
            next_before,
        )
        if unit < num_units:
            next_unit = draw(counter_ptr)
            hand_on(tickets, turn, next_unit)
        turn += 1
    leave(counter_ptr)


@gluon.jit
def _widen_tiles(
    staged, k_smem, v_smem, bars, tickets, work_ptr, tiles_start, num_units, query_start_ptr,
    kv_lens_ptr, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
    TILE_ROWS: gl.constexpr, BLOCK_N: gl.constexpr, STAGED: gl.constexpr, STAGES: gl.constexpr,
    WINDOW: gl.constexpr,
):  # fmt: skip
    unit = gl.program_id(0)
    next_unit = second_unit()
    turn = 0
    count = 0
    while unit < num_units:
        if turn > 0:
            next_unit = take(tickets, turn - 1, WIDENERS)
        turn += 1
        _seq, first, query_end, before = _tile(
            unit, num_units, work_ptr, tiles_start, query_start_ptr, kv_lens_ptr, NUM_KV_HEADS
        )
        end = gl.minimum(first + TILE_ROWS // GROUP, query_end) + before
        count = widen(
            staged, k_smem, v_smem, bars, count,
            _first_tile(first, before, WINDOW, BLOCK_N) * BLOCK_N, end, HEAD_DIM, BLOCK_N,
            STAGED, STAGES,
        )  # fmt: skip
        unit = next_unit


@gluon.jit
def _attend_tiles(
    k_smem, v_smem, q_smem, bars, tickets, q_ptr, out_ptr, work_ptr, tiles_start, num_units,
    query_start_ptr, kv_lens_ptr, scale, sinks_ptr,
    WARPGROUP: gl.constexpr, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr, TILE_ROWS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    WINDOW: gl.constexpr, SOFT_CAP: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = k_smem.dtype
    out_dtype: gl.constexpr = out_ptr.dtype.element_ty
    TOKENS: gl.constexpr = TILE_ROWS // GROUP
    PARTS: gl.constexpr = HEAD_DIM // 64
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    copy_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    WINDOWED: gl.constexpr = WINDOW > 0
    zeros = gl.zeros([64, BLOCK_N], gl.float32, score_layout)
    unit = gl.program_id(0)
    next_unit = second_unit()
    _seq, first, query_end, before = _tile(
        unit,
        num_units,
        work_ptr,
        tiles_start,
        query_start_ptr,
        kv_lens_ptr,
        NUM_KV_HEADS,
    )
    turn = 0
    count = 0
    while unit < num_units:
        if turn > 0:
            next_unit = take(tickets, turn - 1, 4)
        turn += 1
        _seq, next_first, next_query_end, next_before = _tile(
            next_unit,
            num_units,
            work_ptr,
            tiles_start,
            query_start_ptr,
            kv_lens_ptr,
            NUM_KV_HEADS,
        )
        head = unit % NUM_KV_HEADS
        end = gl.minimum(first + TOKENS, query_end) + before
        rows = WARPGROUP * 64 + gl.arange(0, 64, gl.SliceLayout(1, copy_layout))
        dims = gl.arange(0, 64, gl.SliceLayout(0, copy_layout))
        tokens = first + rows // GROUP
        valid = ((rows < TOKENS * GROUP) & (tokens < query_end))[:, None]
        heads = tokens.to(gl.int64) * (NUM_KV_HEADS * GROUP) + head * GROUP + rows % GROUP
        offsets = heads[:, None] * HEAD_DIM + dims[None, :]
        for d in gl.static_range(PARTS):
            q = gl.load(q_ptr + offsets + d * 64, mask=valid, other=0.0)
            q_smem.index(d).store(q.to(dtype))
        fence_async_shared()
        barrier()
        q_a = q_smem.index(0)
        q_b = q_smem.index(PARTS - 1)

        mma_rows = WARPGROUP * 64 + gl.arange(0, 64, rows_layout)
        limits = first + mma_rows // GROUP + before  # the last key that each row sees
        full = (first + WARPGROUP * 64 // GROUP + before + 1) // BLOCK_N  # unmasked steps
        steps = (end + BLOCK_N - 1) // BLOCK_N
        begin = _first_tile(first, before, WINDOW, BLOCK_N)
        floors = limits
        seen_by_all = begin + 1  # from this step on, no row's window begins later
        if WINDOWED:
            floors = limits - (WINDOW - 1)
            last = first + (WARPGROUP * 64 + 63) // GROUP + before
            later = (gl.maximum(last - WINDOW + 1, 0) + BLOCK_N - 1) // BLOCK_N
            seen_by_all = gl.maximum(gl.minimum(later, steps), begin + 1)
        top = gl.full([64], float("-inf"), gl.float32, rows_layout)
        total = gl.zeros([64], gl.float32, rows_layout)
        acc_a = gl.zeros([64, 64], gl.float32, out_layout)
        acc_b = gl.zeros([64, 64], gl.float32, out_layout)
        weights, top, total = first_step(
            q_a, q_b, k_smem, bars, count, zeros, top, total, scale, limits, floors,
            begin * BLOCK_N, WINDOWED, SOFT_CAP, weights_layout, dtype, PARTS, STAGES,
        )  # fmt: skip
        if WINDOWED:
            for i in range(begin + 1, seen_by_all):
                count += 1
                weights, top, total, acc_a, acc_b = step(
                    q_a, q_b, k_smem, v_smem, bars, count, zeros, weights, top, total,
                    acc_a, acc_b, scale, limits, floors, i * BLOCK_N, True, True, SOFT_CAP,
                    PARTS, STAGES,
                )  # fmt: skip
        for i in range(seen_by_all, full):
            count += 1
            weights, top, total, acc_a, acc_b = step(
                q_a, q_b, k_smem, v_smem, bars, count, zeros, weights, top, total,
                acc_a, acc_b, scale, limits, floors, i * BLOCK_N, False, False, SOFT_CAP,
                PARTS, STAGES,
            )  # fmt: skip
        for i in range(gl.maximum(full, seen_by_all), steps):
            count += 1
            weights, top, total, acc_a, acc_b = step(
                q_a, q_b, k_smem, v_smem, bars, count, zeros, weights, top, total,
                acc_a, acc_b, scale, limits, floors, i * BLOCK_N, True, False, SOFT_CAP,
                PARTS, STAGES,
            )  # fmt: skip
        acc_a, acc_b = last_values(v_smem, bars, count, weights, acc_a, acc_b, end, PARTS, STAGES)
        count += 1

        if sinks_ptr is not None:
            total += sink_weight(
                sinks_ptr, head * GROUP + mma_rows % GROUP, mma_rows < TOKENS * GROUP, top
            )
        inverse = gl.convert_layout(1.0 / total, gl.SliceLayout(1, out_layout))
        result = gl.convert_layout((acc_a * inverse[:, None]).to(out_dtype), copy_layout)
        gl.store(out_ptr + offsets, result, mask=valid)
        if PARTS == 2:
            result = gl.convert_layout((acc_b * inverse[:, None]).to(out_dtype), copy_layout)
            gl.store(out_ptr + offsets + 64, result, mask=valid)
        unit = next_unit
        first, query_end, before = next_first, next_query_end, next_before


@gluon.jit
def _prefill_kernel(
    q_ptr, k_desc, v_desc, out_ptr, work_ptr, counter_ptr, query_start_ptr, kv_lens_ptr, tables_ptr,
    stride_table,
    scale,  # with log2(e): softmax in base 2
    sinks_ptr,  # [Hq], or None
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, PAGE: gl.constexpr,
    TILE_ROWS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    STAGED: gl.constexpr,  # of the ring in e4m3; 0: the cache is in 16 bits
    WINDOW: gl.constexpr, SOFT_CAP: gl.constexpr,
):  # fmt: skip
    # Read from the plan: a graph is launched for any number of items and tiles.
    tiles_start = 4 + 4 * gl.load(work_ptr)
    num_units = gl.load(work_ptr + 3) * NUM_KV_HEADS
    PARTS: gl.constexpr = HEAD_DIM // 64
    dtype: gl.constexpr = k_desc.dtype if STAGED == 0 else gl.float16
    layout: gl.constexpr = k_desc.layout if STAGED == 0 else wide_layout(BLOCK_N, 64)
    k_smem, v_smem, bars = make_ring(dtype, layout, PARTS, BLOCK_N, 64, STAGES, 2)
    tickets = make_tickets(2 if STAGED == 0 else 3)
    q0_smem = gl.allocate_shared_memory(dtype, [PARTS, 64, 64], layout)
    q1_smem = gl.allocate_shared_memory(dtype, [PARTS, 64, 64], layout)
    # Written out twice: constants in a tuple that a variable holds would be values.
    if STAGED == 0:
        gl.warp_specialize(
            [
                (_attend_tiles, (k_smem, v_smem, q0_smem, bars, tickets, q_ptr, out_ptr, work_ptr,
                                 tiles_start, num_units, query_start_ptr, kv_lens_ptr, scale,
                                 sinks_ptr, 0, NUM_KV_HEADS, GROUP, HEAD_DIM, TILE_ROWS, BLOCK_N,
                                 STAGES, WINDOW, SOFT_CAP)),
                (_attend_tiles, (k_smem, v_smem, q1_smem, bars, tickets, q_ptr, out_ptr, work_ptr,
                                 tiles_start, num_units, query_start_ptr, kv_lens_ptr, scale,
                                 sinks_ptr, 1, NUM_KV_HEADS, GROUP, HEAD_DIM, TILE_ROWS, BLOCK_N,
                                 STAGES, WINDOW, SOFT_CAP)),
                (_fetch_tiles, (k_desc, v_desc, k_smem, v_smem, bars, tickets, work_ptr,
                                counter_ptr, tiles_start, num_units, query_start_ptr, kv_lens_ptr,
                                tables_ptr, stride_table, NUM_KV_HEADS, GROUP, HEAD_DIM, PAGE,
                                TILE_ROWS, BLOCK_N, STAGES, WINDOW)),
            ],
            [4, 1],
            [232, 40],
        )  # fmt: skip
    else:
        stored: gl.constexpr = k_desc.layout  # to Triton 3.6 it is no constant elsewhere
        k_staged, v_staged, full = make_ring(k_desc.dtype, stored, 1, BLOCK_N, HEAD_DIM, STAGED, 1)
        gl.warp_specialize(
            [
                (_attend_tiles, (k_smem, v_smem, q0_smem, bars, tickets, q_ptr, out_ptr, work_ptr,
                                 tiles_start, num_units, query_start_ptr, kv_lens_ptr, scale,
                                 sinks_ptr, 0, NUM_KV_HEADS, GROUP, HEAD_DIM, TILE_ROWS, BLOCK_N,
                                 STAGES, WINDOW, SOFT_CAP)),
                (_attend_tiles, (k_smem, v_smem, q1_smem, bars, tickets, q_ptr, out_ptr, work_ptr,
                                 tiles_start, num_units, query_start_ptr, kv_lens_ptr, scale,
                                 sinks_ptr, 1, NUM_KV_HEADS, GROUP, HEAD_DIM, TILE_ROWS, BLOCK_N,
                                 STAGES, WINDOW, SOFT_CAP)),
                (_widen_tiles, ((k_staged, v_staged, full), k_smem, v_smem, bars, tickets,
                                work_ptr, tiles_start, num_units, query_start_ptr, kv_lens_ptr,
                                NUM_KV_HEADS, GROUP, HEAD_DIM, TILE_ROWS, BLOCK_N, STAGED, STAGES,
                                WINDOW)),
                (_fetch_tiles, (k_desc, v_desc, k_staged, v_staged, full, tickets, work_ptr,
                                counter_ptr, tiles_start, num_units, query_start_ptr, kv_lens_ptr,
                                tables_ptr, stride_table, NUM_KV_HEADS, GROUP, HEAD_DIM, PAGE,
                                TILE_ROWS, BLOCK_N, STAGED, WINDOW)),
            ],
            [4, WIDENERS, 1],
            [232, 40, 40],
        )  # fmt: skip

"""Decode attention for Hopper in Gluon: one warp keeps copies of keys in flight, across items.

Otherwise equal to triton_decode_attention: the same items, merged by the program that finishes
last. There the copies of an item can only start when the last item is done, which leaves the memory
idle between them; here they run ahead, as far as the ring of buffers goes, and programs draw their
items, since not all multiprocessors get the same share of the memory. The group of query heads is
in 64 rows of wgmma; the idle rows use no scarce resource, and hold the groups of further queries
of the sequence, where a plan has such: queries of a draft, each of which sees keys up to its own.
On an H200 (reads: 4.46 TB/s): 4.0 TB/s for 64 x 1024 and 256 x 384 keys of 8 heads of 128, 4.2 for
64 x 4096.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.backend import num_sms
from kernels.e4m3 import E4M3
from kernels.gluon_attention import (
    WIDENERS,
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
from kernels.gluon_decode_items import count_units, meet, read_item, read_queries
from kernels.paged_plan import MAX_SPLITS, PagedPlan, kernel_scale
from kernels.triton_launch import launch, start_dependents, wait_for_inputs

BLOCK_N = 64
ROWS = 64  # of an item: heads of a group times queries


def paged_decode(
    q: torch.Tensor,  # [T, Hq, D]
    k_cache: torch.Tensor,  # [num_blocks, block_size, Hkv, D]
    v_cache: torch.Tensor,
    out: torch.Tensor,  # [T, Hq, D]; the rows of the plan's sequences with one query are written,
    # or with more, up to its `max_queries`
    plan: PagedPlan,
    scale: float,
    sliding_window: int | None = None,
    stages: int | None = None,
    programs_per_sm: int = 2,
    *,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,  # [Hq] float32
) -> None:
    _, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    assert all(tensor.is_contiguous() for tensor in (q, k_cache, v_cache, out))
    is_e4m3 = k_cache.dtype == E4M3
    num_units = plan.max_decode_items(sliding_window) * num_kv_heads
    factor, cap = kernel_scale(scale, soft_cap)
    has_queries = plan.max_queries > 1
    assert not (has_queries and sliding_window)
    assert plan.max_queries * (num_heads // num_kv_heads) <= ROWS or not has_queries
    launch(
        _decode_kernel,
        (min(num_sms(q.device) * programs_per_sm, num_units),),
        q,
        describe_rows(k_cache, BLOCK_N),
        describe_rows(v_cache, BLOCK_N),
        out,
        plan.scratch.partial,
        plan.scratch.lse,
        plan.scratch.arrived,
        plan.work,
        plan.scratch.tickets,
        plan.query_start,
        plan.block_tables,
        plan.block_tables.stride(0),
        factor,
        plan.kv_lens if sliding_window or has_queries else None,
        sinks,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        PAGE=block_size,
        BLOCK_N=BLOCK_N,
        STAGES=stages or (2 if is_e4m3 else 3) * 128 // head_dim,
        STAGED=3 * 128 // head_dim if is_e4m3 else 0,
        MAX_SPLITS=MAX_SPLITS,
        WINDOW=sliding_window or 0,
        SOFT_CAP=cap,
        HAS_QUERIES=has_queries,
        num_warps=4,
        maxnreg=256 // programs_per_sm,
        launch_pdl=True,
    )


@gluon.jit
def _fetch_items(
    k_desc, v_desc, k_smem, v_smem, bars, tickets, work_ptr, counter_ptr, tables_ptr, stride_table,
    query_start_ptr, kv_lens_ptr, NUM_KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr,
    PAGE: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, MAX_SPLITS: gl.constexpr,
    WINDOW: gl.constexpr,
):  # fmt: skip
    num_units, sequences, chunk = count_units(work_ptr, NUM_KV_HEADS, MAX_SPLITS, WINDOW)
    unit = gl.program_id(0)
    next_unit = second_unit()
    stop = unit + 1
    if WINDOW > 0:
        stop = num_units
    seq, begin, end, _merge, _seen = read_item(
        work_ptr, unit, stop, sequences, chunk, query_start_ptr, kv_lens_ptr, NUM_KV_HEADS,
        BLOCK_N, MAX_SPLITS, WINDOW,
    )  # fmt: skip
    turn = 0
    count = 0
    while unit < num_units:
        next_seq, next_begin, next_end, _merge, _seen = read_item(
            work_ptr, next_unit, num_units, sequences, chunk, query_start_ptr, kv_lens_ptr,
            NUM_KV_HEADS, BLOCK_N, MAX_SPLITS, WINDOW,
        )  # fmt: skip
        count = fetch(
            k_desc, v_desc, k_smem, v_smem, bars, count,
            tables_ptr + seq.to(gl.int64) * stride_table, unit % NUM_KV_HEADS * HEAD_DIM,
            begin, end, PAGE, HEAD_DIM, BLOCK_N, STAGES,
        )  # fmt: skip
        unit = next_unit
        seq, begin, end = next_seq, next_begin, next_end
        if unit < num_units:
            next_unit = draw(counter_ptr)
            hand_on(tickets, turn, next_unit)
        turn += 1
    leave(counter_ptr)


@gluon.jit
def _widen_items(
    staged, k_smem, v_smem, bars, tickets, work_ptr, query_start_ptr, kv_lens_ptr,
    NUM_KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGED: gl.constexpr, STAGES: gl.constexpr, MAX_SPLITS: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    num_units, sequences, chunk = count_units(work_ptr, NUM_KV_HEADS, MAX_SPLITS, WINDOW)
    unit = gl.program_id(0)
    next_unit = second_unit()
    _seq, begin, end, _merge, _seen = read_item(
        work_ptr, unit, num_units, sequences, chunk, query_start_ptr, kv_lens_ptr, NUM_KV_HEADS,
        BLOCK_N, MAX_SPLITS, WINDOW,
    )  # fmt: skip
    turn = 0
    count = 0
    while unit < num_units:
        if turn > 0:
            next_unit = take(tickets, turn - 1, WIDENERS)
        turn += 1
        _seq, next_begin, next_end, _merge, _seen = read_item(
            work_ptr, next_unit, num_units, sequences, chunk, query_start_ptr, kv_lens_ptr,
            NUM_KV_HEADS, BLOCK_N, MAX_SPLITS, WINDOW,
        )  # fmt: skip
        count = widen(
            staged, k_smem, v_smem, bars, count, begin, end, HEAD_DIM, BLOCK_N, STAGED, STAGES
        )
        unit, begin, end = next_unit, next_begin, next_end


@gluon.jit
def _store_item(
    acc_a, acc_b, top, total, offsets, out_rows, out_dims, out_ptr, partial_ptr, lse_ptr,
    arrived_ptr, sinks_ptr, seq, head, first_head, queries, merge, NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, MAX_SPLITS: gl.constexpr, WINDOWED: gl.constexpr,
    rows_layout: gl.constexpr, out_layout: gl.constexpr,
):  # fmt: skip
    """Stores the result of an item, or merges it with those of the sequence's other items."""
    out_dtype: gl.constexpr = out_ptr.dtype.element_ty
    mine = (out_rows < queries * GROUP)[:, None] & (out_dims < 64)[None, :]
    if sinks_ptr is not None and merge & 31 == 1:  # otherwise added when the splits merge
        rows = gl.arange(0, 64, rows_layout)
        exists = rows < queries * GROUP
        total += sink_weight(sinks_ptr, head * GROUP + rows % GROUP, exists, top)
    total = gl.where(total == 0.0, 1.0, total)  # no keys: zeros for padding
    inverse = gl.convert_layout(1.0 / total, gl.SliceLayout(1, out_layout))
    acc_a = acc_a * inverse[:, None]
    acc_b = acc_b * inverse[:, None]
    parts = merge & 31  # 0: a window has no such item
    if parts == 1:
        gl.store(out_ptr + first_head * HEAD_DIM + offsets, acc_a.to(out_dtype), mask=mine)
        if HEAD_DIM == 128:
            target = out_ptr + first_head * HEAD_DIM + 64 + offsets
            gl.store(target, acc_b.to(out_dtype), mask=mine)
    elif not WINDOWED or parts > 1:
        meet(
            acc_a, acc_b, top, total, offsets, mine, out_ptr, partial_ptr, lse_ptr,
            arrived_ptr, sinks_ptr, seq, head, first_head, queries, merge,
            NUM_KV_HEADS, GROUP, HEAD_DIM, MAX_SPLITS,
        )  # fmt: skip


@gluon.jit
def _attend_items(
    k_smem, v_smem, bars, tickets, q_ptr, out_ptr, partial_ptr, lse_ptr, arrived_ptr, work_ptr,
    query_start_ptr, scale, kv_lens_ptr, sinks_ptr,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, MAX_SPLITS: gl.constexpr, WINDOW: gl.constexpr,
    SOFT_CAP: gl.constexpr, HAS_QUERIES: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = k_smem.dtype
    PARTS: gl.constexpr = HEAD_DIM // 64
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    q_layout: gl.constexpr = gl.DotOperandLayout(0, score_layout, 2)
    rows_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    WINDOWED: gl.constexpr = WINDOW > 0
    # Whether a row may see none of the keys of a step.
    FLOORED: gl.constexpr = WINDOWED or HAS_QUERIES
    NUM_HEADS: gl.constexpr = NUM_KV_HEADS * GROUP
    zeros = gl.zeros([64, BLOCK_N], gl.float32, score_layout)
    q_rows = gl.arange(0, 64, gl.SliceLayout(1, q_layout))
    q_dims = gl.arange(0, 64, gl.SliceLayout(0, q_layout))
    out_rows = gl.arange(0, 64, gl.SliceLayout(1, out_layout))
    out_dims = gl.arange(0, 64, gl.SliceLayout(0, out_layout))
    out_heads = out_rows // GROUP * NUM_HEADS + out_rows % GROUP
    offsets = out_heads[:, None] * HEAD_DIM + out_dims[None, :]
    num_units, sequences, chunk = count_units(work_ptr, NUM_KV_HEADS, MAX_SPLITS, WINDOW)
    q_heads = q_rows // GROUP * NUM_HEADS + q_rows % GROUP
    q_offsets = q_heads[:, None] * HEAD_DIM + q_dims[None, :]
    unit = gl.program_id(0)
    next_unit = second_unit()
    # The first item is read before their number is known: there is room for one per program. A
    # window's is not: the limit of sequences may be reached.
    stop = unit + 1
    if WINDOWED:
        stop = num_units
    seq, begin, end, merge, seen = read_item(
        work_ptr, unit, stop, sequences, chunk, query_start_ptr, kv_lens_ptr, NUM_KV_HEADS,
        BLOCK_N, MAX_SPLITS, WINDOW,
    )  # fmt: skip
    first_head, queries, kv_len, q_a, q_b = read_queries(
        q_ptr, query_start_ptr, kv_lens_ptr, seq, unit, num_units, q_offsets, q_rows,
        NUM_KV_HEADS, GROUP, HEAD_DIM, HAS_QUERIES, dtype,
    )  # fmt: skip
    turn = 0
    count = 0
    while unit < num_units:
        if turn > 0:
            next_unit = take(tickets, turn - 1, 4)
        turn += 1
        next_seq, next_begin, next_end, next_merge, next_seen = read_item(
            work_ptr, next_unit, num_units, sequences, chunk, query_start_ptr, kv_lens_ptr,
            NUM_KV_HEADS, BLOCK_N, MAX_SPLITS, WINDOW,
        )  # fmt: skip
        head = unit % NUM_KV_HEADS
        acc_a = gl.zeros([64, 64], gl.float32, out_layout)
        acc_b = gl.zeros([64, 64], gl.float32, out_layout)
        top = gl.full([64], float("-inf"), gl.float32, rows_layout)
        total = gl.zeros([64], gl.float32, rows_layout)
        if begin < end:
            limits = gl.full([64], end - 1, gl.int32, rows_layout)
            floors = limits
            unmasked = end  # the keys before it are seen by all rows
            if HAS_QUERIES:
                first_limit = kv_len - queries
                unmasked = gl.minimum(end, first_limit + 1)
                query = gl.arange(0, 64, rows_layout) // GROUP
                limits = gl.minimum(limits, first_limit + query)
                floors = gl.full([64], 0, gl.int32, rows_layout)
            if WINDOWED:  # the keys before the window are all in the first step
                floors = gl.full([64], seen, gl.int32, rows_layout)
            weights, top, total = first_step(
                q_a, q_b, k_smem, bars, count, zeros, top, total, scale, limits, floors, begin,
                FLOORED, SOFT_CAP, weights_layout, dtype, PARTS, STAGES,
            )  # fmt: skip
            unmasked = unmasked // BLOCK_N * BLOCK_N
            for start in range(begin + BLOCK_N, unmasked, BLOCK_N):
                count += 1
                weights, top, total, acc_a, acc_b = step(
                    q_a, q_b, k_smem, v_smem, bars, count, zeros, weights, top, total,
                    acc_a, acc_b, scale, limits, floors, start, False, False, SOFT_CAP, PARTS,
                    STAGES,
                )  # fmt: skip
            # The last keys: an incomplete step, and one before it that not all queries see.
            for start in range(gl.maximum(unmasked, begin + BLOCK_N), end, BLOCK_N):
                count += 1
                weights, top, total, acc_a, acc_b = step(
                    q_a, q_b, k_smem, v_smem, bars, count, zeros, weights, top, total,
                    acc_a, acc_b, scale, limits, floors, start, True, HAS_QUERIES, SOFT_CAP,
                    PARTS, STAGES,
                )  # fmt: skip
            acc_a, acc_b = last_values(
                v_smem, bars, count, weights, acc_a, acc_b, end, PARTS, STAGES
            )
            count += 1
        # The next item's queries are loaded while this one's result is stored.
        next_first, next_queries, next_len, next_a, next_b = read_queries(
            q_ptr, query_start_ptr, kv_lens_ptr, next_seq, next_unit, num_units, q_offsets, q_rows,
            NUM_KV_HEADS, GROUP, HEAD_DIM, HAS_QUERIES, dtype,
        )  # fmt: skip
        _store_item(
            acc_a, acc_b, top, total, offsets, out_rows, out_dims, out_ptr, partial_ptr, lse_ptr,
            arrived_ptr, sinks_ptr, seq, head, first_head, queries, merge, NUM_KV_HEADS, GROUP,
            HEAD_DIM, MAX_SPLITS, WINDOWED, rows_layout, out_layout,
        )  # fmt: skip
        seq, begin, end, merge, seen = next_seq, next_begin, next_end, next_merge, next_seen
        first_head, q_a, q_b = next_first, next_a, next_b
        queries, kv_len = next_queries, next_len
        unit = next_unit


@gluon.jit
def _decode_kernel(
    q_ptr, k_desc, v_desc, out_ptr, partial_ptr, lse_ptr, arrived_ptr, work_ptr, counter_ptr,
    query_start_ptr, tables_ptr, stride_table,
    scale,  # with log2(e): softmax in base 2
    kv_lens_ptr,  # None without a window, where each sequence has one query
    sinks_ptr,  # [Hq], or None
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, PAGE: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    STAGED: gl.constexpr,  # of the ring in e4m3; 0: the cache is in 16 bits
    MAX_SPLITS: gl.constexpr, WINDOW: gl.constexpr, SOFT_CAP: gl.constexpr,
    HAS_QUERIES: gl.constexpr,
):  # fmt: skip
    # The next kernel's programs may wait on the multiprocessors that are free.
    start_dependents(True)
    dtype: gl.constexpr = k_desc.dtype if STAGED == 0 else gl.float16
    layout: gl.constexpr = k_desc.layout if STAGED == 0 else wide_layout(BLOCK_N, 64)
    k_smem, v_smem, bars = make_ring(dtype, layout, HEAD_DIM // 64, BLOCK_N, 64, STAGES, 1)
    if STAGED > 0:
        stored: gl.constexpr = k_desc.layout  # to Triton 3.6 it is no constant elsewhere
        k_staged, v_staged, full = make_ring(k_desc.dtype, stored, 1, BLOCK_N, HEAD_DIM, STAGED, 1)
    tickets = make_tickets(1 if STAGED == 0 else 2)
    wait_for_inputs(True)
    # Written out twice: constants in a tuple that a variable holds would be values.
    if STAGED == 0:
        gl.warp_specialize(
            [
                (_attend_items, (k_smem, v_smem, bars, tickets, q_ptr, out_ptr, partial_ptr,
                                 lse_ptr, arrived_ptr, work_ptr, query_start_ptr, scale,
                                 kv_lens_ptr, sinks_ptr, NUM_KV_HEADS, GROUP, HEAD_DIM, BLOCK_N,
                                 STAGES, MAX_SPLITS, WINDOW, SOFT_CAP, HAS_QUERIES)),
                (_fetch_items, (k_desc, v_desc, k_smem, v_smem, bars, tickets, work_ptr,
                                counter_ptr, tables_ptr, stride_table, query_start_ptr,
                                kv_lens_ptr, NUM_KV_HEADS, HEAD_DIM, PAGE, BLOCK_N, STAGES,
                                MAX_SPLITS, WINDOW)),
            ],
            [1],
            [40],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_attend_items, (k_smem, v_smem, bars, tickets, q_ptr, out_ptr, partial_ptr,
                                 lse_ptr, arrived_ptr, work_ptr, query_start_ptr, scale,
                                 kv_lens_ptr, sinks_ptr, NUM_KV_HEADS, GROUP, HEAD_DIM, BLOCK_N,
                                 STAGES, MAX_SPLITS, WINDOW, SOFT_CAP, HAS_QUERIES)),
                (_widen_items, ((k_staged, v_staged, full), k_smem, v_smem, bars, tickets,
                                work_ptr, query_start_ptr, kv_lens_ptr, NUM_KV_HEADS, HEAD_DIM,
                                BLOCK_N, STAGED, STAGES, MAX_SPLITS, WINDOW)),
                (_fetch_items, (k_desc, v_desc, k_staged, v_staged, full, tickets, work_ptr,
                                counter_ptr, tables_ptr, stride_table, query_start_ptr,
                                kv_lens_ptr, NUM_KV_HEADS, HEAD_DIM, PAGE, BLOCK_N, STAGED,
                                MAX_SPLITS, WINDOW)),
            ],
            [WIDENERS, 1],
            [48, 48],
        )  # fmt: skip

"""Decode attention for Hopper in Gluon: one warp keeps copies of keys in flight, across items.

Otherwise equal to triton_decode_attention: the same items, merged by the program that finishes
last. There the copies of an item can only start when the last item is done, which leaves the memory
idle between them; here they run ahead, as far as the ring of buffers goes, and programs draw their
items, since not all multiprocessors get the same share of the memory. The group of query heads is
in 64 rows of wgmma; the idle rows use no scarce resource. On an H200 (reads: 4.46 TB/s): 4.0 TB/s
for 64 x 1024 and 256 x 384 keys of 8 heads of 128, 4.2 for 64 x 4096.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.backend import num_sms
from kernels.gluon_attention import (
    barrier,
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
)
from kernels.paged_plan import MAX_SPLITS, PagedPlan, kernel_scale
from kernels.triton_launch import launch, start_dependents, wait_for_inputs
from kernels.triton_window_items import window_cut, window_item

BLOCK_N = 64


def paged_decode(
    q: torch.Tensor,  # [T, Hq, D]
    k_cache: torch.Tensor,  # [num_blocks, block_size, Hkv, D]
    v_cache: torch.Tensor,
    out: torch.Tensor,  # [T, Hq, D]; the rows of sequences with one query are written
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
    kind = gl.bfloat16 if q.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for([BLOCK_N, 64], kind)
    width = num_kv_heads * head_dim  # V of a layer may have fewer rows in the cache than its K
    box = [min(block_size, BLOCK_N), 64]
    num_units = plan.max_decode_items(sliding_window) * num_kv_heads
    factor, cap = kernel_scale(scale, soft_cap)
    launch(
        _decode_kernel,
        (min(num_sms(q.device) * programs_per_sm, num_units),),
        q,
        TensorDescriptor.from_tensor(k_cache.view(-1, width), box, layout),
        TensorDescriptor.from_tensor(v_cache.view(-1, width), box, layout),
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
        None if sliding_window is None else plan.kv_lens,
        sinks,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        PAGE=block_size,
        BLOCK_N=BLOCK_N,
        STAGES=stages or 3 * 128 // head_dim,
        MAX_SPLITS=MAX_SPLITS,
        WINDOW=sliding_window or 0,
        SOFT_CAP=cap,
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
    num_units, splits, chunk = _count(work_ptr, NUM_KV_HEADS, MAX_SPLITS, WINDOW)
    unit = gl.program_id(0)
    next_unit = second_unit()
    stop = unit + 1
    if WINDOW > 0:
        stop = num_units
    seq, begin, end, _merge, _seen = _item(
        work_ptr, unit, stop, splits, chunk, query_start_ptr, kv_lens_ptr, NUM_KV_HEADS,
        BLOCK_N, MAX_SPLITS, WINDOW,
    )  # fmt: skip
    turn = 0
    count = 0
    while unit < num_units:
        next_seq, next_begin, next_end, _merge, _seen = _item(
            work_ptr, next_unit, num_units, splits, chunk, query_start_ptr, kv_lens_ptr,
            NUM_KV_HEADS, BLOCK_N, MAX_SPLITS, WINDOW,
        )  # fmt: skip
        count = fetch(
            k_desc, v_desc, k_smem, v_smem, bars, count,
            tables_ptr + seq.to(gl.int64) * stride_table, unit % NUM_KV_HEADS * HEAD_DIM,
            begin, end, PAGE, HEAD_DIM // 64, BLOCK_N, STAGES,
        )  # fmt: skip
        unit = next_unit
        seq, begin, end = next_seq, next_begin, next_end
        if unit < num_units:
            next_unit = draw(counter_ptr)
            hand_on(tickets, turn, next_unit)
        turn += 1
    leave(counter_ptr)


@gluon.jit
def _attend_items(
    k_smem, v_smem, bars, tickets, q_ptr, out_ptr, partial_ptr, lse_ptr, arrived_ptr, work_ptr,
    query_start_ptr, scale, kv_lens_ptr, sinks_ptr,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, MAX_SPLITS: gl.constexpr, WINDOW: gl.constexpr,
    SOFT_CAP: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = k_smem.dtype
    PARTS: gl.constexpr = HEAD_DIM // 64
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    q_layout: gl.constexpr = gl.DotOperandLayout(0, score_layout, 2)
    rows_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    WINDOWED: gl.constexpr = WINDOW > 0
    zeros = gl.zeros([64, BLOCK_N], gl.float32, score_layout)
    q_rows = gl.arange(0, 64, gl.SliceLayout(1, q_layout))
    q_dims = gl.arange(0, 64, gl.SliceLayout(0, q_layout))
    out_rows = gl.arange(0, 64, gl.SliceLayout(1, out_layout))
    out_dims = gl.arange(0, 64, gl.SliceLayout(0, out_layout))
    offsets = out_rows[:, None] * HEAD_DIM + out_dims[None, :]
    mine = (out_rows < GROUP)[:, None] & (out_dims < 64)[None, :]
    num_units, splits, chunk = _count(work_ptr, NUM_KV_HEADS, MAX_SPLITS, WINDOW)
    in_group = (q_rows < GROUP)[:, None] & (q_dims < 64)[None, :]
    q_offsets = q_rows[:, None] * HEAD_DIM + q_dims[None, :]
    unit = gl.program_id(0)
    next_unit = second_unit()
    # The first item is read before their number is known: there is room for one per program. A
    # window's is not: the limit of sequences may be reached.
    stop = unit + 1
    if WINDOWED:
        stop = num_units
    seq, begin, end, merge, seen = _item(
        work_ptr, unit, stop, splits, chunk, query_start_ptr, kv_lens_ptr, NUM_KV_HEADS,
        BLOCK_N, MAX_SPLITS, WINDOW,
    )  # fmt: skip
    first_head, q_a, q_b = _queries(
        q_ptr, query_start_ptr, seq, unit, num_units, q_offsets, in_group,
        NUM_KV_HEADS, GROUP, HEAD_DIM,
    )  # fmt: skip
    turn = 0
    count = 0
    while unit < num_units:
        if turn > 0:
            next_unit = take(tickets, turn - 1)
        turn += 1
        next_seq, next_begin, next_end, next_merge, next_seen = _item(
            work_ptr, next_unit, num_units, splits, chunk, query_start_ptr, kv_lens_ptr,
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
            if WINDOWED:  # the keys before the window are all in the first step
                floors = gl.full([64], seen, gl.int32, rows_layout)
            weights, top, total = first_step(
                q_a, q_b, k_smem, bars, count, zeros, top, total, scale, limits, floors, begin,
                WINDOWED, SOFT_CAP, weights_layout, dtype, PARTS, STAGES,
            )  # fmt: skip
            for start in range(begin + BLOCK_N, end // BLOCK_N * BLOCK_N, BLOCK_N):
                count += 1
                weights, top, total, acc_a, acc_b = step(
                    q_a, q_b, k_smem, v_smem, bars, count, zeros, weights, top, total,
                    acc_a, acc_b, scale, limits, floors, start, False, False, SOFT_CAP, PARTS,
                    STAGES,
                )  # fmt: skip
            ragged = end // BLOCK_N * BLOCK_N
            if (ragged < end) & (ragged > begin):
                count += 1
                weights, top, total, acc_a, acc_b = step(
                    q_a, q_b, k_smem, v_smem, bars, count, zeros, weights, top, total,
                    acc_a, acc_b, scale, limits, floors, ragged, True, False, SOFT_CAP, PARTS,
                    STAGES,
                )  # fmt: skip
            acc_a, acc_b = last_values(
                v_smem, bars, count, weights, acc_a, acc_b, end, PARTS, STAGES
            )
            count += 1
        # The next item's queries are loaded while this one's result is stored.
        next_first, next_a, next_b = _queries(
            q_ptr, query_start_ptr, next_seq, next_unit, num_units, q_offsets, in_group,
            NUM_KV_HEADS, GROUP, HEAD_DIM,
        )  # fmt: skip
        if sinks_ptr is not None and merge & 31 == 1:  # otherwise added when the splits merge
            rows = gl.arange(0, 64, rows_layout)
            total += sink_weight(sinks_ptr, head * GROUP + rows, rows < GROUP, top)
        total = gl.where(total == 0.0, 1.0, total)  # no keys: zeros for padding
        inverse = gl.convert_layout(1.0 / total, gl.SliceLayout(1, out_layout))
        acc_a = acc_a * inverse[:, None]
        acc_b = acc_b * inverse[:, None]
        parts = merge & 31  # 0: a window has no such item
        if parts == 1:
            gl.store(out_ptr + first_head * HEAD_DIM + offsets, acc_a.to(dtype), mask=mine)
            if PARTS == 2:
                target = out_ptr + first_head * HEAD_DIM + 64 + offsets
                gl.store(target, acc_b.to(dtype), mask=mine)
        elif not WINDOWED or parts > 1:
            _meet(
                acc_a, acc_b, top, total, offsets, mine, out_ptr, partial_ptr, lse_ptr,
                arrived_ptr, sinks_ptr, seq, head, first_head, merge,
                NUM_KV_HEADS, GROUP, HEAD_DIM, MAX_SPLITS,
            )  # fmt: skip
        seq, begin, end, merge, seen = next_seq, next_begin, next_end, next_merge, next_seen
        first_head, q_a, q_b = next_first, next_a, next_b
        unit = next_unit


@gluon.jit
def _meet(
    acc_a, acc_b, top, total, offsets, mask, out_ptr, partial_ptr, lse_ptr, arrived_ptr, sinks_ptr,
    seq, kv_head, first_head, merge, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr, MAX_SPLITS: gl.constexpr,
):  # fmt: skip
    """Stores the result of an item; the last one of its sequence merges all of them."""
    NUM_HEADS: gl.constexpr = NUM_KV_HEADS * GROUP
    slots = (merge >> 9).to(gl.int64)
    here = (slots + ((merge >> 5) & 15)) * NUM_HEADS + kv_head * GROUP
    gl.store(partial_ptr + here * HEAD_DIM + offsets, acc_a, mask=mask)
    if HEAD_DIM == 128:
        gl.store(partial_ptr + here * HEAD_DIM + 64 + offsets, acc_b, mask=mask)
    rows = gl.arange(0, 64, top.type.layout)
    gl.store(lse_ptr + here + rows, top + gl.log2(total), mask=rows < GROUP)
    barrier()
    splits = merge & 31
    counter = arrived_ptr + seq * NUM_KV_HEADS + kv_head
    if gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == splits - 1:
        barrier()
        _merge(
            out_ptr + first_head * HEAD_DIM, partial_ptr, lse_ptr, sinks_ptr, kv_head,
            slots * NUM_HEADS + kv_head * GROUP, splits, NUM_HEADS, GROUP, HEAD_DIM, MAX_SPLITS,
        )  # fmt: skip
        gl.store(counter, 0)


@gluon.jit
def _count(work_ptr, NUM_KV_HEADS: gl.constexpr, MAX_SPLITS: gl.constexpr, WINDOW: gl.constexpr):
    """Returns the number of units, and how windows are cut."""
    splits = 1
    chunk = 0
    num_items = gl.load(work_ptr)
    if WINDOW > 0:
        splits, chunk = window_cut(work_ptr, WINDOW, MAX_SPLITS)
        num_items = gl.load(work_ptr + 1) * splits
    return num_items * NUM_KV_HEADS, splits, chunk


@gluon.jit
def _item(
    work_ptr, unit, stop, splits, chunk, query_start_ptr, kv_lens_ptr, NUM_KV_HEADS: gl.constexpr,
    BLOCK_N: gl.constexpr, MAX_SPLITS: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Returns the sequence, the first key, the end of its keys, where the splits of its sequence
    meet, and the first key of its window."""
    exists = unit < stop
    if WINDOW > 0:
        seq, begin, end, merge, seen = window_item(
            unit // NUM_KV_HEADS, exists, splits, chunk, query_start_ptr, kv_lens_ptr, WINDOW,
            BLOCK_N, MAX_SPLITS,
        )  # fmt: skip
    else:
        item_ptr = work_ptr + 4 + 4 * (unit // NUM_KV_HEADS)
        seq = gl.load(item_ptr, mask=exists, other=0)
        begin = gl.load(item_ptr + 1, mask=exists, other=0)
        end = gl.load(item_ptr + 2, mask=exists, other=0)
        merge = gl.load(item_ptr + 3, mask=exists, other=0)
        seen = 0
    return seq, begin, end, merge, seen


@gluon.jit
def _queries(
    q_ptr, query_start_ptr, seq, unit, num_units, offsets, mask,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """Returns the first head's row of [T * Hq, D], and the two halves of the group's queries"""
    row = gl.load(query_start_ptr + seq, mask=unit < num_units, other=0).to(gl.int64)
    first_head = row * (NUM_KV_HEADS * GROUP) + unit % NUM_KV_HEADS * GROUP
    at = q_ptr + first_head * HEAD_DIM + offsets
    mask = mask & (unit < num_units)
    q_a = gl.load(at, mask=mask, other=0.0)
    q_b = q_a
    if HEAD_DIM == 128:
        q_b = gl.load(at + 64, mask=mask, other=0.0)
    return first_head, q_a, q_b


@gluon.jit
def _merge(out_ptr, partial_ptr, lse_ptr, sinks_ptr, kv_head, first, splits,
           NUM_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
           MAX_SPLITS: gl.constexpr):  # fmt: skip
    """Merges the splits, unrolled: the loads do not wait for one another. Warp by warp, four heads
    at a time."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, layout))
    for base in gl.static_range(0, GROUP, 4):
        heads = base + gl.arange(0, 4, gl.SliceLayout(1, layout))
        top = gl.full([4], float("-inf"), gl.float32, gl.SliceLayout(1, layout))
        for s in gl.static_range(MAX_SPLITS):
            at = lse_ptr + first + s * NUM_HEADS + heads
            mask = (heads < GROUP) & (s < splits)
            lse = gl.load(at, mask=mask, other=float("-inf"), cache_modifier=".cg")
            top = gl.maximum(top, lse)
        top = gl.where(heads < GROUP, top, 0.0)
        total = gl.zeros([4], gl.float32, gl.SliceLayout(1, layout))
        acc = gl.zeros([4, HEAD_DIM], gl.float32, layout)
        for s in gl.static_range(MAX_SPLITS):
            at = first + s * NUM_HEADS + heads
            mask = (heads < GROUP) & (s < splits)
            lse = gl.load(lse_ptr + at, mask=mask, other=float("-inf"), cache_modifier=".cg")
            weight = gl.exp2(lse - top)
            both = mask[:, None] & (dims < HEAD_DIM)[None, :]
            where = partial_ptr + at[:, None] * HEAD_DIM + dims[None, :]
            partial = gl.load(where, mask=both, other=0.0, cache_modifier=".cg")
            acc += partial * weight[:, None]
            total += weight
        if sinks_ptr is not None:
            total += sink_weight(sinks_ptr, kv_head * GROUP + heads, heads < GROUP, top)
        result = acc / gl.where(total == 0.0, 1.0, total)[:, None]
        target = out_ptr + heads[:, None] * HEAD_DIM + dims[None, :]
        mask = (heads < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
        gl.store(target, result.to(out_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def _decode_kernel(
    q_ptr, k_desc, v_desc, out_ptr, partial_ptr, lse_ptr, arrived_ptr, work_ptr, counter_ptr,
    query_start_ptr, tables_ptr, stride_table,
    scale,  # with log2(e): softmax in base 2
    kv_lens_ptr,  # None without a window
    sinks_ptr,  # [Hq], or None
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, PAGE: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, MAX_SPLITS: gl.constexpr, WINDOW: gl.constexpr,
    SOFT_CAP: gl.constexpr,
):  # fmt: skip
    # The next kernel's programs may wait on the multiprocessors that are free.
    start_dependents(True)
    dtype: gl.constexpr = k_desc.dtype
    layout: gl.constexpr = k_desc.layout
    k_smem, v_smem, bars = make_ring(dtype, layout, HEAD_DIM // 64, BLOCK_N, STAGES, 1)
    tickets = make_tickets(1)
    wait_for_inputs(True)
    gl.warp_specialize(
        [
            (_attend_items, (k_smem, v_smem, bars, tickets, q_ptr, out_ptr, partial_ptr, lse_ptr,
                             arrived_ptr, work_ptr, query_start_ptr, scale, kv_lens_ptr,
                             sinks_ptr, NUM_KV_HEADS, GROUP, HEAD_DIM, BLOCK_N, STAGES, MAX_SPLITS,
                             WINDOW, SOFT_CAP)),
            (_fetch_items, (k_desc, v_desc, k_smem, v_smem, bars, tickets, work_ptr, counter_ptr,
                            tables_ptr, stride_table, query_start_ptr, kv_lens_ptr, NUM_KV_HEADS,
                            HEAD_DIM, PAGE, BLOCK_N, STAGES, MAX_SPLITS, WINDOW)),
        ],
        [1],
        [40],
    )  # fmt: skip

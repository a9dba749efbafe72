"""Decode attention in Triton: one query per sequence, its keys cut into items that merge in place.

A persistent grid walks the items of a PagedPlan times the KV heads; in a layer with a window, the
items of all sequences' windows, which the kernel cuts itself. A program holds the group of
query heads that share a KV head as the 16 rows of one mma tile (mma.sync: ptxas 12.8 miscompiles
wgmma with its left operand in registers). The program that finishes a sequence's last item merges
all of them in the order of the keys, so results are the same in every run and do not depend on the
other sequences. Grid and arguments do not depend on the plan's contents: fit for CUDA graphs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.backend import IS_INTERPRETED, num_sms
from kernels.paged_plan import MAX_SPLITS, PagedPlan, kernel_scale
from kernels.triton_launch import launch
from kernels.triton_window_items import window_cut, window_item


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int


def decode_config(head_dim: int, itemsize: int) -> DecodeConfig:
    """Returns the configuration. Stages count the fetch of block ids too: half of them hold keys in
    flight."""
    row_bytes = triton.next_power_of_2(head_dim) * itemsize
    if row_bytes <= 128:
        return DecodeConfig(64, 2, 5, 5)
    if row_bytes <= 256 and itemsize == 2:
        return DecodeConfig(64, 2, 5, 3)
    return DecodeConfig(32, 4, 5 if itemsize == 2 else 3, 2)


def paged_decode(
    q: torch.Tensor,  # [T, Hq, D]
    k_cache: torch.Tensor,  # [num_blocks, block_size, Hkv, D]
    v_cache: torch.Tensor,
    out: torch.Tensor,  # [T, Hq, D]; the rows of sequences with one query are written
    plan: PagedPlan,
    scale: float,
    sliding_window: int | None = None,
    config: DecodeConfig | None = None,
    *,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,  # [Hq] float32
) -> None:
    _, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    assert all(tensor.is_contiguous() for tensor in (q, k_cache, v_cache, out))
    config = config or decode_config(head_dim, q.element_size())
    resident = 2 if IS_INTERPRETED else num_sms(q.device) * config.programs_per_sm
    grid = (min(plan.max_decode_items(sliding_window) * num_kv_heads, resident),)
    group = num_heads // num_kv_heads
    factor, cap = kernel_scale(scale, soft_cap)
    launch(
        _decode_kernel,
        grid,
        q,
        k_cache,
        v_cache,
        out,
        plan.scratch.partial,
        plan.scratch.lse,
        plan.scratch.arrived,
        plan.work,
        plan.query_start,
        plan.kv_lens,
        plan.block_tables,
        plan.block_tables.stride(0),
        factor,
        sliding_window or 0,
        sinks,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        PAGE=block_size,
        BLOCK_M=max(16, triton.next_power_of_2(group)),
        BLOCK_G=triton.next_power_of_2(group),
        BLOCK_N=config.block_n,
        BLOCK_D=triton.next_power_of_2(head_dim),
        MAX_SPLITS=MAX_SPLITS,
        HAS_WINDOW=sliding_window is not None,
        SOFT_CAP=cap,
        UPCAST=IS_INTERPRETED,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


@triton.jit
def scaled(scores, scale, SOFT_CAP: tl.constexpr):
    """Returns logits in base 2: see `kernel_scale`. tanh has an error of 1e-7, whatever the
    score."""
    logits = scores * scale
    if SOFT_CAP != 0.0:
        power = tl.exp2(tl.minimum(logits, 80.0))  # tanh is 1 from there on
        logits = SOFT_CAP - (2.0 * SOFT_CAP) / (power + 1.0)
    return logits


@triton.jit
def sink_weight(sinks_ptr, heads, exists, top):
    """Returns the heads' sinks as addends of their sums of weights, where `top` has weight 1."""
    sinks = tl.load(sinks_ptr + heads, mask=exists, other=float("-inf")) * 1.4426950408889634
    is_empty = top <= -1e30  # without keys there is nothing to share
    return tl.where(is_empty, 0.0, tl.exp2(sinks - tl.where(is_empty, 0.0, top)))


@triton.jit
def _decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    arrived_ptr,
    work_ptr,
    query_start_ptr,
    kv_lens_ptr,
    tables_ptr,
    stride_table,
    scale,  # with log2(e): softmax in base 2
    window,
    sinks_ptr,  # [Hq], or None
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,  # 0: none
    UPCAST: tl.constexpr,
):
    num_items = tl.load(work_ptr)
    if HAS_WINDOW:
        num_items, sequences, chunk = window_cut(work_ptr, window, MAX_SPLITS)
    num_units = num_items * NUM_KV_HEADS
    for unit in range(tl.program_id(0), num_units, tl.num_programs(0)):
        head = unit % NUM_KV_HEADS
        if HAS_WINDOW:
            seq, begin, end, merge, seen = window_item(
                unit // NUM_KV_HEADS, True, sequences, chunk, query_start_ptr, kv_lens_ptr,
                window, BLOCK_N, MAX_SPLITS,
            )  # fmt: skip
            if merge != 0:
                _attend_item(
                    q_ptr, k_ptr, v_ptr, out_ptr, partial_ptr, lse_ptr, arrived_ptr,
                    query_start_ptr, tables_ptr, stride_table, scale, sinks_ptr, head, seq, begin,
                    end, merge, seen, NUM_KV_HEADS, GROUP, HEAD_DIM, PAGE, BLOCK_M, BLOCK_G,
                    BLOCK_N, BLOCK_D, MAX_SPLITS, True, SOFT_CAP, UPCAST,
                )  # fmt: skip
        else:
            item_ptr = work_ptr + 4 + 4 * (unit // NUM_KV_HEADS)
            seq = tl.load(item_ptr)
            begin = tl.load(item_ptr + 1)
            end = tl.load(item_ptr + 2)
            merge = tl.load(item_ptr + 3)
            _attend_item(
                q_ptr, k_ptr, v_ptr, out_ptr, partial_ptr, lse_ptr, arrived_ptr, query_start_ptr,
                tables_ptr, stride_table, scale, sinks_ptr, head, seq, begin, end, merge, 0,
                NUM_KV_HEADS, GROUP, HEAD_DIM, PAGE, BLOCK_M, BLOCK_G, BLOCK_N, BLOCK_D,
                MAX_SPLITS, False, SOFT_CAP, UPCAST,
            )  # fmt: skip


@triton.jit
def _attend_item(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    arrived_ptr,
    query_start_ptr,
    tables_ptr,
    stride_table,
    scale,
    sinks_ptr,
    head,  # of K and V
    seq,
    begin,
    end,
    merge,
    seen,  # keys before it are outside the window
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    UPCAST: tl.constexpr,
):
    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    row = tl.load(query_start_ptr + seq).to(tl.int64)
    row_mask = (offs_m < GROUP)[:, None] & (offs_d < HEAD_DIM)[None, :]
    head_rows = (head * GROUP + offs_m)[:, None] * HEAD_DIM + offs_d[None, :]
    num_heads: tl.constexpr = NUM_KV_HEADS * GROUP
    q = tl.load(q_ptr + row * (num_heads * HEAD_DIM) + head_rows, mask=row_mask, other=0.0)
    table = tables_ptr + seq.to(tl.int64) * stride_table
    acc, top, total = _attend(
        q, k_ptr, v_ptr, table, head, begin, end, seen, scale,
        NUM_KV_HEADS, HEAD_DIM, PAGE, BLOCK_M, BLOCK_N, BLOCK_D, HAS_WINDOW, SOFT_CAP,
        UPCAST,
    )  # fmt: skip
    if sinks_ptr is not None and merge & 31 == 1:  # otherwise added when the splits merge
        total += sink_weight(sinks_ptr, head * GROUP + offs_m, offs_m < GROUP, top)
    total = tl.where(total == 0.0, 1.0, total)  # no keys: zeros for padding, and lse -inf
    attended = acc / total[:, None]
    splits = merge & 31
    if splits == 1:
        out_rows = out_ptr + row * (num_heads * HEAD_DIM) + head_rows
        tl.store(out_rows, attended.to(out_ptr.dtype.element_ty), mask=row_mask)
    else:
        slots = (merge >> 9).to(tl.int64)
        slot = slots + ((merge >> 5) & 15)
        tl.store(partial_ptr + slot * (num_heads * HEAD_DIM) + head_rows, attended, row_mask)
        lse = top + tl.log2(total)
        tl.store(lse_ptr + slot * num_heads + head * GROUP + offs_m, lse, offs_m < GROUP)
        tl.debug_barrier()
        counter = arrived_ptr + seq * NUM_KV_HEADS + head
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == splits - 1:
            tl.debug_barrier()
            _merge(
                out_ptr, partial_ptr, lse_ptr, sinks_ptr, row, slots, splits, head,
                num_heads, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D, MAX_SPLITS,
            )  # fmt: skip
            tl.store(counter, 0)


@triton.jit
def _attend(
    q,  # [BLOCK_M, BLOCK_D]
    k_ptr,
    v_ptr,
    table,
    head,
    begin,
    end,
    seen,  # keys before it are outside the window
    scale,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Returns acc [BLOCK_M, BLOCK_D], the largest score and the sum, both [BLOCK_M], not
    normalised."""
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    in_head = head * HEAD_DIM + offs_d[None, :]
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(begin, end, BLOCK_N):
        keys = start + offs_n
        if PAGE % BLOCK_N == 0:
            block = tl.load(table + start // PAGE).to(tl.int64)
            slots = block * PAGE + (start % PAGE + offs_n)
        else:
            blocks = tl.load(table + keys // PAGE, mask=keys < end, other=0).to(tl.int64)
            slots = blocks * PAGE + keys % PAGE
        rows = slots[:, None] * (NUM_KV_HEADS * HEAD_DIM) + in_head
        # Memory past the end (it may hold NaN) is never read.
        mask = (keys < end)[:, None] & (offs_d < HEAD_DIM)[None, :]
        k = tl.load(k_ptr + rows, mask=mask, other=0.0)
        v = tl.load(v_ptr + rows, mask=mask, other=0.0)
        if k_ptr.dtype.element_ty == tl.float8e4nv:
            k, v = k.to(q.dtype), v.to(q.dtype)
        if UPCAST:
            scores = tl.dot(q.to(tl.float32), tl.trans(k).to(tl.float32), input_precision="ieee")
        else:
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        visible = keys < end
        if HAS_WINDOW:
            visible = visible & (keys >= seen)
        scores = tl.where(visible[None, :], scaled(scores, scale, SOFT_CAP), float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))  # finite: every tile holds a visible key
        weights = tl.exp2(scores - new_top[:, None])
        fade = tl.exp2(top - new_top)
        total = total * fade + tl.sum(weights, 1)
        acc = acc * fade[:, None]
        if UPCAST:
            acc = tl.dot(weights.to(v.dtype).to(tl.float32), v.to(tl.float32), acc, "ieee")
        else:
            acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
        top = new_top
    return acc, top, total


@triton.jit
def _merge(
    out_ptr,
    partial_ptr,
    lse_ptr,
    sinks_ptr,
    row,
    slots,
    splits,
    head,
    num_heads: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """Merges all splits at once, in parts of the head dimension: one trip to L2 for each part
    instead of one per split."""
    PART: tl.constexpr = BLOCK_D if BLOCK_D * BLOCK_G <= 256 else max(256 // BLOCK_G, 16)
    split = tl.arange(0, MAX_SPLITS)
    heads = tl.arange(0, BLOCK_G)
    here = (split < splits)[:, None] & (heads < GROUP)[None, :]  # [splits, group]
    at = (slots + split)[:, None] * num_heads + head * GROUP + heads[None, :]
    lse = tl.load(lse_ptr + at, mask=here, other=float("-inf"), cache_modifier=".cg")
    top = tl.max(lse, 0)
    top = tl.where(top == float("-inf"), 0.0, top)  # rows past the group
    weights = tl.exp2(lse - top[None, :])
    total = tl.sum(weights, 0)
    if sinks_ptr is not None:
        total += sink_weight(sinks_ptr, head * GROUP + heads, heads < GROUP, top)
    weights = weights / tl.where(total == 0.0, 1.0, total)[None, :]
    for first in tl.static_range(0, BLOCK_D, PART):
        dims = first + tl.arange(0, PART)
        mask = here[:, :, None] & (dims < HEAD_DIM)[None, None, :]
        partial = tl.load(
            partial_ptr + at[:, :, None] * HEAD_DIM + dims[None, None, :],
            mask=mask,
            other=0.0,
            cache_modifier=".cg",
        )
        merged = tl.sum(partial * weights[:, :, None], 0)  # [group, PART]
        out_mask = (heads < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
        target = out_ptr + (row * num_heads + head * GROUP + heads)[:, None] * HEAD_DIM
        tl.store(target + dims[None, :], merged.to(out_ptr.dtype.element_ty), mask=out_mask)

"""Prefill attention in Triton: chunks of queries over a paged cache, causal, of any lengths.

A program holds TILE_ROWS (query, head) pairs of one KV head: neighbouring queries times the query
heads that share it, so that every key it reads serves them all. Keys that all its queries see are
attended to without a mask; the diagonal comes last. Programs start with the heaviest tiles.
A query's result depends on its own keys and its place in its chunk only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.backend import IS_INTERPRETED
from kernels.paged_plan import TILE_ROWS, PagedPlan, kernel_scale
from kernels.triton_decode_attention import scaled, sink_weight
from kernels.triton_launch import launch


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    block_n: int
    num_warps: int
    num_stages: int


def prefill_config(head_dim: int, itemsize: int) -> PrefillConfig:
    """Returns the configuration. Stages count the fetch of block ids too: half of them hold keys in
    flight."""
    row_bytes = triton.next_power_of_2(head_dim) * itemsize
    if itemsize == 2:
        return PrefillConfig(64 if row_bytes <= 256 else 32, 8, 5)
    return PrefillConfig(32 if row_bytes <= 256 else 16, 8, 2)


def paged_prefill(
    q: torch.Tensor,  # [T, Hq, D]
    k_cache: torch.Tensor,  # [num_blocks, block_size, Hkv, D]
    v_cache: torch.Tensor,
    out: torch.Tensor,  # [T, Hq, D]; the rows of sequences with several queries are written
    plan: PagedPlan,
    scale: float,
    sliding_window: int | None = None,
    config: PrefillConfig | None = None,
    *,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,  # [Hq] float32
) -> None:
    _, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    assert all(tensor.is_contiguous() for tensor in (q, k_cache, v_cache, out))
    config = config or prefill_config(head_dim, q.element_size())
    factor, cap = kernel_scale(scale, soft_cap)
    launch(
        _prefill_kernel,
        (plan.max_tiles * num_kv_heads,),
        q,
        k_cache,
        v_cache,
        out,
        plan.work,
        plan.query_start,
        plan.kv_lens,
        plan.block_tables,
        plan.block_tables.stride(0),
        factor,
        sliding_window or 0,
        sinks,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        PAGE=block_size,
        BLOCK_M=TILE_ROWS,
        BLOCK_N=config.block_n,
        BLOCK_D=triton.next_power_of_2(head_dim),
        HAS_WINDOW=sliding_window is not None,
        SOFT_CAP=cap,
        UPCAST=IS_INTERPRETED,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


@triton.jit
def _prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
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
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,  # 0: none
    UPCAST: tl.constexpr,
):
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    unit = tl.program_id(0)
    if unit >= tl.load(work_ptr + 3) * NUM_KV_HEADS:  # a graph has programs for the most tiles
        return
    head = unit % NUM_KV_HEADS
    tile_ptr = work_ptr + 4 + 4 * tl.load(work_ptr) + 2 * (unit // NUM_KV_HEADS)
    seq = tl.load(tile_ptr)
    first = tl.load(tile_ptr + 1)
    query_end = tl.load(query_start_ptr + seq + 1)
    before = tl.load(kv_lens_ptr + seq) - query_end  # position of a query: its row of q + before

    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    tokens = first + offs_m // GROUP
    valid = (offs_m < TOKENS * GROUP) & (tokens < query_end)
    heads = head * GROUP + offs_m % GROUP
    offsets = (tokens.to(tl.int64) * (NUM_KV_HEADS * GROUP) + heads)[:, None] * HEAD_DIM
    offsets += offs_d[None, :]
    mask = valid[:, None] & (offs_d < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + offsets, mask=mask, other=0.0)

    end = tl.minimum(first + TOKENS, query_end) + before  # keys that the last query sees
    positions = tokens + before
    table = tables_ptr + seq.to(tl.int64) * stride_table
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    full_end = (first + before + 1) // BLOCK_N * BLOCK_N  # keys that every query sees
    begin = 0
    if HAS_WINDOW:  # from the first key that the first query sees, to the first that all see
        start = tl.maximum(first + before - window + 1, 0) // BLOCK_N * BLOCK_N
        begin = (tl.maximum(end - window, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
        acc, top, total = _attend(
            q, acc, top, total, k_ptr, v_ptr, table, head, positions, start,
            tl.minimum(begin, full_end), end, scale, window, NUM_KV_HEADS, HEAD_DIM, PAGE, BLOCK_N,
            BLOCK_D, True, True, SOFT_CAP, UPCAST,
        )  # fmt: skip
    acc, top, total = _attend(
        q, acc, top, total, k_ptr, v_ptr, table, head, positions, begin, full_end, end, scale,
        window, NUM_KV_HEADS, HEAD_DIM, PAGE, BLOCK_N, BLOCK_D, False, False, SOFT_CAP, UPCAST,
    )  # fmt: skip
    acc, top, total = _attend(
        q, acc, top, total, k_ptr, v_ptr, table, head, positions, full_end, end, end, scale,
        window, NUM_KV_HEADS, HEAD_DIM, PAGE, BLOCK_N, BLOCK_D, True, HAS_WINDOW, SOFT_CAP, UPCAST,
    )  # fmt: skip
    if sinks_ptr is not None:
        total += sink_weight(sinks_ptr, heads, offs_m >= 0, top)
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # rows past the last query
    tl.store(out_ptr + offsets, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _attend(
    q,  # [BLOCK_M, BLOCK_D]
    acc,
    top,
    total,
    k_ptr,
    v_ptr,
    table,
    head,
    positions,
    begin,
    stop,
    end,
    scale,
    window,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    UPCAST: tl.constexpr,
):
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    in_head = head * HEAD_DIM + offs_d[None, :]
    for start in range(begin, stop, BLOCK_N):
        keys = start + offs_n
        if PAGE % BLOCK_N == 0:
            block = tl.load(table + start // PAGE).to(tl.int64)
            slots = block * PAGE + (start % PAGE + offs_n)
        elif MASKED:
            slots = tl.load(table + keys // PAGE, mask=keys < end, other=0).to(tl.int64) * PAGE
            slots += keys % PAGE
        else:
            slots = tl.load(table + keys // PAGE).to(tl.int64) * PAGE + keys % PAGE
        rows = slots[:, None] * (NUM_KV_HEADS * HEAD_DIM) + in_head
        if MASKED:  # memory past the end (it may hold NaN) is never read
            mask = (keys < end)[:, None] & (offs_d < HEAD_DIM)[None, :]
            k = tl.load(k_ptr + rows, mask=mask, other=0.0)
            v = tl.load(v_ptr + rows, mask=mask, other=0.0)
        elif HEAD_DIM == BLOCK_D:
            k = tl.load(k_ptr + rows)
            v = tl.load(v_ptr + rows)
        else:
            k = tl.load(k_ptr + rows, mask=(offs_d < HEAD_DIM)[None, :], other=0.0)
            v = tl.load(v_ptr + rows, mask=(offs_d < HEAD_DIM)[None, :], other=0.0)
        if k_ptr.dtype.element_ty == tl.float8e4nv:
            k, v = k.to(q.dtype), v.to(q.dtype)
        if UPCAST:
            scores = tl.dot(q.to(tl.float32), tl.trans(k).to(tl.float32), input_precision="ieee")
        else:
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            visible = keys[None, :] <= positions[:, None]
            if HAS_WINDOW:
                visible = visible & (keys[None, :] > positions[:, None] - window)
            scores = tl.where(visible, scaled(scores, scale, SOFT_CAP), float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            if HAS_WINDOW:  # no key of the tile may lie in the window of a late query
                new_top = tl.where(new_top == float("-inf"), -1e30, new_top)
            weights = tl.exp2(scores - new_top[:, None])
        elif SOFT_CAP == 0.0:
            new_top = tl.maximum(top, tl.max(scores, 1) * scale)
            weights = tl.exp2(scores * scale - new_top[:, None])
        else:
            scores = scaled(scores, scale, SOFT_CAP)
            new_top = tl.maximum(top, tl.max(scores, 1))
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

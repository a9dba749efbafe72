"""The items of decode attention in Gluon: which keys and queries each has, and the merge of their
results.

A sequence whose keys are cut into several items has a slot of float32 in the scratch for each of
them and each of its queries. The program that finishes the last item merges them in the order of
the keys, so a result does not depend on the order of the programs.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.gluon_attention import barrier, sink_weight
from kernels.triton_window_items import window_cut, window_item


@gluon.jit
def count_units(
    work_ptr, NUM_KV_HEADS: gl.constexpr, MAX_SPLITS: gl.constexpr, WINDOW: gl.constexpr
):
    """Returns the number of units, and how windows are cut: see `window_cut`."""
    sequences = 1
    chunk = 0
    num_items = gl.load(work_ptr)
    if WINDOW > 0:
        num_items, sequences, chunk = window_cut(work_ptr, WINDOW, MAX_SPLITS)
    return num_items * NUM_KV_HEADS, sequences, chunk


@gluon.jit
def read_item(
    work_ptr, unit, stop, sequences, chunk, query_start_ptr, kv_lens_ptr,
    NUM_KV_HEADS: gl.constexpr, BLOCK_N: gl.constexpr, MAX_SPLITS: gl.constexpr,
    WINDOW: gl.constexpr,
):  # fmt: skip
    """Returns the sequence, the first key, the end of its keys, where the splits of its sequence
    meet, and the first key of its window."""
    exists = unit < stop
    if WINDOW > 0:
        seq, begin, end, merge, seen = window_item(
            unit // NUM_KV_HEADS, exists, sequences, chunk, query_start_ptr, kv_lens_ptr,
            WINDOW, BLOCK_N, MAX_SPLITS,
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
def read_queries(
    q_ptr, query_start_ptr, kv_lens_ptr, seq, unit, num_units, offsets, rows,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
    HAS_QUERIES: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """Returns the first head's row of [T * Hq, D], the number of queries of the sequence, its keys,
    and the two halves of the queries of the group, in the ring's type."""
    exists = unit < num_units
    row = gl.load(query_start_ptr + seq, mask=exists, other=0)
    queries = 1
    kv_len = 0
    if HAS_QUERIES:
        queries = gl.load(query_start_ptr + seq + 1, mask=exists, other=0) - row
        kv_len = gl.load(kv_lens_ptr + seq, mask=exists, other=0)
    first_head = row.to(gl.int64) * (NUM_KV_HEADS * GROUP) + unit % NUM_KV_HEADS * GROUP
    at = q_ptr + first_head * HEAD_DIM + offsets
    dims = gl.arange(0, 64, gl.SliceLayout(0, offsets.type.layout))
    mask = (rows < queries * GROUP)[:, None] & (dims < 64)[None, :] & exists
    q_a = gl.load(at, mask=mask, other=0.0).to(dtype)
    q_b = q_a
    if HEAD_DIM == 128:
        q_b = gl.load(at + 64, mask=mask, other=0.0).to(dtype)
    return first_head, queries, kv_len, q_a, q_b


@gluon.jit
def meet(
    acc_a, acc_b, top, total, offsets, mask, out_ptr, partial_ptr, lse_ptr, arrived_ptr, sinks_ptr,
    seq, kv_head, first_head, num_queries, merge, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr, MAX_SPLITS: gl.constexpr,
):  # fmt: skip
    """Stores the result of an item; the last one of its sequence merges all of them. Each split
    has a slot for each query."""
    NUM_HEADS: gl.constexpr = NUM_KV_HEADS * GROUP
    slots = (merge >> 9).to(gl.int64)
    here = (slots + ((merge >> 5) & 15) * num_queries) * NUM_HEADS + kv_head * GROUP
    gl.store(partial_ptr + here * HEAD_DIM + offsets, acc_a, mask=mask)
    if HEAD_DIM == 128:
        gl.store(partial_ptr + here * HEAD_DIM + 64 + offsets, acc_b, mask=mask)
    rows = gl.arange(0, 64, top.type.layout)
    at = lse_ptr + here + rows // GROUP * NUM_HEADS + rows % GROUP
    gl.store(at, top + gl.log2(total), mask=rows < num_queries * GROUP)
    barrier()
    splits = merge & 31
    counter = arrived_ptr + seq * NUM_KV_HEADS + kv_head
    if gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == splits - 1:
        barrier()
        for query in range(num_queries):
            _merge(
                out_ptr + (first_head + query * NUM_HEADS) * HEAD_DIM, partial_ptr, lse_ptr,
                sinks_ptr, kv_head, (slots + query) * NUM_HEADS + kv_head * GROUP, splits,
                num_queries * NUM_HEADS, GROUP, HEAD_DIM, MAX_SPLITS,
            )  # fmt: skip
        gl.store(counter, 0)


@gluon.jit
def _merge(
    out_ptr, partial_ptr, lse_ptr, sinks_ptr, kv_head, first, splits, stride,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, MAX_SPLITS: gl.constexpr,
):  # fmt: skip
    """Merges the splits of a query, which are `stride` heads apart. Unrolled: the loads do not wait
    for one another. Warp by warp, four heads at a time."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    dims = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, layout))
    for base in gl.static_range(0, GROUP, 4):
        heads = base + gl.arange(0, 4, gl.SliceLayout(1, layout))
        top = gl.full([4], float("-inf"), gl.float32, gl.SliceLayout(1, layout))
        for s in gl.static_range(MAX_SPLITS):
            at = lse_ptr + first + s * stride + heads
            mask = (heads < GROUP) & (s < splits)
            lse = gl.load(at, mask=mask, other=float("-inf"), cache_modifier=".cg")
            top = gl.maximum(top, lse)
        top = gl.where(heads < GROUP, top, 0.0)
        total = gl.zeros([4], gl.float32, gl.SliceLayout(1, layout))
        acc = gl.zeros([4, HEAD_DIM], gl.float32, layout)
        for s in gl.static_range(MAX_SPLITS):
            at = first + s * stride + heads
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

"""The shared parts of the Hopper attention kernels: fetching pages of keys, and one step over them.

A ring of STAGES buffers holds BLOCK_N keys and their values each; a row is kept as PARTS pieces of
64 columns, in 16 bits the 128 bytes that one swizzled row of shared memory holds. Each buffer has a
barrier for "full" and one for "empty". A cache in e4m3 is fetched into a ring of its own, from
which two warps widen it to float16, which holds every e4m3 exactly. Free of plans.
"""

from __future__ import annotations

import functools

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.e4m3 import E4M3

# The names of Triton 3.7 and later, and the earlier names.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared

_KINDS = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    E4M3: gl.float8e4nv,
}
# Warps that widen e4m3. With the warp that fetches they are one warpgroup: with four, the attending
# warps had fewer registers, and 64 x 4,096 keys took 200 us instead of 175 on an H200.
WIDENERS = gl.constexpr(2)


def describe_rows(cache: torch.Tensor, block_n: int) -> TensorDescriptor:
    """Returns the descriptor of the copies of rows of a page, of [slots, num_heads * head_dim]: of
    128 bytes of a head, or less where it has less: copies of 64 bytes take as long. V of a layer
    may have fewer rows in the cache than its K."""
    num_heads, head_dim = cache.shape[2:]
    columns = min(head_dim, 128 // cache.element_size())
    rows = cache.view(-1, num_heads * head_dim)
    box = [min(cache.shape[1], block_n), columns]
    return TensorDescriptor.from_tensor(rows, box, _ring_layout(block_n, columns, cache.dtype))


@functools.cache
def _ring_layout(block_n: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([block_n, columns], _KINDS[dtype])


@gluon.constexpr_function
def wide_layout(block_n, columns):
    """Returns the layout of so many columns of a ring into which e4m3 is widened. The pieces of a
    row lie where the pieces of a whole row lie in its layout."""
    return gl.NVMMASharedLayout.get_default_for([block_n, columns], gl.float16)


@gluon.jit
def make_ring(dtype: gl.constexpr, layout: gl.constexpr, PARTS: gl.constexpr,
              BLOCK_N: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr,
              READERS: gl.constexpr):  # fmt: skip
    """Returns keys, values, barriers (keys full, keys empty, values full, values empty)"""
    k_smem = gl.allocate_shared_memory(dtype, [STAGES * PARTS, BLOCK_N, WIDTH], layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES * PARTS, BLOCK_N, WIDTH], layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=READERS)
        mbarrier.init(v_empty.index(i), count=READERS)
    fence_async_shared()
    return k_smem, v_smem, (k_full, k_empty, v_full, v_empty)


@gluon.jit
def fetch(
    k_desc, v_desc, k_smem, v_smem, bars, count, table, column, begin, end,
    PAGE: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fills the ring with the keys from begin to end; `column` is where the head begins."""
    BOX: gl.constexpr = k_desc.block_type.shape[0]
    WIDTH: gl.constexpr = k_desc.block_type.shape[1]
    PARTS: gl.constexpr = HEAD_DIM // WIDTH
    BYTES: gl.constexpr = BLOCK_N * HEAD_DIM * k_desc.dtype.primitive_bitwidth // 8
    for start in range(begin, end, BLOCK_N):
        rows = ()
        for part in gl.static_range(BLOCK_N // BOX):
            # Past the end: the last page once more. It is masked.
            key = gl.minimum(start + part * BOX, (end - 1) // BOX * BOX)
            row = gl.load(table + key // PAGE) * PAGE + key % PAGE
            rows = rows + (row,)  # noqa: RUF005 - Triton has no unpacking
        stage = count % STAGES
        phase = (count // STAGES) & 1
        count += 1
        mbarrier.wait(bars[1].index(stage), phase ^ 1)
        mbarrier.expect(bars[0].index(stage), BYTES)
        for part in gl.static_range(BLOCK_N // BOX):
            for d in gl.static_range(PARTS):
                to = k_smem.index(stage * PARTS + d).slice(part * BOX, BOX)
                at = [rows[part], column + d * WIDTH]
                async_load(k_desc, at, bars[0].index(stage), to)
        mbarrier.wait(bars[3].index(stage), phase ^ 1)
        mbarrier.expect(bars[2].index(stage), BYTES)
        for part in gl.static_range(BLOCK_N // BOX):
            for d in gl.static_range(PARTS):
                to = v_smem.index(stage * PARTS + d).slice(part * BOX, BOX)
                at = [rows[part], column + d * WIDTH]
                async_load(v_desc, at, bars[2].index(stage), to)
    return count


@gluon.jit
def widen(
    staged,  # (keys, values, barriers) in e4m3, of STAGED buffers
    k_smem, v_smem, bars, count, begin, end,
    HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Moves the keys from begin to end, and their values, from the ring in e4m3 to that in
    float16. Called by WIDENERS warps."""
    k_staged, v_staged, full = staged
    layout: gl.constexpr = wide_layout(BLOCK_N, HEAD_DIM)
    shape: gl.constexpr = [STAGES, BLOCK_N, HEAD_DIM]
    k_whole = k_smem._reinterpret(gl.float16, shape, layout)
    v_whole = v_smem._reinterpret(gl.float16, shape, layout)
    for _start in range(begin, end, BLOCK_N):
        from_stage, from_phase = count % STAGED, (count // STAGED) & 1
        to_stage, to_phase = count % STAGES, (count // STAGES) & 1
        count += 1
        for i in gl.static_range(2):
            source = k_staged if i == 0 else v_staged
            target = k_whole if i == 0 else v_whole
            mbarrier.wait(full[2 * i].index(from_stage), from_phase)
            mbarrier.wait(bars[2 * i + 1].index(to_stage), to_phase ^ 1)
            _widen_rows(source.index(from_stage), target.index(to_stage), HEAD_DIM, BLOCK_N)
            fence_async_shared()
            barrier()
            mbarrier.arrive(full[2 * i + 1].index(from_stage), count=1)
            mbarrier.arrive(bars[2 * i].index(to_stage), count=1)
    return count


@gluon.jit
def _widen_rows(source, target, HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr):
    """Widens [BLOCK_N, HEAD_DIM], 32 rows at a time. A thread has eight neighbours of a row, so
    that the 16 bytes that it writes are in other banks than its neighbours'."""
    ACROSS: gl.constexpr = HEAD_DIM // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [WIDENERS, 1], [1, 0])
    for row in gl.static_range(0, BLOCK_N, 32):
        narrow = source.slice(row, 32).load(layout)
        target.slice(row, 32).store(narrow.to(target.dtype))


@gluon.jit
def scores_of(q_a, q_b, k_smem, stage, zeros, PARTS: gl.constexpr):
    """Returns scores whose product is started, not awaited."""
    k = k_smem.index(stage * PARTS).permute((1, 0))
    scores = warpgroup_mma(q_a, k, zeros, use_acc=False, is_async=True)
    if PARTS == 2:
        k = k_smem.index(stage * PARTS + 1).permute((1, 0))
        scores = warpgroup_mma(q_b, k, scores, is_async=True)
    return scores


@gluon.jit
def softmax(
    scores, top, total, scale,
    limits,  # the last key that each row sees
    floors,  # the first one, if WINDOWED
    start, MASKED: gl.constexpr, WINDOWED: gl.constexpr, SOFT_CAP: gl.constexpr,
    weights_layout: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """Returns the weights, the factor by which the sums so far fade, the new top and the new
    total. SOFT_CAP: see `kernel_scale`; 0: none."""
    layout: gl.constexpr = scores.type.layout
    BLOCK_N: gl.constexpr = scores.shape[1]
    if SOFT_CAP != 0.0:
        power = gl.exp2(gl.minimum(scores * scale, 80.0))  # tanh is 1 from there on
        scores = SOFT_CAP - (2.0 * SOFT_CAP) / (power + 1.0)
    if MASKED:
        keys = start + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
        scores = gl.where(keys[None, :] <= limits[:, None], scores, float("-inf"))
        if WINDOWED:
            scores = gl.where(keys[None, :] >= floors[:, None], scores, float("-inf"))
    if SOFT_CAP != 0.0:
        new_top = gl.maximum(top, gl.max(scores, 1))
    else:
        new_top = gl.maximum(top, gl.max(scores, 1) * scale)
    if WINDOWED:  # a late row may see none of these keys
        new_top = gl.maximum(new_top, -1e30)
    if SOFT_CAP != 0.0:
        weights = gl.exp2(scores - new_top[:, None])
    else:
        weights = gl.exp2(scores * scale - new_top[:, None])
    fade = gl.exp2(top - new_top)
    total = total * fade + gl.sum(weights, 1)
    return gl.convert_layout(weights.to(dtype), weights_layout), fade, new_top, total


@gluon.jit
def sink_weight(sinks_ptr, heads, exists, top):
    """Returns the heads' sinks as addends of their sums of weights, where `top` has weight 1."""
    sinks = gl.load(sinks_ptr + heads, mask=exists, other=float("-inf")) * 1.4426950408889634
    is_empty = top <= -1e30  # without keys there is nothing to share
    return gl.where(is_empty, 0.0, gl.exp2(sinks - gl.where(is_empty, 0.0, top)))


@gluon.jit
def first_step(
    q_a, q_b, k_smem, bars, count, zeros, top, total, scale, limits, floors, start,
    WINDOWED: gl.constexpr, SOFT_CAP: gl.constexpr, weights_layout: gl.constexpr,
    dtype: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    stage = count % STAGES
    mbarrier.wait(bars[0].index(stage), (count // STAGES) & 1)
    scores = scores_of(q_a, q_b, k_smem, stage, zeros, PARTS)
    scores = warpgroup_mma_wait(0, [scores])
    barrier()
    mbarrier.arrive(bars[1].index(stage), count=1)
    weights, _fade, top, total = softmax(
        scores, top, total, scale, limits, floors, start, True, WINDOWED, SOFT_CAP,
        weights_layout, dtype,
    )  # fmt: skip
    return weights, top, total


@gluon.jit
def step(
    q_a, q_b, k_smem, v_smem, bars, count, zeros, weights, top, total, acc_a, acc_b,
    scale, limits, floors, start, MASKED: gl.constexpr, WINDOWED: gl.constexpr,
    SOFT_CAP: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Computes the scores of these keys while it multiplies the values of the keys before them."""
    weights_layout: gl.constexpr = weights.type.layout
    dtype: gl.constexpr = weights.dtype
    stage = count % STAGES
    mbarrier.wait(bars[0].index(stage), (count // STAGES) & 1)
    scores = scores_of(q_a, q_b, k_smem, stage, zeros, PARTS)
    old = (count - 1) % STAGES
    mbarrier.wait(bars[2].index(old), ((count - 1) // STAGES) & 1)
    acc_a = warpgroup_mma(weights, v_smem.index(old * PARTS), acc_a, is_async=True)
    if PARTS == 2:
        acc_b = warpgroup_mma(weights, v_smem.index(old * PARTS + 1), acc_b, is_async=True)
    scores = warpgroup_mma_wait(PARTS, [scores])
    barrier()
    mbarrier.arrive(bars[1].index(stage), count=1)
    new_weights, fade, top, total = softmax(
        scores, top, total, scale, limits, floors, start, MASKED, WINDOWED, SOFT_CAP,
        weights_layout, dtype,
    )  # fmt: skip
    # The weights are named here so that no register of theirs is reused before the product is done:
    # ptxas before 13.1 does not see to that itself.
    if PARTS == 2:
        acc_a, acc_b, weights = warpgroup_mma_wait(0, [acc_a, acc_b, weights])
    else:
        acc_a, weights = warpgroup_mma_wait(0, [acc_a, weights])
    barrier()
    mbarrier.arrive(bars[3].index(old), count=1)
    fade = gl.convert_layout(fade, gl.SliceLayout(1, acc_a.type.layout))
    acc_a = acc_a * fade[:, None]
    if PARTS == 2:
        acc_b = acc_b * fade[:, None]
    return new_weights, top, total, acc_a, acc_b


@gluon.jit
def last_values(
    v_smem,
    bars,
    count,
    weights,
    acc_a,
    acc_b,
    end,
    PARTS: gl.constexpr,
    STAGES: gl.constexpr,
):
    BLOCK_N: gl.constexpr = v_smem.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    stage = count % STAGES
    mbarrier.wait(bars[2].index(stage), (count // STAGES) & 1)
    if end % BLOCK_N != 0:
        # Values past the end of a page (NaN, even) must not meet a weight of zero. Every
        # warpgroup that reads these values does the same: each must have seen its own zeros.
        valid = gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout)) < end % BLOCK_N
        for d in gl.static_range(PARTS):
            values = v_smem.index(stage * PARTS + d).load(layout)
            clean = gl.where(valid[:, None], values, gl.zeros_like(values))
            v_smem.index(stage * PARTS + d).store(clean)
        fence_async_shared()
        barrier()
    acc_a = warpgroup_mma(weights, v_smem.index(stage * PARTS), acc_a, is_async=True)
    if PARTS == 2:
        acc_b = warpgroup_mma(weights, v_smem.index(stage * PARTS + 1), acc_b, is_async=True)
        acc_a, acc_b, weights = warpgroup_mma_wait(0, [acc_a, acc_b, weights])
    else:
        acc_a, weights = warpgroup_mma_wait(0, [acc_a, weights])
    barrier()
    mbarrier.arrive(bars[3].index(stage), count=1)
    return acc_a, acc_b


@gluon.jit
def make_tickets(READERS: gl.constexpr):
    """Returns (units, full, empty): the fetching warp draws the next unit from a counter and passes
    it on."""
    units = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=READERS)
    return units, full, empty


@gluon.jit
def second_unit():
    """The first two units of a program are not drawn: a program with the heaviest unit also gets
    the lightest."""
    return 2 * gl.num_programs(0) - 1 - gl.program_id(0)


@gluon.jit
def draw(counter_ptr):
    return 2 * gl.num_programs(0) + gl.atomic_add(counter_ptr, 1, sem="relaxed", scope="gpu")


@gluon.jit
def hand_on(tickets, turn, unit):
    """Passes a unit on. Called by one warp."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    mbarrier.wait(tickets[2].index(turn % 2), ((turn // 2) & 1) ^ 1)
    tickets[0].index(turn % 2).store(gl.full([1], unit, gl.int32, layout))
    barrier()
    mbarrier.arrive(tickets[1].index(turn % 2), count=1)


@gluon.jit
def take(tickets, turn, WARPS: gl.constexpr):
    """Returns the unit after the next, for WARPS warps; `turn` counts from the program's second
    unit."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    mbarrier.wait(tickets[1].index(turn % 2), (turn // 2) & 1)
    unit = gl.max(tickets[0].index(turn % 2).load(layout), 0)
    barrier()
    mbarrier.arrive(tickets[2].index(turn % 2), count=1)
    return unit


@gluon.jit
def leave(counter_ptr):
    """Resets the counters in the last program that ends."""
    if gl.atomic_add(counter_ptr + 1, 1, sem="acq_rel", scope="gpu") == gl.num_programs(0) - 1:
        gl.store(counter_ptr, 0)
        gl.store(counter_ptr + 1, 0)

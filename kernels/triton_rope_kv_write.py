"""The Triton kernel of `rope_kv_write`: a program rotates some heads of one token and writes them.

Products and sums are rounded one by one, as torch does, so the bits are torch's; with q_norm and
k_norm up to the order in which a head's squares are added. Head sizes that are no power of two are
padded with lanes that load and store nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.rope_write import RopeWrite
from kernels.triton_e4m3 import to_cached
from kernels.triton_launch import OVERLAPS, Launcher, start_dependents, wait_for_inputs
from kernels.triton_lora_heads import is_partial, norm_heads, place_lanes, query_factor

HEADS = 8  # maximum per program; 0.9 us for one token, 1.1 with 16
MANY_HEADS = 16  # for 8192 tokens: 51 us, 61 with 8
MANY_TOKENS = 1024
NUM_WARPS = 4


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"])
def _rope_kv_write_kernel(
    qkv_ptr,  # [T, (Hq + 2 * Hkv) * D]
    cos_sin_ptr,  # [max_positions, 2, TURNING]
    k_cache_ptr,  # [slots, Hkv, D]
    v_cache_ptr,
    q_norm_ptr,
    k_norm_ptr,
    q_ptr,  # [T, Hq, D]
    positions_ptr,
    slots_ptr,
    STRIDE_QKV: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    TURNING: tl.constexpr,
    Q_BETA: tl.constexpr,
    Q_LENGTH: tl.constexpr,
    HAS_NORM: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    token = tl.program_id(1).to(tl.int64)
    heads = (tl.program_id(0) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
    lanes = tl.arange(0, BLOCK_HALF)[None, :]
    in_half = lanes < HALF
    first, gap = place_lanes(lanes, HALF, TURNING)
    turns = in_half
    if is_partial(HALF, TURNING):
        turns = lanes < TURNING
    inside = in_half & (heads < NUM_HEADS + 2 * NUM_KV_HEADS)
    start_dependents(OVERLAPPED)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    position = tl.load(positions_ptr + token).to(tl.int64)
    if TURNING > 0:
        row = cos_sin_ptr + position * (2 * TURNING) + lanes
        cos = tl.load(row, mask=turns, other=0.0)
        sin = tl.load(row + TURNING, mask=turns, other=0.0)
    wait_for_inputs(OVERLAPPED)
    here = qkv_ptr + token * STRIDE_QKV + heads * (2 * HALF) + first
    a = tl.load(here, mask=inside, other=0.0)
    b = tl.load(here + gap, mask=inside, other=0.0)
    is_q = heads < NUM_HEADS
    is_v = heads >= NUM_HEADS + NUM_KV_HEADS
    turning_a, turning_b = a, b
    if HAS_NORM:
        # One load per lane and head: of q's weights or of k's.
        weight_a = tl.load(q_norm_ptr + first + 0 * heads, mask=in_half & is_q, other=0.0)
        weight_b = tl.load(q_norm_ptr + gap + first + 0 * heads, mask=in_half & is_q, other=0.0)
        k_weight_a = tl.load(k_norm_ptr + first + 0 * heads, mask=in_half, other=0.0)
        k_weight_b = tl.load(k_norm_ptr + gap + first + 0 * heads, mask=in_half, other=0.0)
        weight_a = tl.where(is_q, weight_a, k_weight_a)
        weight_b = tl.where(is_q, weight_b, k_weight_b)
        turning_a, turning_b = norm_heads(a, b, weight_a, weight_b, 2 * HALF, EPS)
    if TURNING > 0:
        wide_a, wide_b = turning_a.to(tl.float32), turning_b.to(tl.float32)
        turned_a = tl.where(is_v, a, (wide_a * cos - wide_b * sin).to(a.dtype))
        turned_b = tl.where(is_v, b, (wide_b * cos + wide_a * sin).to(a.dtype))
        if is_partial(HALF, TURNING):
            turned_a = tl.where(turns | is_v, turned_a, turning_a)
            turned_b = tl.where(turns | is_v, turned_b, turning_b)
    else:
        turned_a = tl.where(is_v, a, turning_a)
        turned_b = tl.where(is_v, b, turning_b)
    if Q_BETA != 0.0:
        factor = query_factor(position, Q_BETA, Q_LENGTH)
        turned_a = tl.where(is_q, (turned_a.to(tl.float32) * factor).to(a.dtype), turned_a)
        turned_b = tl.where(is_q, (turned_b.to(tl.float32) * factor).to(a.dtype), turned_b)
    q_there = q_ptr + (token * NUM_HEADS + heads) * (2 * HALF) + first
    tl.store(q_there, turned_a, mask=in_half & is_q)
    tl.store(q_there + gap, turned_b, mask=in_half & is_q)
    # A negative slot marks a padding row of a CUDA graph.
    kv_head = heads - NUM_HEADS - tl.where(is_v, NUM_KV_HEADS, 0)
    kv_there = (slot * NUM_KV_HEADS + kv_head) * (2 * HALF) + first
    is_written = inside & (heads >= NUM_HEADS) & (slot + 0 * heads >= 0)
    cached_a = to_cached(turned_a, k_cache_ptr.dtype.element_ty)
    cached_b = to_cached(turned_b, k_cache_ptr.dtype.element_ty)
    tl.store(k_cache_ptr + kv_there, cached_a, mask=is_written & ~is_v)
    tl.store(k_cache_ptr + kv_there + gap, cached_b, mask=is_written & ~is_v)
    tl.store(v_cache_ptr + kv_there, cached_a, mask=is_written & is_v)
    tl.store(v_cache_ptr + kv_there + gap, cached_b, mask=is_written & is_v)


# Without fusion into multiply-add: torch rounds the product.
_launch = Launcher(_rope_kv_write_kernel, launch_pdl=OVERLAPS, enable_fp_fusion=False)


def launch_rope_kv_write(
    qkv: torch.Tensor,
    write: RopeWrite,  # its positions and slots: copied to the device before the step, by no kernel
) -> torch.Tensor:
    assert write.k_cache.dtype == write.v_cache.dtype
    tokens, half = qkv.shape[0], write.head_dim // 2
    assert tokens < 65536
    q = write.new_q(qkv)
    total = write.num_heads + 2 * write.num_kv_heads
    # The bits of a normed head must not depend on the number of tokens.
    most = MANY_HEADS if tokens >= MANY_TOKENS and not write.has_norm else HEADS
    block = min(most, 1 << (total - 1).bit_length())
    _launch(
        (-(-total // block), tokens, 1),
        (
            qkv,
            write.cos_sin if write.cos_sin is not None else qkv,
            write.k_cache,
            write.v_cache,
            write.q_norm if write.q_norm is not None else qkv,
            write.k_norm if write.k_norm is not None else qkv,
            q,
        ),
        (write.positions, write.slots),
        (
            qkv.stride(0),
            write.num_heads,
            write.num_kv_heads,
            half,
            *write.constants,
            write.has_norm,
            write.eps,
            block,
            1 << (half - 1).bit_length(),
            OVERLAPS,
        ),
        NUM_WARPS,
    )
    return q

"""The shared parts of all RoPE kernels, fused or not: a program's heads, norm and rotation."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.backend import IS_INTERPRETED
from kernels.triton_rms_norm import weigh

if not IS_INTERPRETED:
    from triton.language.extra.cuda import libdevice

_EXACT = tl.constexpr(not IS_INTERPRETED)


@triton.jit
def pick_heads(
    block,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Returns the slice, its heads, the first head of the block in it, and the heads before the
    slice."""
    Q_BLOCKS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    KV_BLOCKS: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    is_k = block >= Q_BLOCKS
    is_v = block >= Q_BLOCKS + KV_BLOCKS
    start = tl.where(is_v, Q_BLOCKS + KV_BLOCKS, tl.where(is_k, Q_BLOCKS, 0))
    return (
        is_k.to(tl.int32) + is_v.to(tl.int32),
        tl.where(is_k, NUM_KV_HEADS, NUM_HEADS),
        (block - start) * HEADS,
        tl.where(is_v, NUM_HEADS + NUM_KV_HEADS, tl.where(is_k, NUM_HEADS, 0)),
    )


@triton.constexpr_function
def is_partial(HALF, TURNING):
    """Returns a constant: of the HALF pairs of a head, TURNING turn, and others do not."""
    return 0 < TURNING < HALF


@triton.jit
def place_lanes(lanes, HALF: tl.constexpr, TURNING: tl.constexpr):
    """Returns the first dimension of each lane's pair and the distance to the second. Pairs that
    turn are in the first lanes; those of the dimensions that stay follow."""
    if not is_partial(HALF, TURNING):
        first = lanes
        gap: tl.constexpr = HALF
    else:
        first = tl.where(lanes < TURNING, lanes, lanes + TURNING)
        gap = tl.where(lanes < TURNING, TURNING, HALF - TURNING)
    return first, gap


@triton.jit
def query_factor(position, BETA: tl.constexpr, LENGTH: tl.constexpr):
    """Computes `QueryScaling.factors`, with the same bits in every kernel."""
    steps = (position // LENGTH).to(tl.float32)
    return 1.0 + rounded_product(tl.log(1.0 + steps), BETA, _EXACT)


@triton.jit
def rounded_product(a, b, EXACT: tl.constexpr):
    """Returns a product that is never fused into a multiply-add: torch rounds it."""
    if EXACT:  # noqa: SIM108  one branch is not compiled
        c = libdevice.mul_rn(a, b)
    else:
        c = a * b
    return c


@triton.jit
def turn(low, high, cos, sin, EXACT: tl.constexpr):
    a, b = low.to(tl.float32), high.to(tl.float32)
    turned_low = rounded_product(a, cos, EXACT) - rounded_product(b, sin, EXACT)
    turned_high = rounded_product(b, cos, EXACT) + rounded_product(a, sin, EXACT)
    return turned_low.to(low.dtype), turned_high.to(low.dtype)


@triton.jit
def turn_lanes(
    low, high, cos, sin, turns, HALF: tl.constexpr, TURNING: tl.constexpr, EXACT: tl.constexpr
):
    """Turns the pairs in the lanes `turns`, which is read where some do not."""
    turned_low, turned_high = turn(low, high, cos, sin, EXACT)
    if is_partial(HALF, TURNING):
        turned_low = tl.where(turns, turned_low, low)
        turned_high = tl.where(turns, turned_high, high)
    return turned_low, turned_high


@triton.jit
def norm_heads(low, high, weight_low, weight_high, HEAD_DIM: tl.constexpr, EPS: tl.constexpr):
    """Applies RMSNorm over the last axis of both halves together."""
    a, b = low.to(tl.float32), high.to(tl.float32)
    squares = tl.sum(a * a + b * b, axis=1)
    inverse = tl.rsqrt(squares / HEAD_DIM + EPS)[:, None]
    normed_low = weigh(a * inverse, weight_low, low.dtype)
    normed_high = weigh(b * inverse, weight_high, low.dtype)
    return normed_low.to(low.dtype), normed_high.to(low.dtype)

"""The Triton kernel of `rms_norm` and `add_rms_norm`: a program normalises a row that it holds
whole.

The sum of two rows is rounded as torch rounds it, bit for bit; the mean of the squares is added up
in another order, so that occasionally a normed value is the neighbour of torch's. The order of a
row's sum depends on its width alone.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from kernels.triton_launch import OVERLAPS, Launcher, start_overlapped

MAX_BLOCK = 65536


@triton.jit
def scale_row(x, SCALE: tl.constexpr):
    """Multiplies in x's type. 1.0 leaves no instruction."""
    if SCALE != 1.0:
        x = (x.to(tl.float32) * SCALE).to(x.dtype)
    return x


@triton.jit
def weigh(normed, weight, dtype: tl.constexpr):
    """Applies the weights of a norm in float32. Weights of the activations' type meet a rounded
    value."""
    if weight.dtype == dtype:
        normed = normed.to(dtype).to(tl.float32)
    return normed * weight.to(tl.float32)


@triton.jit
def norm_row(x, weight, HIDDEN: tl.constexpr, EPS: tl.constexpr):
    wide = x.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, axis=0) / HIDDEN + EPS)
    return weigh(wide * inverse, weight, x.dtype).to(x.dtype)


@triton.jit
def add_and_norm(
    x, residual, there, weight, inside, HIDDEN: tl.constexpr, EPS: tl.constexpr, SCALE: tl.constexpr
):
    """Stores SCALE * x + residual, rounded, at `there` and returns it normed."""
    x = scale_row(x, SCALE)
    x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
    tl.store(there, x, mask=inside)
    return norm_row(x, weight, HIDDEN, EPS)


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,  # becomes SCALE * x + residual
    weight_ptr,
    out_ptr,
    STRIDE_X: tl.constexpr,
    STRIDE_RESIDUAL: tl.constexpr,
    STRIDE_OUT: tl.constexpr,
    HIDDEN: tl.constexpr,
    EPS: tl.constexpr,
    ADDS: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)  # no kernel of a step writes it
    start_overlapped(OVERLAPPED)
    x = tl.load(x_ptr + row * STRIDE_X + columns, mask=inside, other=0.0)
    if ADDS:
        there = residual_ptr + row * STRIDE_RESIDUAL + columns
        residual = tl.load(there, mask=inside, other=0.0)
        normed = add_and_norm(x, residual, there, weight, inside, HIDDEN, EPS, SCALE)
    else:
        normed = norm_row(x, weight, HIDDEN, EPS)
    tl.store(out_ptr + row * STRIDE_OUT + columns, normed, mask=inside)


_launch = Launcher(_rms_norm_kernel, launch_pdl=OVERLAPS)


def launch_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    scale: float = 1.0,
    out: torch.Tensor | None = None,  # may be x
) -> torch.Tensor:
    """Maps x [T, H] to normed [T, H]. `residual` [T, H] becomes scale * x + residual, which is then
    normed."""
    rows, hidden = x.shape
    assert x.stride(1) == 1
    assert hidden <= MAX_BLOCK
    stride_out = hidden if out is None else out.stride(0)
    out = x.new_empty(x.shape) if out is None else out
    adds = residual is not None
    other = residual if residual is not None else x
    block, num_warps = shape_of(hidden)
    _launch(
        (rows, 1, 1),
        (x, other, weight, out),
        (),
        (x.stride(0), other.stride(0), stride_out, hidden, eps, adds, scale, block, OVERLAPS),
        num_warps,
    )
    return out


@functools.cache
def shape_of(hidden: int) -> tuple[int, int]:
    """Returns (block, warps) of a program."""
    block = 1 << (hidden - 1).bit_length()
    return block, min(max(block // 512, 1), 16)

"""The Triton kernel of `norm_add_norm`: a program processes a row that it holds whole.

The squares of a row add up in the order of `rms_norm`, which depends on its width alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton_launch import OVERLAPS, Launcher, start_overlapped
from kernels.triton_rms_norm import MAX_BLOCK, norm_row, shape_of


@triton.jit
def _norm_add_norm_kernel(
    x_ptr,
    residual_ptr,  # becomes norm(x) + residual
    post_ptr,
    next_ptr,
    out_ptr,
    STRIDE_X: tl.constexpr,
    STRIDE_RESIDUAL: tl.constexpr,
    HIDDEN: tl.constexpr,
    EPS: tl.constexpr,
    HAS_NEXT: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    post = tl.load(post_ptr + columns, mask=inside, other=0.0)  # no kernel of a step writes weights
    if HAS_NEXT:
        following = tl.load(next_ptr + columns, mask=inside, other=0.0)
    start_overlapped(OVERLAPPED)
    x = tl.load(x_ptr + row * STRIDE_X + columns, mask=inside, other=0.0)
    there = residual_ptr + row * STRIDE_RESIDUAL + columns
    residual = tl.load(there, mask=inside, other=0.0)
    normed = norm_row(x, post, HIDDEN, EPS)
    total = (residual.to(tl.float32) + normed.to(tl.float32)).to(x.dtype)
    tl.store(there, total, mask=inside)
    if HAS_NEXT:
        out = norm_row(total, following, HIDDEN, EPS)
        tl.store(out_ptr + row * HIDDEN + columns, out, mask=inside)


_launch = Launcher(_norm_add_norm_kernel, launch_pdl=OVERLAPS)


def launch_norm_add_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    post_weight: torch.Tensor,
    next_weight: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """Returns the next block's input [T, H], which is `residual` where no second norm is made."""
    rows, hidden = x.shape
    assert x.stride(1) == 1
    assert residual.stride(1) == 1
    assert hidden <= MAX_BLOCK
    out = residual if next_weight is None else x.new_empty(x.shape)
    block, num_warps = shape_of(hidden)
    _launch(
        (rows, 1, 1),
        (x, residual, post_weight, post_weight if next_weight is None else next_weight, out),
        (),
        (
            x.stride(0),
            residual.stride(0),
            hidden,
            eps,
            next_weight is not None,
            block,
            OVERLAPS,
        ),
        num_warps,
    )
    return out

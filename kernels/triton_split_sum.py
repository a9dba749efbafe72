"""The Triton kernel that adds up a product whose programs had parts of K, in the parts' order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton_launch import OVERLAPS, Launcher, start_dependents, wait_for_inputs

_BLOCK = 1024


@triton.jit(do_not_specialize=["num_tokens"])
def _split_sum_kernel(
    sums_ptr,  # [SPLITS, T, N]
    x_scales_ptr,  # [T]
    w_scales_ptr,  # [N]
    bias_ptr,  # [N]
    y_ptr,  # [T, N]
    num_tokens,
    N: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    start_dependents(OVERLAPPED)
    row = tl.program_id(1).to(tl.int64)
    names = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = names < N
    if HAS_SCALES:
        w_scales = tl.load(w_scales_ptr + names, mask=exists, other=0.0)
    wait_for_inputs(OVERLAPPED)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        acc += tl.load(sums_ptr + (split * num_tokens + row) * N + names, mask=exists, other=0.0)
    if HAS_SCALES:
        acc = acc * tl.load(x_scales_ptr + row) * w_scales
    if HAS_BIAS:
        acc += tl.load(bias_ptr + names, mask=exists, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * N + names, acc.to(y_ptr.dtype.element_ty), mask=exists)


_launch = Launcher(_split_sum_kernel, launch_pdl=OVERLAPS)


def add_splits(
    sums: torch.Tensor,  # [splits, T, N] float32
    bias: torch.Tensor | None,  # [N]
    y: torch.Tensor,  # [T, N]
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Writes the sums of the parts, times the scales of the rows [T] and of the outputs [N], plus
    the bias to y."""
    splits, num_tokens, height = sums.shape
    unused = y  # an address that no load has
    _launch(
        (-(-height // _BLOCK), num_tokens, 1),
        (sums, *(scales or (unused, unused)), unused if bias is None else bias, y),
        (),
        (num_tokens, height, scales is not None, bias is not None, splits, _BLOCK, OVERLAPS),
        4,
    )

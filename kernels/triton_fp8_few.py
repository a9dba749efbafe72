"""The Triton kernel of an FP8 `linear` for few rows, the shrink beside it as in
`triton_linear_few`: a walk over the weight, bound by its bytes, of which e4m3 has half as many.

e4m3 becomes float16 in registers, which holds each of its values, and the products of the tensor
cores are exact; sums are float32. On Hopper `mma` has no e4m3, and the wide product that has would
read 64 rows of the weight at a time. Tokens do not meet in any sum and programs do not split K, so
a token's bits depend neither on the number of tokens nor on adapters.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.backend import IS_INTERPRETED
from kernels.e4m3 import E4m3Rows
from kernels.few_rows import FEW_ROWS
from kernels.triton_launch import OVERLAPS, Launcher, start_dependents, wait_for_inputs
from kernels.triton_linear_few import (
    BLOCK_K,
    BLOCK_N,
    SPLIT,
    STAGES,
    ShrinkBeside,
    no_shrink,
    shrink_unit,
)
from kernels.triton_lora_tiles import page_dot

WIDE_K = 256  # columns of a warp at a time: as many bytes as `triton_linear_few` reads


@triton.jit
def _walk_e4m3(
    w_at, x_at, height, live, columns, WIDTH: tl.constexpr, IS_FULL: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
    STAGES: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Returns [BLOCK_N, ROWS] float32: `height` rows of a weight times those of x. IS_FULL: all
    rows exist."""
    IS_EVEN: tl.constexpr = WIDTH % (SPLIT * BLOCK_K) == 0
    acc = tl.zeros([SPLIT, BLOCK_N, ROWS], dtype=tl.float32)
    exists = (tl.arange(0, BLOCK_N) < height)[None, :, None]
    for k in tl.range(0, WIDTH, SPLIT * BLOCK_K, num_stages=STAGES):
        x_mask = live[None, None, :]
        if not IS_EVEN:
            x_mask = x_mask & (columns < WIDTH - k)[:, :, None]
        x = tl.load(x_at + k, mask=x_mask, other=0.0)  # [SPLIT, BLOCK_K, ROWS]
        if IS_EVEN and IS_FULL:
            w = tl.load(w_at + k)  # [SPLIT, BLOCK_N, BLOCK_K]
        elif IS_EVEN:
            w = tl.load(w_at + k, mask=exists, other=0.0)
        else:
            w = tl.load(w_at + k, mask=exists & (columns < WIDTH - k)[:, None, :], other=0.0)
        acc = page_dot(w, x, acc, tl.float16, UPCAST)
    return tl.sum(acc, axis=0)


@triton.jit(
    do_not_specialize=["num_tokens", "shrinks", "chunk"],
    do_not_specialize_on_alignment=["header_ptr", "units_ptr", "entries_ptr"],
)
def _fp8_few_kernel(
    x_ptr,  # [T, K], for the shrink
    values_ptr,  # [T, K] e4m3, of x
    x_scales_ptr,  # [T]
    w_ptr,  # [N, K] e4m3
    w_scales_ptr,  # [N]
    bias_ptr,  # [N]
    y_ptr,  # [T, N]
    heap_ptr,
    planes_ptr,  # [chunks, slices, rank pages, rows of small tiles, PAGE]
    header_ptr,
    units_ptr,
    entries_ptr,  # of A, [pages, slices], STRIDE apart
    num_tokens,
    shrinks,  # programs along the units, for each slice and chunk
    chunk,  # columns of x that a program of the shrink walks
    K: tl.constexpr,
    N: tl.constexpr,
    STRIDE_X: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_LORA: tl.constexpr,
    STRIDE: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDE_K: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    UPCAST: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    start_dependents(OVERLAPPED)
    program = tl.program_id(0)
    base = program
    if HAS_LORA:
        num_chunks = tl.cdiv(K, chunk)
        base = program - shrinks * NUM_SLICES * num_chunks
    if base >= 0:
        lanes, offsets = tl.arange(0, BLOCK_N), tl.arange(0, ROWS)
        first = base * BLOCK_N
        names = first + lanes
        live = offsets < num_tokens
        # A warp walks every SPLITth block of columns.
        columns = tl.arange(0, SPLIT)[:, None] * WIDE_K + tl.arange(0, WIDE_K)[None, :]
        w_at = w_ptr + first.to(tl.int64) * K + lanes[None, :, None] * K + columns[:, None, :]
        x_at = values_ptr + offsets[None, None, :] * K + columns[:, :, None]
        w_scales = tl.load(w_scales_ptr + names, mask=names < N, other=0.0)
        wait_for_inputs(OVERLAPPED)
        acc = _walk_e4m3(
            w_at, x_at, N - first, live, columns, K, N % BLOCK_N == 0, ROWS, BLOCK_N, WIDE_K,
            SPLIT, STAGES, UPCAST,
        )  # fmt: skip
        x_scales = tl.load(x_scales_ptr + offsets, mask=live, other=0.0)
        acc = acc * x_scales[None, :] * w_scales[:, None]
        if HAS_BIAS:
            acc += tl.load(bias_ptr + names, mask=names < N, other=0.0).to(tl.float32)[:, None]
        y_at = y_ptr + offsets[None, :] * N + names[:, None]
        mask = live[None, :] & (names < N)[:, None]
        tl.store(y_at, acc.to(y_ptr.dtype.element_ty), mask=mask)
    elif HAS_LORA:
        shrink_unit(
            x_ptr, heap_ptr, planes_ptr, header_ptr, units_ptr, entries_ptr, program, shrinks,
            chunk, num_chunks, K, STRIDE_X, STRIDE, NUM_SLICES, ROWS, BLOCK_K, SPLIT, STAGES,
            UPCAST, OVERLAPPED,
        )  # fmt: skip


_launch = Launcher(_fp8_few_kernel, launch_pdl=OVERLAPS)


def launch_fp8_few(
    x: torch.Tensor,
    rows: E4m3Rows,
    weight: E4m3Rows,
    bias: torch.Tensor | None,
    shrink: ShrinkBeside | None = None,
) -> torch.Tensor:
    """Maps x [T, K] and the same quantised to y [T, N], T at most FEW_ROWS. The shrink beside it is
    of x as it was before it was quantised."""
    assert x.stride(1) == 1
    assert weight.values.is_contiguous()
    height, width = weight.shape
    y = x.new_empty((x.shape[0], height))
    shrink = shrink or no_shrink(x, y)
    quantised = (rows.values, rows.scales, weight.values, weight.scales)
    _launch(
        (shrink.num_programs + -(-height // BLOCK_N), 1, 1),
        (x, *quantised, weight.scales if bias is None else bias, y, *shrink.tensors[:2]),
        shrink.tensors[2:],
        (
            *shrink.lengths,
            width,
            height,
            x.stride(0),
            bias is not None,
            *shrink.constants,
            FEW_ROWS,
            BLOCK_N,
            BLOCK_K,
            WIDE_K,
            SPLIT,
            STAGES,
            IS_INTERPRETED,
            OVERLAPS,
        ),
        SPLIT,
    )
    return y

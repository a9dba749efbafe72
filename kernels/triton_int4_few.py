"""The Triton kernel of a 4-bit `linear` for few rows on machines other than Hopper, the shrink
beside it as in `triton_linear_few`: a walk over the weight, bound by its bytes.

Integers become floats of 16 bits in registers, exactly, and meet the activations on the tensor
cores; the sum of a group, float32, is multiplied by its scale. So no weight is rounded,
and the work for a weight is that of unpacking it. Tokens do not meet in any sum, the warps of a
program split K and programs do not, so a token's bits depend neither on the number of tokens nor on
adapters.

A program has 32 rows: with 16, eight tokens would be read from the second-level cache at twice the
bytes of the weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.backend import IS_INTERPRETED
from kernels.few_rows import FEW_ROWS
from kernels.int4 import Int4Rows
from kernels.triton_int4 import pointers, read_scales, read_zeros, thread_order, unpack_pair
from kernels.triton_launch import OVERLAPS, Launcher, start_dependents, wait_for_inputs
from kernels.triton_linear_few import SHORT_CHUNK, ShrinkBeside, no_shrink, shrink_unit

WALKED = 128  # bytes of a row that a warp reads at a time


@dataclass(frozen=True, slots=True)
class FewTile:
    """The tile of a program: rows of the weight, warps, each with pairs of groups of its own, and
    stages of the pipeline. The bits of a product depend on the warps alone."""

    block_n: int
    num_warps: int
    stages: int


TILE = FewTile(32, 4, 2)  # 33 KB of shared memory


@triton.jit
def _walk_int4(
    values_ptr, scales_ptr, zeros_ptr, x_at, first, live, K: tl.constexpr, N: tl.constexpr,
    GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, IN_HALF: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Returns [BLOCK_N, ROWS] float32: the rows of the weight from `first` on, times those of x.
    x_at: [PARTS, GROUP, ROWS], the columns of the first pairs' even groups. PARTS: pairs of groups
    at a time."""
    TYPE: tl.constexpr = x_at.dtype.element_ty
    PAIRS: tl.constexpr = (K + 2 * GROUP - 1) // (2 * GROUP)
    IS_EVEN: tl.constexpr = K % (2 * GROUP * PARTS) == 0
    parts, places = tl.arange(0, PARTS), tl.arange(0, GROUP)
    names = first + tl.arange(0, BLOCK_N)
    row = first.to(tl.int64) * PAIRS + tl.arange(0, BLOCK_N)[None, :] * PAIRS + parts[:, None]
    w_at = values_ptr + row[:, :, None] * GROUP + places[None, None, :]
    scales_at = scales_ptr + parts[:, None] * N + names[None, :]
    acc = tl.zeros([PARTS, BLOCK_N, ROWS], dtype=tl.float32)
    for done in tl.range(0, PAIRS, PARTS, num_stages=STAGES):
        pair = done + parts
        exists = (names < N)[None, :] & (pair < PAIRS)[:, None]
        x_mask = live[None, None, :]
        x_mask_1 = x_mask
        if not IS_EVEN:
            column = pair[:, None] * (2 * GROUP) + places[None, :]
            x_mask_1 = x_mask & (column + GROUP < K)[:, :, None]
            x_mask = x_mask & (column < K)[:, :, None]
        x_0 = tl.load(x_at + done * (2 * GROUP), mask=x_mask, other=0.0)
        x_1 = tl.load(x_at + (done * (2 * GROUP) + GROUP), mask=x_mask_1, other=0.0)
        if IS_EVEN and N % BLOCK_N == 0:
            w = tl.load(w_at + done * GROUP)
        else:
            w = tl.load(w_at + done * GROUP, mask=exists[:, :, None], other=0)
        scale_0, scale_1 = read_scales(scales_at + done * N, exists, IN_HALF)
        zero_0 = tl.full([PARTS, BLOCK_N], 8.0, tl.float32)
        zero_1 = zero_0
        if HAS_ZEROS:
            zeros_at = zeros_ptr + (pair // 4)[:, None] * N + names[None, :]
            zero_0, zero_1 = read_zeros(zeros_at, pair[:, None], exists)
        low, high = unpack_pair(w, zero_0[:, :, None], zero_1[:, :, None], TYPE, UPCAST)
        acc += _dot(low, thread_order(x_0), UPCAST) * scale_0[:, :, None]
        acc += _dot(high, thread_order(x_1), UPCAST) * scale_1[:, :, None]
    return tl.sum(acc, axis=0)


@triton.jit
def _dot(w, x, UPCAST: tl.constexpr):
    if UPCAST:
        return tl.dot(w.to(tl.float32), x.to(tl.float32), input_precision="ieee")
    return tl.dot(w, x)


@triton.jit(
    do_not_specialize=["num_tokens", "shrinks", "chunk"],
    do_not_specialize_on_alignment=["header_ptr", "units_ptr", "entries_ptr"],
)
def _int4_few_kernel(
    x_ptr,  # [T, K], for the shrink
    sorted_ptr,  # [T, K], with columns in the order of the weight's
    values_ptr,  # [N, pairs * GROUP]
    scales_ptr,  # [pairs, N] words
    zeros_ptr,  # [words, N]
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
    STRIDE_SORTED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_LORA: tl.constexpr,
    STRIDE: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    IN_HALF: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
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
        offsets = tl.arange(0, ROWS)
        first = base * BLOCK_N
        names = first + tl.arange(0, BLOCK_N)
        live = offsets < num_tokens
        columns = tl.arange(0, PARTS)[:, None] * (2 * GROUP) + tl.arange(0, GROUP)[None, :]
        x_at = sorted_ptr + offsets[None, None, :] * STRIDE_SORTED + columns[:, :, None]
        wait_for_inputs(OVERLAPPED)
        acc = _walk_int4(
            values_ptr, scales_ptr, zeros_ptr, x_at, first, live, K, N, GROUP, HAS_ZEROS, IN_HALF,
            ROWS, BLOCK_N, PARTS, STAGES, UPCAST,
        )  # fmt: skip
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


_launch = Launcher(_int4_few_kernel, launch_pdl=OVERLAPS)


def launch_int4_few(
    x: torch.Tensor,
    rows: torch.Tensor,
    weight: Int4Rows,
    bias: torch.Tensor | None,
    tile: FewTile = TILE,
    shrink: ShrinkBeside | None = None,
) -> torch.Tensor:
    """Maps x [T, K], and the same with columns in the order of the weight's, to y [T, N], T at most
    FEW_ROWS. The shrink beside it is of x."""
    assert x.stride(1) == 1
    assert rows.stride(1) == 1
    height, width = weight.shape
    y = x.new_empty((x.shape[0], height))
    shrink = shrink or no_shrink(x, y)
    values, scales, zeros = pointers(weight)
    warps = tile.num_warps
    _launch(
        (shrink.num_programs + -(-height // tile.block_n), 1, 1),
        (x, rows, values, scales, zeros, scales if bias is None else bias, y, *shrink.tensors[:2]),
        shrink.tensors[2:],
        (
            *shrink.lengths,
            width,
            height,
            x.stride(0),
            rows.stride(0),
            bias is not None,
            *shrink.constants,
            weight.group_size,
            weight.zeros is not None,
            weight.scales.dtype == torch.float16,
            FEW_ROWS,
            tile.block_n,
            warps * WALKED // weight.group_size,
            SHORT_CHUNK // warps,
            warps,
            tile.stages,
            IS_INTERPRETED,
            OVERLAPS,
        ),
        warps,
    )
    return y

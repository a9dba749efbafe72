"""The Triton kernel of a 4-bit `linear` for 9 to 128 rows on machines other than Hopper.

The tensor cores' tall side is the weight, the tokens, 64 at most in a tile, are the narrow one. A
program has 64 rows of the weight; its warps have 16 of their own, one batch of a dot over rows, and
share the activations. With 32 rows a warp, whose activations are half as many bytes of the
second-level cache, registers are short: 116 us for the four products of a layer of Llama-3-8B with
32 tokens on an H200, 93 with 16 rows, 123 in bfloat16.

Narrow outputs have too few programs to fill the device; they split K into SPLITS parts, whose sums
a second launch adds up in their order. The parts follow the shape of the weight, so that a row's
sums have one order for any number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.backend import IS_INTERPRETED, is_hopper
from kernels.int4 import Int4Rows
from kernels.triton_int4 import (
    pointers,
    read_scales,
    read_zeros,
    thread_order,
    unpack_pair,
)
from kernels.triton_launch import OVERLAPS, Launcher, start_dependents, wait_for_inputs
from kernels.triton_split_sum import add_splits

MAX_TILE = 64  # tokens
_FILLING = 132  # programs: one for each multiprocessor of an H100
_MAX_SPLITS = 8
_LEAST_COLUMNS = 512  # of a split


@dataclass(frozen=True, slots=True)
class MidTile:
    """The tile of a program."""

    rows: int  # of the weight, of a warp
    num_warps: int
    stages: int  # of the pipeline
    step: int = 64  # columns of a group at a time: the fragments of 64 tokens are 64 registers


@triton.jit(do_not_specialize=["num_tokens"])
def _int4_mid_kernel(
    x_ptr,  # [T, K], columns in the order of the weight's
    values_ptr,  # [N, pairs * GROUP]
    scales_ptr,  # [pairs, N] words
    zeros_ptr,  # [words, N]
    bias_ptr,  # [N]
    y_ptr,  # [T, N]; with SPLITS [SPLITS, T, N] float32
    num_tokens,
    K: tl.constexpr,
    N: tl.constexpr,
    STRIDE_X: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    IN_HALF: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    WARPS: tl.constexpr,
    SPLITS: tl.constexpr,
    PART: tl.constexpr,  # pairs of a split
    STEP: tl.constexpr,  # columns of a group at a time
    STAGES: tl.constexpr,
    UPCAST: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    PAIRS: tl.constexpr = (K + 2 * GROUP - 1) // (2 * GROUP)
    TYPE: tl.constexpr = x_ptr.dtype.element_ty
    start_dependents(OVERLAPPED)
    split = tl.program_id(2)
    tokens, places = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, STEP)
    names = tl.program_id(1) * (WARPS * ROWS) + tl.arange(0, WARPS * ROWS)
    names = tl.reshape(names, [WARPS, ROWS])
    live, exists = tokens < num_tokens, names < N
    w_at = values_ptr + (names.to(tl.int64) * PAIRS * GROUP)[:, :, None] + places
    x_at = x_ptr + tokens[None, :].to(tl.int64) * STRIDE_X + places[:, None]
    wait_for_inputs(OVERLAPPED)
    acc = tl.zeros([WARPS, ROWS, TILE], dtype=tl.float32)
    STEPS: tl.constexpr = GROUP // STEP  # of a pair
    end = tl.minimum((split + 1) * PART, PAIRS) * STEPS
    for step in tl.range(split * PART * STEPS, end, num_stages=STAGES):
        pair = step // STEPS
        column = (step + pair * STEPS) * STEP  # of the even group
        mask_0, mask_1 = live[None, :], live[None, :]
        if K % (2 * GROUP) != 0:
            mask_0 = mask_0 & (column + places < K)[:, None]
            mask_1 = mask_1 & (column + GROUP + places < K)[:, None]
        x_0 = tl.load(x_at + column, mask=mask_0, other=0.0)
        x_1 = tl.load(x_at + (column + GROUP), mask=mask_1, other=0.0)
        if N % (WARPS * ROWS) == 0:
            w = tl.load(w_at + step * STEP)
        else:
            w = tl.load(w_at + step * STEP, mask=exists[:, :, None], other=0)
        scale_0, scale_1 = read_scales(scales_ptr + pair * N + names, exists, IN_HALF)
        zero_0 = tl.full(names.shape, 8.0, tl.float32)
        zero_1 = zero_0
        if HAS_ZEROS:
            zero_0, zero_1 = read_zeros(zeros_ptr + pair // 4 * N + names, pair, exists)
        low, high = unpack_pair(w, zero_0[:, :, None], zero_1[:, :, None], TYPE, UPCAST)
        acc += _dot(low, x_0, UPCAST) * scale_0[:, :, None]
        acc += _dot(high, x_1, UPCAST) * scale_1[:, :, None]
    if SPLITS == 1:
        if HAS_BIAS:
            bias = tl.load(bias_ptr + names, mask=exists, other=0.0).to(tl.float32)
            acc += bias[:, :, None]
    else:
        y_ptr += split.to(tl.int64) * num_tokens * N
    at = y_ptr + tokens.to(tl.int64) * N + names[:, :, None]
    mask = live & exists[:, :, None]
    tl.store(at, acc.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _dot(w, x, UPCAST: tl.constexpr):
    """Multiplies w [warps, rows, k] by x [k, tokens]."""
    WARPS: tl.constexpr = w.shape[0]
    x = tl.broadcast_to(x[None, :, :], [WARPS, x.shape[0], x.shape[1]])
    x = thread_order(x)
    if UPCAST:
        return tl.dot(w.to(tl.float32), x.to(tl.float32), input_precision="ieee")
    return tl.dot(w, x)


_launch_product = Launcher(_int4_mid_kernel, launch_pdl=OVERLAPS)


def launch_int4_mid(
    x: torch.Tensor,  # [T, K], columns in the order of the weight's
    weight: Int4Rows,
    bias: torch.Tensor | None,
    tile: MidTile | None = None,
    splits: int | None = None,  # parts of K; None: the result of `splits_for`
) -> torch.Tensor:
    """Returns y [T, N] in x's type."""
    (num_tokens, width), height = x.shape, weight.shape[0]
    assert x.stride(1) == 1
    lanes = min(MAX_TILE, max(16, 1 << (num_tokens - 1).bit_length()))  # tokens of a tile
    tile = tile or tile_for(on_hopper=is_hopper(x))
    splits = splits or splits_for(height, width)
    y = x.new_empty((num_tokens, height))
    sums = y
    if splits > 1:
        shape = (splits, num_tokens, height)
        sums = torch.empty(shape, dtype=torch.float32, device=x.device)
    values, scales, zeros = pointers(weight)
    offsets = y if bias is None else bias
    pairs = weight.scales.shape[0]
    _launch_product(
        (-(-num_tokens // lanes), -(-height // (tile.rows * tile.num_warps)), splits),
        (x, values, scales, zeros, offsets, sums),
        (),
        (
            num_tokens,
            width,
            height,
            x.stride(0),
            bias is not None and splits == 1,
            weight.group_size,
            weight.zeros is not None,
            weight.scales.dtype == torch.float16,
            lanes,
            tile.rows,
            tile.num_warps,
            splits,
            -(-pairs // splits),
            min(weight.group_size, tile.step),
            tile.stages,
            IS_INTERPRETED,
            OVERLAPS,
        ),
        tile.num_warps,
    )
    if splits > 1:
        add_splits(sums, bias, y)
    return y


def tile_for(*, on_hopper: bool) -> MidTile:
    """Returns the tile; four stages need up to 110 KB of shared memory."""
    return MidTile(16, 4, 4 if on_hopper else 3)


def splits_for(height: int, width: int) -> int:
    """Returns the parts of K: as many programs as fill the device, each with enough columns."""
    programs = -(-height // 128)
    splits = _MAX_SPLITS
    while splits > 1 and (splits * programs > 2 * _FILLING or width < splits * _LEAST_COLUMNS):
        splits //= 2
    return splits

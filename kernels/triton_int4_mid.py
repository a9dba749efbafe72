"""The Triton kernel of a 4-bit `linear` for 9 to 128 rows.

The tensor cores' tall side is the weight, the tokens, 64 at most in a tile, are the narrow one. A
program has 64 rows of the weight; its warps have 16 of their own, one batch of a dot over rows, and
share the activations. With 32 rows a warp, whose activations are half as many bytes of the
second-level cache, registers are short: 116 us for the four products of a layer of Llama-3-8B with
32 tokens on an H200, 93 with 16 rows, 123 in bfloat16. A dot of two
dimensions (`MidTile.is_wide`) is Hopper's wide product with its left side in registers: a quarter
fewer instructions for 64 tokens, but ptxas before 13.3 can compile it wrongly in a pipelined loop,
so no tile of `tile_for` has it.

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
from kernels.triton_int4 import pointers, read_scales, read_zeros, unpack_pair
from kernels.triton_launch import OVERLAPS, Launcher, start_dependents, wait_for_inputs

MAX_TILE = 64  # tokens
_FILLING = 132  # programs: one for each multiprocessor of an H100
_MAX_SPLITS = 8
_LEAST_COLUMNS = 512  # of a split
_SUM_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class MidTile:
    """The tile of a program."""

    rows: int  # of the weight, of a warp
    num_warps: int
    stages: int  # of the pipeline
    step: int = 64  # columns of a group at a time: the fragments of 64 tokens are 64 registers
    is_wide: bool = False  # a dot of two dimensions over all rows, on Hopper the wide product


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
    WIDE: tl.constexpr,
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
    if not WIDE:
        names = tl.reshape(names, [WARPS, ROWS])
    live, exists = tokens < num_tokens, names < N
    w_at = values_ptr + _behind(names.to(tl.int64) * PAIRS * GROUP, WIDE) + places
    x_at = x_ptr + tokens[None, :].to(tl.int64) * STRIDE_X + places[:, None]
    wait_for_inputs(OVERLAPPED)
    if WIDE:
        acc = tl.zeros([WARPS * ROWS, TILE], dtype=tl.float32)
    else:
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
            w = tl.load(w_at + step * STEP, mask=_behind(exists, WIDE), other=0)
        scale_0, scale_1 = read_scales(scales_ptr + pair * N + names, exists, IN_HALF)
        zero_0 = tl.full(names.shape, 8.0, tl.float32)
        zero_1 = zero_0
        if HAS_ZEROS:
            zero_0, zero_1 = read_zeros(zeros_ptr + pair // 4 * N + names, pair, exists)
        zero_0, zero_1 = _behind(zero_0, WIDE), _behind(zero_1, WIDE)
        low, high = unpack_pair(w, zero_0, zero_1, TYPE, UPCAST)
        acc += _dot(low, x_0, WARPS, STEP, TILE, WIDE, UPCAST) * _behind(scale_0, WIDE)
        acc += _dot(high, x_1, WARPS, STEP, TILE, WIDE, UPCAST) * _behind(scale_1, WIDE)
    if SPLITS == 1:
        if HAS_BIAS:
            bias = tl.load(bias_ptr + names, mask=exists, other=0.0).to(tl.float32)
            acc += _behind(bias, WIDE)
    else:
        y_ptr += split.to(tl.int64) * num_tokens * N
    at = y_ptr + tokens.to(tl.int64) * N + _behind(names, WIDE)
    mask = live & _behind(exists, WIDE)
    tl.store(at, acc.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _behind(values, WIDE: tl.constexpr):
    """Returns the values of rows with one more dimension behind."""
    return tl.expand_dims(values, 1 if WIDE else 2)


@triton.jit
def _dot(
    w, x, WARPS: tl.constexpr, STEP: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    if not WIDE:
        x = tl.broadcast_to(x[None, :, :], [WARPS, STEP, TILE])
    if UPCAST:
        return tl.dot(w.to(tl.float32), x.to(tl.float32), input_precision="ieee")
    return tl.dot(w, x)


@triton.jit(do_not_specialize=["num_tokens"])
def _int4_sum_kernel(
    sums_ptr,  # [SPLITS, T, N]
    bias_ptr,  # [N]
    y_ptr,  # [T, N]
    num_tokens,
    N: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    start_dependents(OVERLAPPED)
    row = tl.program_id(1).to(tl.int64)
    names = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = names < N
    wait_for_inputs(OVERLAPPED)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        acc += tl.load(sums_ptr + (split * num_tokens + row) * N + names, mask=exists, other=0.0)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + names, mask=exists, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * N + names, acc.to(y_ptr.dtype.element_ty), mask=exists)


_launch_product = Launcher(_int4_mid_kernel, launch_pdl=OVERLAPS)
_launch_sum = Launcher(_int4_sum_kernel, launch_pdl=OVERLAPS)


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
            tile.is_wide,
            tile.stages,
            IS_INTERPRETED,
            OVERLAPS,
        ),
        tile.num_warps,
    )
    if splits > 1:
        _launch_sum(
            (-(-height // _SUM_BLOCK), num_tokens, 1),
            (sums, offsets, y),
            (),
            (num_tokens, height, bias is not None, splits, _SUM_BLOCK, OVERLAPS),
            4,
        )
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

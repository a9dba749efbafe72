"""The Triton kernel of an FP8 `linear` for 9 to 128 rows, where cuBLAS leaves half of the
bandwidth.

The tensor cores' tall side is the weight, the tokens are its narrow one: all of them in one tile,
so that a program reads its rows of the weight once. Narrow outputs have too few programs to fill
the device; they split K into SPLITS parts, whose sums a second launch adds up in their order.
Hopper's e4m3 products keep 14 bits of a sum: after each block of columns it is added to one in
float32.

The number of splits follows the shape of the weight and blocks are as long for any number of rows,
so that a row's sums have one order from 9 rows to 128.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.backend import IS_INTERPRETED
from kernels.e4m3 import E4m3Rows
from kernels.triton_launch import OVERLAPS, Launcher, start_dependents, wait_for_inputs
from kernels.triton_split_sum import add_splits

MAX_ROWS = 128
BLOCK_K = 128
_FILLING = 264  # programs: two for each multiprocessor of an H100
_MAX_SPLITS = 4


@dataclass(frozen=True, slots=True)
class MidTile:
    """The tile of a program: `block_n` rows of the weight, and the stages of its pipeline."""

    block_n: int
    stages: int
    num_warps: int
    splits: int | None = None  # parts of K; None: the result of `splits_for`


@triton.jit(do_not_specialize=["num_tokens"])
def _fp8_mid_kernel(
    values_ptr,  # [T, K] e4m3
    x_scales_ptr,  # [T]
    w_ptr,  # [N, K] e4m3
    w_scales_ptr,  # [N]
    bias_ptr,  # [N]
    y_ptr,  # [T, N]; with SPLITS [SPLITS, T, N] float32, sums without scales
    num_tokens,
    K: tl.constexpr,
    N: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    PART: tl.constexpr,  # columns of a split, whole blocks
    STAGES: tl.constexpr,
    UPCAST: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    start_dependents(OVERLAPPED)
    split = tl.program_id(1)
    names = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens, columns = tl.arange(0, ROWS), tl.arange(0, BLOCK_K)
    live, exists = tokens < num_tokens, names < N
    begin = split * PART
    end = tl.minimum(begin + PART, K)
    w_at = w_ptr + names[:, None].to(tl.int64) * K + columns[None, :]
    x_at = values_ptr + tokens[None, :] * K + columns[:, None]
    w_scales = tl.load(w_scales_ptr + names, mask=exists, other=0.0)
    wait_for_inputs(OVERLAPPED)
    acc = tl.zeros([BLOCK_N, ROWS], dtype=tl.float32)
    for k in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
        w_mask, x_mask = exists[:, None], live[None, :]
        if K % BLOCK_K != 0:
            w_mask = w_mask & (columns < K - k)[None, :]
            x_mask = x_mask & (columns < K - k)[:, None]
        if N % BLOCK_N == 0 and K % BLOCK_K == 0:
            w = tl.load(w_at + k)
        else:
            w = tl.load(w_at + k, mask=w_mask, other=0.0)
        x = tl.load(x_at + k, mask=x_mask, other=0.0)
        if UPCAST:
            acc = tl.dot(w.to(tl.float32), x.to(tl.float32), acc, input_precision="ieee")
        else:
            acc = tl.dot(w, x, acc, max_num_imprecise_acc=BLOCK_K)
    if SPLITS == 1:
        x_scales = tl.load(x_scales_ptr + tokens, mask=live, other=0.0)
        acc = acc * x_scales[None, :] * w_scales[:, None]
        if HAS_BIAS:
            acc += tl.load(bias_ptr + names, mask=exists, other=0.0).to(tl.float32)[:, None]
    else:
        y_ptr += split.to(tl.int64) * num_tokens * N
    y = tl.trans(acc).to(y_ptr.dtype.element_ty)
    at = y_ptr + tokens[:, None] * N + names[None, :]
    tl.store(at, y, mask=live[:, None] & exists[None, :])


_launch_product = Launcher(_fp8_mid_kernel, launch_pdl=OVERLAPS)


def launch_fp8_mid(
    rows: E4m3Rows,
    weight: E4m3Rows,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    tile: MidTile | None = None,
) -> torch.Tensor:
    """Maps quantised rows [T, K] to y [T, N] of `dtype`, T at most MAX_ROWS."""
    (num_tokens, width), height = rows.shape, weight.shape[0]
    assert num_tokens <= MAX_ROWS
    assert weight.values.is_contiguous()
    lanes = max(16, 1 << (num_tokens - 1).bit_length())  # tokens of a tile
    tile = tile or tile_for(lanes)
    splits = tile.splits or splits_for(height, width)
    y = torch.empty((num_tokens, height), dtype=dtype, device=rows.device)
    sums = y
    if splits > 1:
        shape = (splits, num_tokens, height)
        sums = torch.empty(shape, dtype=torch.float32, device=rows.device)
    offsets = weight.scales if bias is None else bias
    _launch_product(
        (-(-height // tile.block_n), splits, 1),
        (rows.values, rows.scales, weight.values, weight.scales, offsets, sums),
        (),
        (
            num_tokens,
            width,
            height,
            bias is not None and splits == 1,
            lanes,
            tile.block_n,
            BLOCK_K,
            splits,
            -(-width // (splits * BLOCK_K)) * BLOCK_K,
            tile.stages,
            IS_INTERPRETED,
            OVERLAPS,
        ),
        tile.num_warps,
    )
    if splits > 1:
        add_splits(sums, bias, y, (rows.scales, weight.scales))
    return y


def tile_for(lanes: int) -> MidTile:
    return MidTile(64, 5 if lanes <= 64 else 4, 4)


def splits_for(height: int, width: int) -> int:
    """Returns the parts of K: of programs no more than fill the device, of columns no fewer than
    eight blocks a part."""
    programs = -(-height // 64)
    splits = _MAX_SPLITS
    while splits > 1 and (splits * programs > _FILLING or width < splits * 8 * BLOCK_K):
        splits //= 2
    return splits

"""The Triton kernel of `quantize_rows`: a program quantises a row that it holds whole.

Quotients are rounded exactly, so that scales and values are those of the reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.backend import IS_INTERPRETED
from kernels.triton_launch import OVERLAPS, Launcher, start_overlapped
from kernels.triton_rms_norm import MAX_BLOCK, shape_of

_LARGEST = tl.constexpr(448.0)
_SMALLEST = tl.constexpr(2.0**-100)
_EXACT = tl.constexpr(not IS_INTERPRETED)


@triton.jit
def _quotient(dividend, divisor, EXACT: tl.constexpr):
    if EXACT:
        return tl.div_rn(dividend, divisor)
    return dividend / divisor


@triton.jit
def to_e4m3(x, EXACT: tl.constexpr):
    """Rounds x [...] float32, at most 448, to the nearest e4m3."""
    if not EXACT:
        # The interpreter's own cast loses the carry of 1.97 to 2. The sum with a number that many
        # times larger rounds to the bits that e4m3 has.
        leading = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        much = tl.maximum(leading, 2.0**-6) * (1.5 * 2**20)
        x = (x + much) - much
    return x.to(tl.float8e4nv)


@triton.jit
def to_cached(x, TYPE: tl.constexpr):
    """Rounds keys or values x [...] to the type of their cache: in e4m3, magnitudes above 448
    become 448. NaN stays NaN, and infinity becomes NaN: an overflow shows, as in other types."""
    if tl.float8e4nv == TYPE:
        x = x.to(tl.float32)
        x = tl.where(tl.abs(x) == float("inf"), float("nan"), x)
        if not _EXACT:  # a device's cast saturates by itself
            x = tl.where(x > _LARGEST, _LARGEST, tl.where(x < -_LARGEST, -_LARGEST, x))
        return to_e4m3(x, _EXACT)
    return x.to(TYPE)


@triton.jit
def row_scale(wide, EXACT: tl.constexpr):
    """Returns the factor by which a row [BLOCK] float32 becomes at most 448, and its scale."""
    largest = tl.maximum(tl.max(tl.abs(wide), axis=0), _SMALLEST)
    return _quotient(_LARGEST, largest, EXACT), _quotient(largest, _LARGEST, EXACT)


@triton.jit
def _quantize_rows_kernel(
    x_ptr,  # [T, K]
    values_ptr,  # [T, K] e4m3
    scales_ptr,  # [T]
    STRIDE_X: tl.constexpr,
    WIDTH: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    start_overlapped(OVERLAPPED)
    wide = tl.load(x_ptr + row * STRIDE_X + columns, mask=inside, other=0.0).to(tl.float32)
    factor, scale = row_scale(wide, EXACT)
    tl.store(values_ptr + row * WIDTH + columns, to_e4m3(wide * factor, EXACT), mask=inside)
    tl.store(scales_ptr + row, scale)


_launch = Launcher(_quantize_rows_kernel, launch_pdl=OVERLAPS)


def launch_quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns values [T, K] e4m3 and scales [T] float32."""
    rows, width = x.shape
    assert x.stride(1) == 1
    assert width <= MAX_BLOCK
    values = torch.empty((rows, width), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    block, num_warps = shape_of(width)
    _launch(
        (rows, 1, 1),
        (x, values, scales),
        (),
        (x.stride(0), width, not IS_INTERPRETED, block, OVERLAPS),
        num_warps,
    )
    return values, scales

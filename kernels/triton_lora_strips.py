"""The Triton kernel of `copy_strips`: a few programs take the tiles in turns.

A tile waits for the bus, about a microsecond, and then the next one of its program is requested:
the programs together keep enough bytes on the way. More of them would take the places of programs
of the steps that run beside, and have them wait for the bus, too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.lora_plan import PAGE_ROWS
from kernels.strip_copies import BLOCK, FIELDS, StripCopies
from kernels.triton_launch import Launcher

NUM_PROGRAMS = 32
NUM_WARPS = 4
_FIELDS = tl.constexpr(FIELDS)


@triton.jit
def _field(strip, index: tl.constexpr, ALIGNED: tl.constexpr):
    """Returns a field of a strip, which is a multiple of 8 if ALIGNED."""
    value = tl.load(strip + index)
    if ALIGNED:
        value = tl.multiple_of(value, 8)
    return value


@triton.jit
def _load(start, rows, row_stride, num_rows, columns, num_columns):
    """Returns [rows, columns] of a matrix, with zeros beyond it."""
    at = start + rows[:, None] * row_stride + columns[None, :]
    inside = (rows[:, None] < num_rows) & (columns[None, :] < num_columns)
    return tl.load(at, mask=inside, other=0.0)


@triton.jit(do_not_specialize_on_alignment=["tiles_ptr"])
def _copy_strips_kernel(
    strips_ptr,  # [n, FIELDS]
    image_ptr,
    source_ptr,
    largest_ptr,  # [1] float32
    scales_ptr,  # [n] float32
    tiles_ptr,  # [1 + tiles, 2]
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    lanes = tl.arange(0, ROWS)
    offsets = tl.arange(0, BLOCK)
    largest = 0.0
    for tile in range(tl.program_id(0), tl.load(tiles_ptr), PROGRAMS):
        index = tl.load(tiles_ptr + 2 + 2 * tile)
        strip = strips_ptr + index * _FIELDS
        first = tl.multiple_of(tl.load(tiles_ptr + 3 + 2 * tile), BLOCK)
        source = source_ptr + _field(strip, 0, ALIGNED)
        rows = _field(strip, 3, ALIGNED)
        num_columns = _field(strip, 4, ALIGNED)
        width = _field(strip, 5, ALIGNED)
        target = image_ptr + _field(strip, 6, ALIGNED)
        scale = tl.load(scales_ptr + index)
        columns = first + offsets
        if tl.load(strip + 2) == 1:  # the stride of columns
            stride = _field(strip, 1, ALIGNED)
            numbers = _load(source, lanes, stride, rows, columns, num_columns)
        else:
            stride = _field(strip, 2, ALIGNED)
            numbers = tl.trans(_load(source, columns, stride, num_columns, lanes, rows))
        numbers = numbers.to(tl.float32)
        sizes = tl.where(numbers == numbers, tl.abs(numbers), float("inf"))
        largest = tl.maximum(largest, tl.max(tl.max(sizes, 1), 0))
        scaled = tl.where(columns[None, :] < num_columns, numbers * scale, 0.0)
        at = target + lanes[:, None] * width + columns[None, :]
        inside = (lanes[:, None] < rows) & (columns[None, :] < width)
        tl.store(at, scaled.to(image_ptr.dtype.element_ty), mask=inside)
    tl.atomic_max(largest_ptr, largest)


_launch = Launcher(_copy_strips_kernel)


def launch_copy_strips(
    image: torch.Tensor, source: torch.Tensor, copies: StripCopies, scales: torch.Tensor
) -> torch.Tensor:
    largest = torch.zeros(1, device=copies.strips.device)
    _launch(
        (NUM_PROGRAMS, 1, 1),
        (copies.strips, image, source, largest, scales),
        (copies.tiles,),
        (PAGE_ROWS, BLOCK, copies.is_aligned, NUM_PROGRAMS),
        NUM_WARPS,
    )
    return largest

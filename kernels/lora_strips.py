"""Copies of the matrices of an adapter's file to their strips in an image: scaled, transposed where
they have to be, and rounded once.

    the file's bytes --a few programs of the device, over the bus--> the image, both page-locked

Both memories are the host's: a CUDA device reads and writes page-locked memory by itself. So no
processor computes, and the interpreter, which the engine's thread needs too, is not taken 2,000
times for an adapter of Llama-3-8B. Where the list of copies is on a CPU, torch makes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.lora_plan import PAGE_ROWS

BLOCK = 256  # columns of a tile, of up to 16 rows
FIELDS = 7  # of a strip, see `StripCopy`
_ALIGNED = 8  # elements: 16 bytes of half types


@dataclass(frozen=True, slots=True)
class StripCopy:
    """The rows of one strip, and the numbers that they come from; all places are in elements."""

    source: int  # the first number of the file
    row_stride: int
    column_stride: int  # of the numbers: one of both is 1
    rows: int  # 1 to 16
    columns: int  # of the file; those beyond become zeros
    width: int  # columns of the strip
    place: int  # of its first number in the image


@dataclass(frozen=True, slots=True, eq=False)
class StripCopies:
    """A list of copies in a form that a device reads."""

    strips: torch.Tensor  # [n, FIELDS] int64: the fields of `StripCopy`
    # [1 + tiles, 2] int32: the number of tiles, then the strip and the first column of each.
    tiles: torch.Tensor
    is_aligned: bool  # all places, strides and sizes are multiples of 8 elements

    @classmethod
    def of(cls, copies: Sequence[StripCopy], device: torch.device) -> StripCopies:
        strips = np.array([_fields(copy) for copy in copies], np.int64).reshape(-1, FIELDS)
        counts = -(-strips[:, 5] // BLOCK)
        owners = np.arange(len(copies)).repeat(counts)
        firsts = np.arange(len(owners)) - (counts.cumsum() - counts).repeat(counts)
        tiles = np.zeros((1 + len(owners), 2), np.int32)
        tiles[0, 0] = len(owners)
        tiles[1:, 0], tiles[1:, 1] = owners, firsts * BLOCK
        strides, others = strips[:, 1:3], strips[:, [0, 3, 4, 5, 6]]
        is_aligned = not (others % _ALIGNED).any() and not (strides[strides != 1] % _ALIGNED).any()
        return cls(
            torch.from_numpy(strips).to(device), torch.from_numpy(tiles).to(device), is_aligned
        )


def _fields(copy: StripCopy) -> tuple[int, ...]:
    assert 1 <= copy.rows <= PAGE_ROWS
    assert 1 in (copy.row_stride, copy.column_stride)
    strides = copy.row_stride, copy.column_stride
    return (copy.source, *strides, copy.rows, copy.columns, copy.width, copy.place)


def copy_strips(
    image: torch.Tensor,  # [elements] of the pool's type
    source: torch.Tensor,  # [elements] of the file's type
    copies: StripCopies,
    scales: torch.Tensor,  # [n] float32, of the strips
) -> torch.Tensor:
    """Writes the strips of the image. Returns [1] float32, on the device of `copies`: the largest
    magnitude of the numbers that were read, infinite if one of them is not finite.

    Each number becomes that of the file, times the scale in float32, rounded to the image's type.
    On a CUDA device both memories are page-locked, and stay as they are until the current stream
    has passed this call."""
    if copies.strips.is_cuda or copies.strips.is_meta:
        from kernels.triton_lora_strips import launch_copy_strips

        return launch_copy_strips(image, source, copies, scales)
    return copy_strips_reference(image, source, copies, scales)


def copy_strips_reference(
    image: torch.Tensor, source: torch.Tensor, copies: StripCopies, scales: torch.Tensor
) -> torch.Tensor:
    largest = torch.zeros(())
    for strip, scale in zip(copies.strips.tolist(), scales.tolist(), strict=True):
        start, row_stride, column_stride, rows, columns, width, place = strip
        start, place = start + source.storage_offset(), place + image.storage_offset()
        numbers = source.as_strided((1, rows, columns), (0, row_stride, column_stride), start)
        target = image.as_strided((1, rows, width), (0, width, 1), place)
        if scale != 1.0 and image.dtype != source.dtype:
            numbers = numbers.float() * scale
        # Three dimensions avoid torch's copy for transposed matrices, which lasts twice as long.
        target[:, :, :columns].copy_(numbers)
        if scale != 1.0 and image.dtype == source.dtype:
            target.mul_(scale)
        if columns < width:
            target[:, :, columns:].zero_()
        low, high = source.as_strided((rows, columns), (row_stride, column_stride), start).aminmax()
        largest = torch.maximum(largest, torch.maximum(-low, high).float())
    return largest.where(largest.isfinite(), torch.inf)[None]

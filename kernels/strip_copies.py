"""The list of copies that `copy_strips` makes, in a form that a device reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.lora_plan import PAGE_ROWS
from kernels.lora_runs import spread

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
        owners, firsts = spread(counts)
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

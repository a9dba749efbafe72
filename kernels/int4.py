"""Rows of 4-bit integers in groups of columns, as GPTQ, AWQ and compressed-tensors store them.

    W[n, k] = (q[n, k] - zero[n, group of k]) * scale[n, group of k]

Groups go in pairs: a byte holds column j of an even group in its low half and column j of the odd
group behind it in its high half, so that one load of bytes gives two runs of columns, each as long
as a group, beside two runs of the activations. Of 16 columns, column 8 i + 2 t + j is at place
4 t + 2 j + i: a word of four bytes then holds what thread t of an mma multiplies, and a shift and a
mask take two neighbouring columns out of it. Scales and zero points of a pair lie beside each
other, the rows of a matrix one after another, where a program reads all of its rows in one go.
No value is rounded: the values are those of the files. Uses tensors only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

GROUP_SIZES = (32, 64, 128)  # columns; larger groups become several with one scale
MIDDLE = 8  # the zero point of symmetric integers
_PAIRS_A_WORD = 4  # of zero points
_CHUNK = 16 * 1024 * 1024  # elements that are in float32 at a time


@dataclass(frozen=True, slots=True)
class Int4Format:
    """The form of a matrix, which decides the kernels that read it."""

    group_size: int  # one of GROUP_SIZES
    scale_type: torch.dtype  # float16 or bfloat16
    has_zeros: bool = False  # False: every zero point is MIDDLE
    has_order: bool = False  # True: columns are sorted by their groups

    def num_pairs(self, columns: int) -> int:
        return -(-columns // (2 * self.group_size))

    def num_bytes(self, rows: int, columns: int) -> int:
        """Returns the bytes of a matrix in this form."""
        pairs = self.num_pairs(columns)
        size = rows * pairs * (self.group_size + 2 * self.scale_type.itemsize)
        if self.has_zeros:
            size += rows * -(-pairs // _PAIRS_A_WORD) * _PAIRS_A_WORD
        return size + (8 * columns if self.has_order else 0)


@dataclass(frozen=True, slots=True)
class Integers:
    """Rows of a matrix, not packed: columns sorted by their groups."""

    q: torch.Tensor  # [rows, columns] uint8, 0 to 15
    scales: torch.Tensor  # [rows, groups] float
    zeros: torch.Tensor | None  # [rows, groups] uint8, 0 to 15; None: MIDDLE

    def rows(self, rows: slice) -> Integers:
        """Returns views of some rows."""
        zeros = None if self.zeros is None else self.zeros[rows]
        return Integers(self.q[rows], self.scales[rows], zeros)

    def columns(self, first: int, end: int, group_size: int) -> Integers:
        """Returns views of some columns, of whole groups."""
        groups = slice(first // group_size, -(-end // group_size))
        zeros = None if self.zeros is None else self.zeros[:, groups]
        return Integers(self.q[:, first:end], self.scales[:, groups], zeros)

    def float(self, group_size: int) -> torch.Tensor:
        """Returns the values, [rows, columns] float32, in the order of the columns here."""
        group = torch.arange(self.q.shape[1], device=self.q.device) // group_size
        zeros: torch.Tensor | int = MIDDLE
        if self.zeros is not None:
            zeros = self.zeros[:, group].float()
        return (self.q.float() - zeros) * self.scales[:, group].float()


@dataclass(frozen=True, slots=True)
class Int4Rows:
    """A matrix in 4 bits. Reads like a tensor where adapters read the base's weight."""

    values: torch.Tensor  # [rows, pairs * group size] uint8
    scales: torch.Tensor  # [pairs, rows, 2] float16 or bfloat16: of the even and of the odd group
    zeros: torch.Tensor | None  # [words, rows, 4] uint8: a pair's in the halves of a byte
    order: torch.Tensor | None  # [columns] int64: the column of the weight at each place here
    columns: int
    group_size: int

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.values.shape[0], self.columns))

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def is_cuda(self) -> bool:
        return self.values.is_cuda

    @property
    def nbytes(self) -> int:
        parts = (self.values, self.scales, self.zeros, self.order)
        return sum(part.nbytes for part in parts if part is not None)

    def __getitem__(self, rows: torch.Tensor | slice) -> Int4Rows:
        """Returns the rows at these indices, views if they are a slice."""
        zeros = None if self.zeros is None else self.zeros[:, rows]
        return replace(self, values=self.values[rows], scales=self.scales[:, rows], zeros=zeros)

    def split(self, sizes: int | Sequence[int]) -> tuple[Int4Rows, ...]:
        """Returns views of so many rows each, as torch's `split` does."""
        num_rows = self.shape[0]
        if isinstance(sizes, int):
            sizes = [min(sizes, num_rows - first) for first in range(0, num_rows, sizes)]
        found, first = [], 0
        for size in sizes:
            found.append(self[first : first + size])
            first += size
        return tuple(found)

    def integers(self) -> Integers:
        """Returns the rows unpacked."""
        size, columns = self.group_size, self.columns
        groups = -(-columns // size)
        numbers = _in_columns(self.values).view(-1, self.values.shape[1] // size, size)
        q = torch.stack((numbers & 15, numbers >> 4), 2).flatten(1)[:, :columns]
        scales = self.scales.transpose(0, 1).flatten(1)[:, :groups]
        zeros = None
        if self.zeros is not None:
            pairs = self.zeros.transpose(0, 1).flatten(1)
            zeros = torch.stack((pairs & 15, pairs >> 4), 2).flatten(1)[:, :groups]
        return Integers(q, scales, zeros)

    def float(self) -> torch.Tensor:
        """Returns the values in float32, [rows, columns], each column in its place."""
        sorted_columns = self.integers().float(self.group_size)
        if self.order is None:
            return sorted_columns
        return torch.empty_like(sorted_columns).index_copy_(1, self.order, sorted_columns)

    def write_(self, rows: Integers) -> None:
        """Packs as many rows as there are here, from any device. An order is written by itself."""
        size, pairs = self.group_size, self.scales.shape[0]
        q = rows.q.to(self.device)
        q = torch.nn.functional.pad(q, (0, 2 * pairs * size - q.shape[1]), value=MIDDLE)
        even, odd = q.reshape(-1, pairs, 2, size).unbind(2)
        self.values.copy_(_in_places((even | (odd << 4)).flatten(1)))
        scales = self.scales.new_zeros(len(q), 2 * pairs)
        scales[:, : rows.scales.shape[1]] = rows.scales
        self.scales.copy_(scales.view(-1, pairs, 2).transpose(0, 1))
        if self.zeros is None:
            assert rows.zeros is None
            return
        words = self.zeros.shape[0]
        zeros = self.zeros.new_full((len(q), 2 * words * _PAIRS_A_WORD), MIDDLE)
        if rows.zeros is not None:
            zeros[:, : rows.zeros.shape[1]] = rows.zeros
        even, odd = zeros.view(-1, words, _PAIRS_A_WORD, 2).unbind(3)
        self.zeros.copy_((even | (odd << 4)).transpose(0, 1))

    def write_nearest_(self, weight: torch.Tensor) -> None:
        """Writes the nearest values of weight [rows, columns], of any float type and device: the
        largest magnitude of a group becomes 7 steps. Columns stay in their order."""
        if self.order is not None:
            self.order.copy_(torch.arange(self.columns))
        rows = max(1, _CHUNK // self.columns)
        for first in range(0, self.shape[0], rows):
            part = weight[first : first + rows]
            self[first : first + rows].write_(nearest(part, self.group_size, self.scales.dtype))


def _in_places(columns: torch.Tensor) -> torch.Tensor:
    """Returns bytes [rows, pairs * group size] in the order in which they are stored."""
    words = columns.view(len(columns), columns.shape[1] // 16, 2, 4, 2)  # i, t, j
    return words.permute(0, 1, 3, 4, 2).reshape(columns.shape)


def _in_columns(places: torch.Tensor) -> torch.Tensor:
    """Returns stored bytes in the order of their columns."""
    words = places.view(len(places), places.shape[1] // 16, 4, 2, 2)  # t, j, i
    return words.permute(0, 1, 4, 2, 3).reshape(places.shape)


def empty_int4(rows: int, columns: int, form: Int4Format, device: torch.device) -> Int4Rows:
    """Returns a matrix of any content."""
    pairs = form.num_pairs(columns)
    words = -(-pairs // _PAIRS_A_WORD)
    shape = (words, rows, _PAIRS_A_WORD)
    return Int4Rows(
        torch.empty((rows, pairs * form.group_size), dtype=torch.uint8, device=device),
        torch.empty((pairs, rows, 2), dtype=form.scale_type, device=device),
        torch.empty(shape, dtype=torch.uint8, device=device) if form.has_zeros else None,
        torch.empty(columns, dtype=torch.int64, device=device) if form.has_order else None,
        columns,
        form.group_size,
    )


def nearest(weight: torch.Tensor, group_size: int, scale_type: torch.dtype) -> Integers:
    """Rounds weight [rows, columns] to symmetric integers of -7 to 7 steps."""
    columns = weight.shape[1]
    groups = -(-columns // group_size)
    padded = torch.nn.functional.pad(weight.float(), (0, groups * group_size - columns))
    wide = padded.reshape(-1, groups, group_size)
    scales = (wide.abs().amax(2) / 7).to(scale_type)
    steps = wide / scales.float().clamp_min(torch.finfo(torch.float32).tiny)[:, :, None]
    q = (steps.round().clamp(-7, 7) + MIDDLE).to(torch.uint8)
    return Integers(q.flatten(1)[:, :columns], scales, None)

"""The rank rows of adapters at one site: strips anywhere in one heap, found through a table.

A strip is the rows of one page at one matrix, A [rows, K] or B [rows, N_s], contiguous. The table
has a word for each page and matrix: where the strip begins, in units of 256 bytes, and its number
of rows, 1 to 16; the word 0 means that the adapter lacks the matrix there. So kernels read the rows
that exist and nothing else, in any place. A matrix as wide as the vocabulary may be in pieces of
columns, each a strip with a word of its own. A strip without rows is there, but no row is read of
it and its delta is 0: first in a list of pages, it signals that later pages may have the matrix.

In a heap of int8 the numbers of a rank row of A, and those of its partner in B, are integers from
-127 to 127, and both rows share one scale: that of A's row times that of B's. A strip of A begins
with the scales of its 16 rows, and the shrink multiplies the bridge by them, so that the expands
read integers alone. One scale a row is the rule of per-channel weights in int8 (Dettmers et al.,
"LLM.int8()", arXiv 2208.07339). Affine rows stay in the activations' type.

An adapter may also scale the base's product of a slice and add a constant to it: DoRA does the
first, trained biases the second. Its affine rows are one more strip of its first page, with a row
of gains and perhaps a row of offsets: y becomes y + gain y + offset before the delta is added. A
slice with affine rows also has A and B.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.lora_plan import PAGE_ROWS

UNIT_BYTES = 256  # every strip begins at a multiple of it
ROW_BITS = 5  # of an entry: the number of rows
BLANK_ENTRY = 1 << ROW_BITS  # of a strip without rows
INT8_GROUP = 8  # columns of int8 that kernels read at once: all widths are multiples of it
SCALE_BYTES = 4 * PAGE_ROWS  # float32 at the beginning of a strip of A in int8


def make_entry(start: int, rows: int) -> int:
    """Returns the entry of a strip that begins at byte `start` of the heap."""
    assert start % UNIT_BYTES == 0
    return start // UNIT_BYTES << ROW_BITS | rows


@dataclass(frozen=True, slots=True)
class SiteRows:
    """The strips of one site. Heap and table must stay in place while it is used."""

    heap: torch.Tensor  # [elements], of the activations' type or int8
    a_entries: torch.Tensor  # [pages, slices] int64, a view of the table
    b_entries: torch.Tensor  # [pages, slices] int64, likewise, with the same strides
    in_features: int
    sizes: tuple[int, ...]  # N_s of each slice
    # Columns of a strip of the embedding's A or the head's B, whose entries are [pages, pieces].
    # The last strip may be wider than the rest of the matrix. 0: no such matrix.
    piece: int = 0
    # From a slice's entry of B to that of its affine rows, which follow in the table. 0: no adapter
    # of the step has affine rows, and kernels are compiled without them.
    affine: int = 0
    # Of affine rows, and of the bridge where it meets B, if the heap is in int8; None: the heap's.
    activations: torch.dtype | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The type of the activations."""
        return self.activations or self.heap.dtype

    @property
    def is_int8(self) -> bool:
        return self.heap.dtype == torch.int8

    @property
    def num_slices(self) -> int:
        return len(self.sizes)

    @property
    def stride(self) -> int:
        """The entries of a page in the table, those of other sites included."""
        return self.a_entries.stride(0)

    def a(self, page: int, index: int) -> torch.Tensor | None:
        """Returns A [rows, K] of a slice, in int8 times the scales, None if the adapter lacks it.
        Waits for the device."""
        return self._matrix(self.a_entries, page, index, self.in_features, is_a=True)

    def b(self, page: int, index: int) -> torch.Tensor | None:
        """Returns B [rows, N_s] of a slice, None if the adapter lacks it. Waits for the device."""
        return self._matrix(self.b_entries, page, index, self.sizes[index])

    def affine_rows(self, page: int, index: int) -> torch.Tensor | None:
        """Returns the affine rows of a slice [1 or 2, N_s] of an adapter's first page, None if the
        adapter has none. Waits for the device."""
        if not self.affine:
            return None
        words = self.b_entries.as_strided(
            (self.b_entries.shape[0], self.num_slices),
            self.b_entries.stride(),
            self.b_entries.storage_offset() + self.affine,
        )
        return strip(self.heap.view(self.dtype), int(words[page, index]), self.sizes[index])

    def _matrix(
        self, entries: torch.Tensor, page: int, index: int, width: int, *, is_a: bool = False
    ) -> torch.Tensor | None:
        read = strip_of_a if is_a else strip
        if entries.shape[1] == self.num_slices:
            stored = width
            if self.is_int8:
                stored = -(-width // INT8_GROUP) * INT8_GROUP  # a small vocabulary has more columns
            found = read(self.heap, int(entries[page, index]), stored)
            return None if found is None else found[:, :width]
        parts = [read(self.heap, entry, self.piece) for entry in entries[page].tolist()]
        pieces = [piece for piece in parts if piece is not None]
        return torch.cat(pieces, dim=1)[:, :width] if pieces else None


def strip(heap: torch.Tensor, entry: int, width: int, offset: int = 0) -> torch.Tensor | None:
    """Returns the strip [rows, width] as a view of the heap, None if there is none. `offset`: bytes
    before its first row."""
    rows = entry & (1 << ROW_BITS) - 1
    if rows == 0:
        return None
    start = ((entry >> ROW_BITS) * UNIT_BYTES + offset) // heap.element_size()
    return heap[start : start + rows * width].view(rows, width)


def strip_of_a(heap: torch.Tensor, entry: int, width: int) -> torch.Tensor | None:
    """Returns a strip of A [rows, width]: a view of the heap, or in int8 its numbers times their
    scales, in float32."""
    if heap.dtype != torch.int8:
        return strip(heap, entry, width)
    numbers = strip(heap, entry, width, SCALE_BYTES)
    if numbers is None:
        return None
    return numbers.float() * row_scales(heap, entry >> ROW_BITS, len(numbers))[:, None]


def row_scales(heap: torch.Tensor, unit: int, rows: int) -> torch.Tensor:
    """Returns the scales [rows] float32 of the strip of A that begins at this unit of an int8
    heap."""
    start = unit * UNIT_BYTES
    return heap[start : start + 4 * rows].view(torch.float32)


def add_affine(y: torch.Tensor, affine: torch.Tensor) -> torch.Tensor:
    """Returns y + gain y + offset in float32: y [T, N], affine [1 or 2, N]."""
    wide, rows = y.float(), affine.float()
    wide = wide + wide * rows[0]
    return wide + rows[1] if len(rows) > 1 else wide

"""The adapters' memory on the device: one heap of blocks, and the table of its strips.

Page p of the table has the number of one of its adapter's blocks; one more page, the blank one, has
every matrix without rows. Both tensors never move: CUDA graphs hold their addresses. The owners of
blocks are tracked elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from kernels.lora_rows import (
    BLANK_ENTRY,
    ROW_BITS,
    SCALE_BYTES,
    UNIT_BYTES,
    SiteRows,
    row_scales,
)
from kernels.lora_shrink_expand import Affine, Delta, EmbeddingDelta
from lora.page_image import PackedAdapter, PageLayout, Strip, in_blocks
from lora.sites import Site

SiteDeltas = tuple[Delta | Affine, ...] | tuple[EmbeddingDelta, ...]
Deltas = Mapping[str, SiteDeltas]


@dataclass(frozen=True, slots=True)
class _Run:
    """Rows of consecutive pages that follow each other in memory."""

    starts: tuple[int, ...]  # of each strip, in elements of the heap
    rows: int

    def of(self, strips: Sequence[Strip]) -> Iterator[tuple[Strip, int]]:
        return zip(strips, self.starts, strict=True)


class AdapterHeap:
    def __init__(
        self, sites: Sequence[Site], layout: PageLayout, num_blocks: int, device: torch.device
    ) -> None:
        self._layout = layout
        self._block_bytes = layout.block_bytes
        # Bytes that no entry names are not read: they need no value.
        size = num_blocks * layout.block_bytes
        self._bytes = torch.empty(size, dtype=torch.uint8, device=device)
        self._elements = self._bytes.view(layout.row_dtype)
        self.blank_page = num_blocks
        shape = (num_blocks + 1, layout.num_entries)
        self._table = torch.zeros(shape, dtype=torch.int64, device=device)
        self._table[self.blank_page] = BLANK_ENTRY
        self._sites = {site.name: site for site in sites}
        columns: dict[str, list[int]] = {}  # of the table, by site
        for column, strip in enumerate(layout.strips):
            columns.setdefault(strip.site, []).append(column)
        self._rows = {site.name: self._rows_of(site, columns[site.name]) for site in sites}
        self._plain_rows = {name: replace(rows, affine=0) for name, rows in self._rows.items()}

    def site_rows(self, name: str, *, has_affine: bool) -> SiteRows:
        return (self._rows if has_affine else self._plain_rows)[name]

    def write(self, packed: PackedAdapter, blocks: Sequence[int]) -> None:
        """Copies an adapter to its blocks; on CUDA on the current stream, from page-locked memory
        that must stay until the copy has ended."""
        entries = in_blocks(packed.entries, torch.tensor(blocks), self._block_bytes)
        rows, image, size = packed.rows, packed.image, self._block_bytes
        rows.copy_(entries)
        for first, block, count in _runs_of(blocks):
            part = image[first * size : (first + count) * size]
            self._bytes[block * size : block * size + part.numel()].copy_(part, non_blocking=True)
        for first, page, count in _runs_of(blocks[: packed.num_pages]):
            self._table[page : page + count].copy_(rows[first : first + count], non_blocking=True)

    def deltas(self, packed: PackedAdapter, blocks: Sequence[int]) -> Deltas:
        """Returns the rows of an adapter that is in these blocks, by site, as views."""
        entries = in_blocks(packed.entries, torch.tensor(blocks), self._block_bytes)
        columns_of: dict[tuple[str, int], list[int]] = {}
        found: dict[str, list[Delta | Affine | EmbeddingDelta]] = {}
        for column in entries.any(0).nonzero().flatten().tolist():
            strip = self._layout.strips[column]
            if strip.side == "affine":  # before the deltas, as it changes y first
                affine = self._affine(strip, int(entries[0, column]))
                found.setdefault(strip.site, []).append(affine)
            else:
                columns_of.setdefault((strip.site, strip.index), []).append(column)
        for (site, _), columns in columns_of.items():
            strips = [self._layout.strips[column] for column in columns]
            make = self._embedding_delta if self._sites[site].kind == "embedding" else self._delta
            runs = self._runs(strips, entries[:, columns].tolist())
            found.setdefault(site, []).extend(make(strips, run) for run in runs)
        return {site: tuple(some) for site, some in found.items()}  # type: ignore[misc]

    def _runs(self, strips: Sequence[Strip], pages: Sequence[Sequence[int]]) -> list[_Run]:
        """Joins pages [pages, strips] that follow each other in all strips. In int8 scales are
        between them."""
        unit, runs = UNIT_BYTES // self._elements.element_size(), list[_Run]()
        for entries in pages:
            rows = entries[0] & (1 << ROW_BITS) - 1
            if rows == 0:
                break  # beyond the module's rank
            starts = tuple((entry >> ROW_BITS) * unit for entry in entries)
            last = runs[-1] if runs and not self._layout.is_int8 else None
            if last and starts == tuple(
                start + last.rows * strip.width
                for start, strip in zip(last.starts, strips, strict=True)
            ):
                runs[-1] = _Run(last.starts, last.rows + rows)
            else:
                runs.append(_Run(starts, rows))
        return runs

    def _delta(self, strips: Sequence[Strip], run: _Run) -> Delta:
        (first,) = [start for strip, start in run.of(strips) if strip.side == "a"]
        (a,) = [self._view(s, start, run) for s, start in run.of(strips) if s.side == "a"]
        b = [(s.start, self._view(s, start, run)) for s, start in run.of(strips) if s.side == "b"]
        return Delta(strips[0].index, a, tuple(b), self._scales(first, run))

    def _affine(self, strip: Strip, entry: int) -> Affine:
        rows = entry & (1 << ROW_BITS) - 1
        numbers = self._bytes.view(self._layout.dtype)
        start = (entry >> ROW_BITS) * (UNIT_BYTES // numbers.element_size())
        numbers = numbers[start : start + rows * strip.width]
        return Affine(strip.index, numbers.view(rows, strip.width))

    def _embedding_delta(self, strips: Sequence[Strip], run: _Run) -> EmbeddingDelta:
        starts = [start for strip, start in run.of(strips) if strip.side == "a"]
        (b,) = [self._view(s, start, run) for s, start in run.of(strips) if s.side == "b"]
        scales = self._scales(starts[0], run)  # the same for every piece
        offset = 0 if scales is None else SCALE_BYTES
        places = torch.tensor([start + offset for start in starts])
        width, device = strips[0].width, self._elements.device
        return EmbeddingDelta(self._elements, places.to(device), width, b, scales)

    def _scales(self, start: int, run: _Run) -> torch.Tensor | None:
        """Returns the scales [rows] of the strip of A that begins there, None without."""
        if not self._layout.is_int8:
            return None
        return row_scales(self._elements, start // UNIT_BYTES, run.rows)

    def _view(self, strip: Strip, start: int, run: _Run) -> torch.Tensor:
        """Returns [rows, columns] without the columns beyond the end of the matrix."""
        site = self._sites[strip.site]
        is_a = strip.side == "a"
        if is_a and self._layout.is_int8:
            start += SCALE_BYTES
        rows = self._elements[start : start + run.rows * strip.width].view(run.rows, strip.width)
        width = site.in_features if is_a else site.slices[strip.index].out_features
        return rows[:, : width - strip.start]

    def _rows_of(self, site: Site, columns: Sequence[int]) -> SiteRows:
        """`columns`: the table's columns for the site's strips, which follow each other."""
        strips = [self._layout.strips[column] for column in columns]
        middle = columns[0] + sum(strip.side == "a" for strip in strips)
        end = middle + sum(strip.side == "b" for strip in strips)
        wide = "a" if site.kind == "embedding" else "b"
        return SiteRows(
            self._elements,
            self._table[:, columns[0] : middle],
            self._table[:, middle:end],
            site.in_features,
            tuple(part.out_features for part in site.slices),
            next(s.width for s in strips if s.side == wide) if site.is_optional else 0,
            end - middle if columns[-1] >= end else 0,
            self._layout.dtype,
        )


def _runs_of(numbers: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yields runs of consecutive numbers: place in the sequence, first number, length."""
    first = 0
    for i in range(1, len(numbers) + 1):
        if i == len(numbers) or numbers[i] != numbers[i - 1] + 1:
            yield first, numbers[first], i - first
            first = i

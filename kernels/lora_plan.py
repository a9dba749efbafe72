"""The rows of each adapter in a step, as tiles that the multi-LoRA kernels walk.

Written once per step on the host into one flat int32 buffer, copied to the device once, shared by
all layers. The offsets in it depend on two limits only, so a CUDA graph made for the buffer stays
valid for any later contents; programs read the amount of work from the header. Uses page numbers
and row counts; no digests, no weights.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kernels import lora_runs
from kernels.lora_runs import Pages, Run, cut, merge

if TYPE_CHECKING:  # processes without an engine read the limits: torch takes them four seconds
    import torch

    _Views = tuple[
        torch.Tensor,
        torch.Tensor,
        torch.Tensor,
        torch.Tensor,
        torch.Tensor,
        torch.Tensor,
        torch.Tensor,
    ]

PAGE_ROWS = 16  # rank rows of a page of an adapter, at most
# Maximum token rows of a small tile: the narrow side of an mma of the shrink; an expand holds a
# page of B in registers and walks the rows.
SMALL_ROWS = 8
LARGE_ROWS = 128
# A shorter run is cut into small tiles. Microseconds of a layer's kernels for 16 adapters in large
# and in small tiles (Llama-3-8B shape, rank 16, bfloat16, H100): 48 rows each 103 and 176, 32 rows
# 100 and 132, 24 rows 94 and 107, 16 rows 80 and 85; in int8 16 rows 97 and 77.
LARGE_MIN_RUN = 32
MAX_RANK_PAGES = 32  # of one adapter: rank 512, which `EngineConfig.max_lora_rank` keeps to

# row, rows, pages, offset in the page list, first page, row in the bridge; the rest is padding
TILE_FIELDS = 8
# row, rows, page, its index among the adapter's pages, row in the bridge, weight (float32's bits)
UNIT_FIELDS = 8
# Small tiles, units, large tiles, rows of small tiles, of large tiles, most pages of an adapter.
# Then counts once more for the head and the embedding, zeros if no adapter of the step has the
# site, so that its kernels end at once.
HEADER_FIELDS = 16
UNITS = 1
HEAD_UNITS, HEAD_TILES = 6, 7
EMBEDDING_SMALL, EMBEDDING_LARGE = 8, 9
# Sequences of a step at most that begin with rows of the base and go on with an adapter's. Not in
# plans without large tiles: a decode has one row of each.
MAX_SPLITS = 8
_ONE = 0x3F800000  # the bits of 1.0
COUNTERS = 4  # of a large tile: finished programs, per 32 rows; kept at zero


@dataclass(frozen=True, slots=True)
class _Layout:
    """The maximum number of each kind, and the offsets in the buffer."""

    small: int
    units: int
    large: int
    pages: int

    @classmethod
    @functools.cache
    def of(cls, max_tokens: int, max_pages: int, large: bool) -> _Layout:
        # Adapters are contiguous and have a page each at least; base rows come first, and perhaps
        # once more at the end. A split interrupts the rows of its adapter once.
        splits = MAX_SPLITS if large else 0
        runs = min(max_tokens, max_pages + 2 + 2 * splits)
        pages = max_pages + MAX_RANK_PAGES * splits if max_pages else 0
        small = (max_tokens + (SMALL_ROWS - 1) * runs) // SMALL_ROWS  # sum of ceil(n / 8)
        # sum of ceil(n / 8) * pages
        units = pages + MAX_RANK_PAGES * (max_tokens // SMALL_ROWS)
        if large:  # n is below LARGE_MIN_RUN
            units = min(units, LARGE_MIN_RUN // SMALL_ROWS * pages)
        return cls(small, units, max_tokens // LARGE_MIN_RUN if large else 0, pages)

    @property
    def starts(self) -> tuple[int, int, int, int, int, int, int]:
        """The offsets of small tiles, units, large tiles, counters, pages and weights, and the
        end."""
        small = HEADER_FIELDS
        units = small + self.small * TILE_FIELDS
        large = units + self.units * UNIT_FIELDS
        counters = large + self.large * TILE_FIELDS
        pages = counters + self.large * COUNTERS
        weights = pages + self.pages
        return small, units, large, counters, pages, weights, -(-(weights + self.pages) // 16) * 16


@dataclass(frozen=True, slots=True)
class LoraPlanCounts:
    num_tokens: int
    num_small: int
    num_units: int
    num_large: int
    num_small_rows: int  # the tiles of a kind number their rows in the bridge without gaps
    num_large_rows: int
    max_rank_pages: int  # maximum among the adapters in the step; 0: no adapter has a row
    has_embedding: bool


def lora_plan_size(max_tokens: int, max_pages: int, *, large: bool = True) -> int:
    """Returns the int32 elements of a plan of at most `max_tokens` rows whose adapters have, all
    together, at most `max_pages` pages (the pool's pages suffice). `large` is that of
    `write_lora_plan`."""
    return _Layout.of(max_tokens, max_pages, large).starts[-1]


def write_lora_plan(
    out: NDArray[np.int32],  # [lora_plan_size(max_tokens, max_pages, large=large)]
    runs: Sequence[tuple[Sequence[int], int]],  # (pages of the adapter, () for the base; rows)
    max_tokens: int,
    max_pages: int,
    weights: Sequence[Sequence[float]] | None = None,  # of each run, one for each of its pages
    *,
    large: bool = True,
    has_head: bool = False,
    has_embedding: bool = False,
) -> LoraPlanCounts:
    """Writes the plan. The runs cover all rows of the step in order; neighbours with equal pages
    and weights are merged. The rows of an adapter are contiguous, but for `MAX_SPLITS` runs of the
    base between them in a plan with large tiles. `weights`: factors of the pages' deltas; None: all
    are 1. `large=False` for the plan of a CUDA graph of decodes and for the head: small tiles only.
    `has_head`, `has_embedding`: an adapter of the step has the site. Elements beyond the counts in
    `out` are left as they were and are not read."""
    layout = _Layout.of(max_tokens, max_pages, large)
    merged, merged_weights = merge(runs, weights)
    listed = Pages.of(tuple([tuple(pages) for pages, _ in merged]))
    flat, num_tokens = listed.flat, sum([rows for _, rows in merged])
    if num_tokens > max_tokens or len(flat) > layout.pages:
        raise ValueError(
            f"a step of {num_tokens} rows and {len(flat)} pages of adapters in a plan for "
            f"{max_tokens} rows and {layout.pages} pages"
        )
    factors: NDArray[np.int32] | int = _ONE  # bits
    if weights is not None:
        flat_weights = np.fromiter(chain.from_iterable(merged_weights), np.float32, len(flat))
        factors = flat_weights.view(np.int32)
    page_start, weight_start = layout.starts[4:6]
    out[page_start : page_start + len(flat)] = flat
    out[weight_start : weight_start + len(flat)] = factors
    write = _write_both if large else _write_small
    header = write(out, layout, merged, listed, factors)
    out[: len(header)] = header
    out[len(header)] = listed.most
    out[HEAD_UNITS], out[HEAD_TILES] = (header[1], header[0]) if has_head else (0, 0)
    out[EMBEDDING_SMALL] = header[0] if has_embedding else 0
    out[EMBEDDING_LARGE] = header[2] if has_embedding else 0
    return LoraPlanCounts(num_tokens, *header, listed.most, has_embedding)


def _write_small(
    out: NDArray[np.int32],
    layout: _Layout,
    runs: Sequence[Run],
    listed: Pages,
    factors: NDArray[np.int32] | int,
) -> tuple[int, int, int, int, int]:
    """Writes small tiles only. Returns their number, the units, no large tiles, and the rows of
    both kinds. The device waits for it where sequences have drafts."""
    rows_of, owners_of = cut(runs, SMALL_ROWS)
    rows = np.array(rows_of, dtype=np.int32)
    offsets = listed.fields[1]
    if len(rows) > len(runs):  # some runs have several tiles, each of which lists their pages
        listed = Pages.of(tuple([tuple(runs[owner][0]) for owner in owners_of]))
        offsets = offsets[owners_of]
        if not isinstance(factors, int):
            factors = factors[offsets[listed.owners] + listed.index]
    fields, owners = listed.fields, listed.owners
    count, num_units = len(rows), len(owners)
    _check_room(layout, count, num_units, 0)
    starts = rows.cumsum(dtype=np.int32) - rows
    small_start, unit_start, *_ = layout.starts
    small = out[small_start : small_start + count * TILE_FIELDS].reshape(count, TILE_FIELDS)
    small[:, 0] = small[:, 5] = starts
    small[:, 1], small[:, 2], small[:, 3], small[:, 4] = rows, fields[0], offsets, fields[2]
    units = out[unit_start : unit_start + num_units * UNIT_FIELDS].reshape(num_units, UNIT_FIELDS)
    units[:, 0] = units[:, 4] = starts[owners]
    units[:, 1], units[:, 2], units[:, 3] = rows[owners], listed.flat, listed.index
    units[:, 5] = factors
    return count, num_units, 0, sum(rows_of), 0


def _write_both(
    out: NDArray[np.int32],
    layout: _Layout,
    runs: Sequence[Run],
    listed: Pages,
    factors: NDArray[np.int32] | int,
) -> tuple[int, int, int, int, int]:
    """Writes small and large tiles. Returns their numbers as `_write_small` does."""
    num_rows = np.array([rows for _, rows in runs], dtype=np.int64)
    fields = np.vstack((np.cumsum(num_rows) - num_rows, num_rows, listed.fields))
    is_large = num_rows >= LARGE_MIN_RUN
    big = lora_runs.tiles(fields[:, is_large], LARGE_ROWS)
    small = lora_runs.tiles(fields[:, ~is_large], SMALL_ROWS)
    units = lora_runs.units(small, listed.flat, factors)
    num_big, num_big_rows = big.shape[1], int(big[1].sum())
    _check_room(layout, small.shape[1], units.shape[1], num_big)
    small_start, unit_start, large_start, counter_start, *_ = layout.starts
    _put(out, small_start, TILE_FIELDS, small)
    _put(out, unit_start, UNIT_FIELDS, units)
    if num_big:
        _put(out, large_start, TILE_FIELDS, big)
        out[counter_start : counter_start + num_big * COUNTERS] = 0
    return small.shape[1], units.shape[1], num_big, int(small[1].sum()), num_big_rows


def _check_room(layout: _Layout, num_small: int, num_units: int, num_large: int) -> None:
    for name, count, room in (
        ("small tiles", num_small, layout.small),
        ("large tiles", num_large, layout.large),
        ("units", num_units, layout.units),
    ):
        if count > room:
            raise ValueError(f"{count} {name} in a plan for {room}")


def _put(out: NDArray[np.int32], start: int, width: int, columns: NDArray[np.int64]) -> None:
    fields, count = columns.shape
    out[start : start + count * width].reshape(count, width)[:, :fields] = columns.T


@dataclass(frozen=True, slots=True)
class LoraPlan:
    """A plan on the device, and the host's values for kernel launches."""

    header: torch.Tensor  # [HEADER_FIELDS] int32; the counts
    small: torch.Tensor  # [S, TILE_FIELDS] int32
    units: torch.Tensor  # [U, UNIT_FIELDS] int32: pages of the small tiles
    large: torch.Tensor  # [L, TILE_FIELDS] int32
    counters: torch.Tensor  # [L, COUNTERS] int32
    pages: torch.Tensor  # [P] int32
    weights: torch.Tensor  # [P] float32: the factors of the pages' deltas
    num_tokens: int
    # Upper bounds, for grids; the header has the numbers.
    max_small: int
    max_units: int
    max_large: int  # 0: no launch for large tiles
    max_small_rows: int
    max_large_rows: int
    max_rank_pages: int  # of an adapter: sizes the bridge
    has_embedding: bool  # False: no launch for the embedding
    has_affine: bool = False  # an adapter may have affine rows: kernels with another constant

    @classmethod
    def for_graph(
        cls,
        buffer: torch.Tensor,  # [lora_plan_size(max_tokens, max_pages, large=large)] int32
        num_tokens: int,
        max_tokens: int,
        max_pages: int,
        max_rank_pages: int = MAX_RANK_PAGES,
        *,
        large: bool = False,
        has_affine: bool = False,
    ) -> LoraPlan:
        """Returns the plan of a CUDA graph of `num_tokens` rows: valid for all later contents that
        `write_lora_plan` with the same `large` writes to the buffer, of adapters up to
        `max_rank_pages` pages. Rows of the graph beyond those of the step are not visited unless
        they are in a run of the base."""
        bound = _Layout.of(num_tokens, max_pages, large)
        return cls(
            *_views(buffer, _Layout.of(max_tokens, max_pages, large)),
            num_tokens,
            bound.small,
            bound.units,
            bound.large,
            num_tokens,
            num_tokens if large else 0,
            min(max_rank_pages, max_pages),
            True,
            has_affine,
        )

    @classmethod
    def for_step(
        cls,
        buffer: torch.Tensor,
        counts: LoraPlanCounts,
        max_tokens: int,
        max_pages: int,
        *,
        large: bool = True,
        has_affine: bool = False,
    ) -> LoraPlan:
        return cls(
            *_views(buffer, _Layout.of(max_tokens, max_pages, large)),
            counts.num_tokens,
            counts.num_small,
            counts.num_units,
            counts.num_large,
            counts.num_small_rows,
            counts.num_large_rows,
            counts.max_rank_pages,
            counts.has_embedding,
            has_affine,
        )


def _views(buffer: torch.Tensor, layout: _Layout) -> _Views:
    import torch

    small, units, large, counters, pages, weights, end = layout.starts
    return (
        buffer[:small],
        buffer[small:units].view(-1, TILE_FIELDS),
        buffer[units:large].view(-1, UNIT_FIELDS),
        buffer[large:counters].view(-1, TILE_FIELDS),
        buffer[counters:pages].view(-1, COUNTERS),
        buffer[pages:weights],
        buffer[weights:end].view(torch.float32),
    )


@dataclass(frozen=True, slots=True)
class Bridge:
    """x A^T of a site times the pages' weights, float32: for small tiles in planes, one per chunk
    of K, to be summed; for large tiles summed. Pages that a row does not have hold arbitrary
    values."""

    planes: torch.Tensor  # [planes, slices, rank pages, rows of small tiles, PAGE_ROWS]
    sums: torch.Tensor | None  # [slices, rank pages, rows of large tiles, PAGE_ROWS]


def read_tiles(plan: LoraPlan) -> list[tuple[int, int, list[tuple[int, float]]]]:
    """Returns first row, end row, and pages with their weights of every tile, for the references.
    Waits for the device."""
    num_small, _, num_large = plan.header[:3].tolist()
    pages = list(zip(plan.pages.tolist(), plan.weights.tolist(), strict=False))
    tiles = plan.small[:num_small].tolist() + plan.large[:num_large].tolist()
    return [(t[0], t[0] + t[1], pages[t[3] : t[3] + t[2]]) for t in tiles]

"""The arithmetic of `kernels.lora_plan`: runs of rows with equal pages, as arrays, cut into tiles.

Free of the plan's places in memory.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, repeat

import numpy as np
from numpy.typing import NDArray

Longs = NDArray[np.int64]
Run = tuple[Sequence[int], int]  # pages of the adapter, () for the base; rows


@dataclass(frozen=True, slots=True)
class Pages:
    """The pages of the runs of a step, or of its tiles. Steps of the same sequences share them,
    also where no more than the padding is cut."""

    flat: NDArray[np.int32]  # of all runs
    fields: Longs  # [3, R]: pages of each run, their offset in `flat`, the first page
    owners: Longs  # the run of each page
    index: Longs  # the place of each page in its run
    most: int  # pages of a run

    @classmethod
    @functools.lru_cache(maxsize=16)
    def of(cls, runs: tuple[tuple[int, ...], ...]) -> Pages:
        counts = np.array([len(pages) for pages in runs], dtype=np.int64)
        first = np.array([pages[0] if pages else 0 for pages in runs], dtype=np.int64)
        flat = np.array(list(chain.from_iterable(runs)), dtype=np.int32)
        fields = np.stack((counts, np.cumsum(counts) - counts, first))
        return cls(flat, fields, *spread(counts), max(map(len, runs), default=0))


def merge(
    runs: Sequence[Run], weights: Sequence[Sequence[float]] | None
) -> tuple[list[Run], list[Sequence[float]]]:
    """Merges neighbours with equal pages and weights."""
    merged: list[Run] = []
    merged_weights: list[Sequence[float]] = []
    last: Sequence[int] | None = None
    for (pages, rows), own in zip(runs, repeat(()) if weights is None else weights, strict=False):
        if rows == 0:
            continue
        if pages == last and own == merged_weights[-1]:
            merged[-1] = (pages, merged[-1][1] + rows)
        else:
            merged.append((pages, rows))
            merged_weights.append(own)
            last = pages
    return merged, merged_weights


def cut(runs: Sequence[Run], height: int) -> tuple[list[int], list[int]]:
    """Cuts runs into tiles of at most `height` rows. Returns the rows and the run of each. It is
    faster than `tiles` where few runs are cut."""
    rows_of: list[int] = []
    owners: list[int] = []
    for number, (_, rows) in enumerate(runs):
        while rows > height:
            rows_of.append(height)
            owners.append(number)
            rows -= height
        rows_of.append(rows)
        owners.append(number)
    return rows_of, owners


def tiles(runs: Longs, height: int) -> Longs:
    """Cuts runs [fields, R] into tiles of at most `height` rows."""
    found = runs
    if runs.shape[1] and runs[1].max() > height:
        num_tiles = -(-runs[1] // height)
        found = np.repeat(runs, num_tiles, axis=1)
        done = count_within(num_tiles) * height
        found[0] += done
        found[1] = np.minimum(found[1] - done, height)
    return np.vstack((found, np.cumsum(found[1]) - found[1]))


def units(of_tiles: Longs, pages: NDArray[np.int32], weights: NDArray[np.int32] | int) -> Longs:
    """Returns every page of every tile, with the fields of a unit. `weights`: bits of each page's,
    or of all."""
    owners, index = spread(of_tiles[2])
    at = of_tiles[3][owners] + index
    found = np.empty((6, len(index)), dtype=np.int64)
    found[[0, 1, 4]] = of_tiles[[0, 1, 5]][:, owners]
    found[2] = pages[at]
    found[3] = index
    found[5] = weights if isinstance(weights, int) else weights[at]
    return found


def spread(counts: Longs) -> tuple[Longs, Longs]:
    """Returns, of each page, the number of its owner and its place among the owner's pages."""
    return np.repeat(np.arange(len(counts)), counts), count_within(counts)


def count_within(lengths: Longs) -> Longs:
    """Counts within runs: [2, 0, 3] -> [0, 1, 0, 1, 2]."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - lengths, lengths)

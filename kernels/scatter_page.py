"""One packed page of an adapter, spread over the rank rows of all sites: one launch, not hundreds.

    image = table of one int64 per strip of the base | strip | strip | ...

A strip is the page's 16 rows of one matrix, in the pool's layout. The table holds the start of each
strip in the image, in words of 4 bytes; 0 (the table's own position) means that the adapter has no
such strip, and its rows become zeros. Copies bits: exact in every type.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.backend import uses_triton

WORD_BYTES = 4
TILE_WORDS = 2048  # words per program


@dataclass(frozen=True, slots=True)
class PagePlan:
    """The destinations of strips. The pools must stay in place while it is used."""

    pools: tuple[torch.Tensor, ...]  # each [rows, width], contiguous
    entries: tuple[int, ...]  # of each pool: its place in the image's table
    page_rows: int
    tiles: torch.Tensor | None  # [num_tiles, 5] int64: entry, address, page stride, offset, count


def plan_pages(pools: Sequence[torch.Tensor], entries: Sequence[int], page_rows: int) -> PagePlan:
    tiles = _tiles(pools, entries, page_rows) if pools and uses_triton(pools[0]) else None
    return PagePlan(tuple(pools), tuple(entries), page_rows, tiles)


def scatter_page_(image: torch.Tensor, plan: PagePlan, page: int) -> None:
    """Scatters image [bytes] uint8, on the pools' device, in the form above."""
    if plan.tiles is None:
        scatter_page_reference(image, plan, page)
        return
    from kernels.triton_scatter_page import launch_scatter_page

    launch_scatter_page(image, plan.tiles, page, TILE_WORDS)


def scatter_page_reference(image: torch.Tensor, plan: PagePlan, page: int) -> None:
    table = image[: 8 * (1 + max(plan.entries, default=-1))].view(torch.int64).tolist()
    for pool, entry in zip(plan.pools, plan.entries, strict=True):
        rows = pool[page * plan.page_rows : (page + 1) * plan.page_rows]
        start = table[entry] * WORD_BYTES
        if start == 0:
            rows.zero_()
        else:
            strip = image[start : start + rows.numel() * rows.element_size()]
            rows.copy_(strip.view(rows.dtype).view_as(rows))


def _tiles(pools: Sequence[torch.Tensor], entries: Sequence[int], page_rows: int) -> torch.Tensor:
    found: list[tuple[int, int, int, int, int]] = []
    for pool, entry in zip(pools, entries, strict=True):
        assert pool.is_contiguous()
        stride = page_rows * pool.shape[1] * pool.element_size()
        num_words = stride // WORD_BYTES
        assert num_words * WORD_BYTES == stride
        found += [
            (
                entry,
                pool.data_ptr() + start * WORD_BYTES,
                stride,
                start,
                min(TILE_WORDS, num_words - start),
            )
            for start in range(0, num_words, TILE_WORDS)
        ]
    return torch.tensor(found, dtype=torch.int64).to(pools[0].device)

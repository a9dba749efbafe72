"""The rank rows of every site on the device: page p is rows [16 p, 16 p + 16) of all of them.

One allocation per site and side, which never moves: CUDA graphs hold its address. The owners of
pages are tracked elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from kernels.scatter_page import PagePlan, plan_pages, scatter_page_
from lora.page_image import PAGE_ROWS, PageLayout, Strip
from lora.sites import Site


@dataclass(frozen=True, slots=True)
class SitePool:
    """The rank rows of one site on the device."""

    a: torch.Tensor  # [slices, rows, K]
    b: tuple[torch.Tensor, ...]  # one [rows, N_s] per slice


class PagePools:
    def __init__(
        self, sites: Sequence[Site], layout: PageLayout, num_pages: int, device: torch.device
    ) -> None:
        self._sites = {site.name: site for site in sites}
        self._layout = layout
        self._num_rows = num_pages * PAGE_ROWS
        self._device = device
        self._pools = {site.name: self._allocate(site) for site in sites if not site.is_optional}
        self._plan = self._make_plan()

    def site_pool(self, name: str) -> SitePool | None:
        """Returns None for an optional site that no adapter has targeted yet."""
        return self._pools.get(name)

    def add_sites(self, names: Iterable[str]) -> None:
        """Allocates sites. Their rows of pages in use are zeros: no adapter in these pages targets
        them."""
        missing = [name for name in names if name not in self._pools]
        if missing:
            self._pools |= {name: self._allocate(self._sites[name]) for name in missing}
            self._plan = self._make_plan()

    def write(self, image: torch.Tensor, page: int) -> None:
        """Writes every row of the page in every site; on CUDA on the current stream."""
        scatter_page_(image, self._plan, page)

    def _make_plan(self) -> PagePlan:
        strips = [(i, s) for i, s in enumerate(self._layout.strips) if s.site in self._pools]
        rows = [self._rows(strip) for _, strip in strips]
        return plan_pages(rows, [entry for entry, _ in strips], PAGE_ROWS)

    def _rows(self, strip: Strip) -> torch.Tensor:
        pool = self._pools[strip.site]
        return pool.a[strip.index] if strip.side == "a" else pool.b[strip.index]

    def _allocate(self, site: Site) -> SitePool:
        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=self._layout.dtype, device=self._device)

        return SitePool(
            zeros(len(site.slices), self._num_rows, site.in_features),
            tuple(zeros(self._num_rows, part.out_features) for part in site.slices),
        )

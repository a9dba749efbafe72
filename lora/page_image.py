"""The layout of an adapter in host memory: one image per page, the 16 rows of every matrix it
adapts.

An image begins with a table of the strips' positions (`kernels/scatter_page.py` defines the form);
modules that the adapter does not target use no room. Packing casts to the pool's type and checks
for overflow: slow work for any thread. Free of devices and residency.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from kernels.scatter_page import WORD_BYTES
from lora.adapter import Adapter, ModuleWeights
from lora.errors import AdapterError
from lora.sites import Site

PAGE_ROWS = 16
_ALIGNMENT = 256  # alignment of the strips after the table


@dataclass(frozen=True, slots=True)
class Strip:
    """A matrix of the base of which a page has rows. Its place in the layout is its entry."""

    site: str
    index: int  # slice index
    module: str
    side: Literal["a", "b"]
    width: int


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """An adapter in the form of its pages: rank padded with zero rows, in the pool's type."""

    digest: str
    images: tuple[torch.Tensor, ...]  # one [bytes] uint8 per page
    optional_sites: tuple[str, ...]  # its sites whose pools are made when first needed

    @property
    def num_pages(self) -> int:
        return len(self.images)

    @property
    def num_bytes(self) -> int:
        return sum(image.numel() for image in self.images)


class PageLayout:
    def __init__(self, sites: Sequence[Site], dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._largest = torch.finfo(dtype).max
        self.strips = tuple(strip for site in sites for strip in _strips(site))
        self._optional = tuple(site.name for site in sites if site.is_optional)
        self._table_bytes = -(-8 * len(self.strips) // _ALIGNMENT) * _ALIGNMENT

    @property
    def page_bytes(self) -> int:
        """The bytes of the rows of one page in all sites."""
        return sum(self._strip_bytes(strip) for strip in self.strips)

    @property
    def max_image_bytes(self) -> int:
        return self._table_bytes + self.page_bytes

    def pack(self, adapter: Adapter, allocate: Callable[[int], torch.Tensor]) -> PackedAdapter:
        """Packs an adapter. `allocate` returns host memory of a given size, with any content."""
        entries = [i for i, strip in enumerate(self.strips) if strip.module in adapter.modules]
        table = torch.zeros(len(self.strips), dtype=torch.int64)
        end = self._table_bytes
        for entry in entries:
            table[entry] = end // WORD_BYTES
            end += self._strip_bytes(self.strips[entry])
        num_pages = -(-adapter.rank // PAGE_ROWS)
        images = tuple(allocate(end) for _ in range(num_pages))
        for page, image in enumerate(images):
            image[: self._table_bytes].zero_()
            image[: 8 * len(self.strips)].copy_(table.view(torch.uint8))
            for entry in entries:
                self._fill(image, int(table[entry]), self.strips[entry], adapter, page)
        sites = {self.strips[entry].site for entry in entries}
        return PackedAdapter(
            adapter.digest, images, tuple(name for name in self._optional if name in sites)
        )

    def _fill(
        self, image: torch.Tensor, word: int, strip: Strip, adapter: Adapter, page: int
    ) -> None:
        start = word * WORD_BYTES
        here = image[start : start + self._strip_bytes(strip)]
        rows = here.view(self.dtype).view(PAGE_ROWS, strip.width)
        weights = _side(adapter.modules[strip.module], strip)[PAGE_ROWS * page :][:PAGE_ROWS]
        # A tenth of the time of isfinite. NaN is in neither range.
        low, high = weights.aminmax() if len(weights) else (self._largest, self._largest)
        if not (low >= -self._largest and high <= self._largest):
            raise AdapterError(
                f"lora_{strip.side.upper()} of {strip.module}, with its scale, overflows "
                f"{self.dtype}"
            )
        rows[: len(weights)].copy_(weights)
        rows[len(weights) :].zero_()

    def _strip_bytes(self, strip: Strip) -> int:
        return PAGE_ROWS * strip.width * self.dtype.itemsize


def _strips(site: Site) -> list[Strip]:
    found: list[Strip] = []
    for index, part in enumerate(site.slices):
        found.append(Strip(site.name, index, part.module, "a", site.in_features))
        found.append(Strip(site.name, index, part.module, "b", part.out_features))
    return found


def _side(weights: ModuleWeights, strip: Strip) -> torch.Tensor:
    return weights.a if strip.side == "a" else weights.b

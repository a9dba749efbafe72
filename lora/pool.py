"""Adapters in memory: all known ones packed on the host, those in use in pages on the device.

Per site one pool of A rows and, per slice, one of B rows; page p is rows [16 p, 16 p + 16) of
every one of them, so a single page table serves all layers and ranks never pad to a maximum. Knows
digests and tensors; names of adapters, requests and files are not known here. One thread calls it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lora.adapter import Adapter
from lora.errors import (
    AdapterError,
    AdapterNotLoadedError,
    AdapterTooLargeError,
    HostMemoryError,
)
from lora.pages import PageTable
from lora.sites import Site

PAGE_ROWS = 16


@dataclass(frozen=True, slots=True)
class SitePool:
    """Rank rows of one site on the device."""

    a: torch.Tensor  # [slices, rows, K]
    b: tuple[torch.Tensor, ...]  # one [rows, N_s] a slice


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """An adapter as its pages will look: rank padded with zero rows, in the pool's type."""

    sites: dict[str, SitePool]  # targeted sites only
    num_pages: int
    num_bytes: int


class AdapterPool:
    def __init__(
        self,
        sites: Sequence[Site],
        bytes_budget: int,
        dtype: torch.dtype,
        device: torch.device | str,
        host_bytes: int,
    ) -> None:
        self.dtype = dtype
        self.device = torch.device(device)
        self._sites = {site.name: site for site in sites}
        # The optional sites are counted from the start though allocated late: the budget holds
        # whichever adapters arrive.
        self.page_bytes = PAGE_ROWS * dtype.itemsize * sum(site.num_row_elements for site in sites)
        self._table = PageTable(bytes_budget // self.page_bytes)
        self._pools = {site.name: self._allocate(site) for site in sites if not site.is_optional}
        self._host: OrderedDict[str, PackedAdapter] = OrderedDict()  # least recently used first
        self._host_limit = host_bytes
        self._leaving: set[str] = set()  # removed while referenced

    @property
    def num_pages(self) -> int:
        return self._table.num_pages

    @property
    def num_free_pages(self) -> int:
        return self._table.num_free

    @property
    def host_bytes_used(self) -> int:
        return sum(packed.num_bytes for packed in self._host.values())

    def has(self, digest: str) -> bool:
        """False for an adapter never added, removed, or dropped when the host tier was full."""
        return digest in self._host and digest not in self._leaving

    def add(self, adapter: Adapter) -> tuple[str, ...]:
        """Keeps it on the host. Returns the digests that were dropped to make room."""
        self._leaving.discard(adapter.digest)
        if adapter.digest in self._host:
            return ()
        packed = self._pack(adapter)
        dropped = self._make_host_room(packed.num_bytes)
        for name in packed.sites:
            if name not in self._pools:
                self._pools[name] = self._allocate(self._sites[name])
        self._host[adapter.digest] = packed
        return dropped

    def remove(self, digest: str) -> bool:
        """False: still referenced; it accepts no new reference and goes with the last one."""
        if digest not in self._host:
            return True
        if self._table.num_references(digest):
            self._leaving.add(digest)
            return False
        self._forget(digest)
        return True

    def acquire(self, digest: str) -> bool:
        """Makes the adapter resident and takes a reference. False: all pages are in use."""
        if not self.has(digest):
            raise AdapterNotLoadedError(f"adapter {digest} is not loaded")
        packed = self._host[digest]
        placement = self._table.acquire(digest, packed.num_pages)
        if placement is None:
            return False
        self._host.move_to_end(digest)
        if placement.is_new:
            self._write(packed, placement.pages)
        return True

    def release(self, digest: str) -> None:
        self._table.release(digest)
        if digest in self._leaving and self._table.num_references(digest) == 0:
            self._forget(digest)

    def pin(self, digest: str) -> None:
        """A pinned adapter is dropped from neither tier."""
        if not self.has(digest):
            raise AdapterNotLoadedError(f"adapter {digest} is not loaded")
        self._table.pin(digest)

    def unpin(self, digest: str) -> None:
        self._table.unpin(digest)

    def pages(self, digest: str) -> tuple[int, ...]:
        return self._table.pages(digest)

    def on_device(self) -> tuple[str, ...]:
        return self._table.resident()

    def on_host(self) -> tuple[str, ...]:
        """All that can be acquired; those on the device are among them."""
        return tuple(digest for digest in self._host if digest not in self._leaving)

    def site_pool(self, name: str) -> SitePool | None:
        """None: an optional site that no adapter has targeted yet."""
        return self._pools.get(name)

    def _forget(self, digest: str) -> None:
        self._leaving.discard(digest)
        self._table.unpin(digest)
        if digest in self._table.resident():
            self._table.drop(digest)
        del self._host[digest]

    def _make_host_room(self, num_bytes: int) -> tuple[str, ...]:
        """Drops idle adapters, least recently used first, those on the device last."""
        idle = [digest for digest in self._host if self._table.is_evictable(digest)]
        resident = set(self._table.resident())
        room = self._host_limit - self.host_bytes_used
        dropped: list[str] = []
        for digest in sorted(idle, key=lambda d: d in resident):  # stable: LRU within each
            if room >= num_bytes:
                break
            room += self._host[digest].num_bytes
            dropped.append(digest)
        if room < num_bytes:
            raise HostMemoryError(
                f"the adapter needs {num_bytes} bytes of host memory; of {self._host_limit} only "
                f"{room} are free or idle"
            )
        for digest in dropped:
            self._forget(digest)
        return tuple(dropped)

    def _pack(self, adapter: Adapter) -> PackedAdapter:
        num_pages = -(-adapter.rank // PAGE_ROWS)
        if num_pages > self.num_pages:
            raise AdapterTooLargeError(
                f"adapter {adapter.digest} of rank {adapter.rank} needs {num_pages} pages of "
                f"{self.page_bytes} bytes; the whole pool has {self.num_pages}"
            )
        sites = {
            site.name: self._pack_site(adapter, site, num_pages * PAGE_ROWS)
            for site in self._sites.values()
            if any(part.module in adapter.modules for part in site.slices)
        }
        num_bytes = sum(
            tensor.numel() * tensor.element_size()
            for packed in sites.values()
            for tensor in (packed.a, *packed.b)
        )
        return PackedAdapter(sites, num_pages, num_bytes)

    def _pack_site(self, adapter: Adapter, site: Site, rows: int) -> SitePool:
        packed = self._empty_site(site, rows, torch.device("cpu"))
        for index, part in enumerate(site.slices):
            weights = adapter.modules.get(part.module)
            if weights is None:
                continue
            packed.a[index, : weights.rank].copy_(weights.a)
            packed.b[index][: weights.rank].copy_(weights.b)
            for name, tensor in (("lora_A", packed.a[index]), ("lora_B", packed.b[index])):
                if not bool(tensor.isfinite().all()):
                    raise AdapterError(
                        f"{name} of {part.module}, with its scale, overflows {self.dtype}"
                    )
        return packed

    def _write(self, packed: PackedAdapter, pages: tuple[int, ...]) -> None:
        """Fills the pages in every site, with zeros where the adapter targets nothing."""
        for name, pool in self._pools.items():
            source = packed.sites.get(name)
            for i, page in enumerate(pages):
                there = slice(page * PAGE_ROWS, (page + 1) * PAGE_ROWS)
                here = slice(i * PAGE_ROWS, (i + 1) * PAGE_ROWS)
                if source is None:
                    pool.a[:, there].zero_()
                    for b in pool.b:
                        b[there].zero_()
                    continue
                pool.a[:, there].copy_(source.a[:, here], non_blocking=True)
                for b, source_b in zip(pool.b, source.b, strict=True):
                    b[there].copy_(source_b[here], non_blocking=True)

    def _allocate(self, site: Site) -> SitePool:
        return self._empty_site(site, self.num_pages * PAGE_ROWS, self.device)

    def _empty_site(self, site: Site, rows: int, device: torch.device) -> SitePool:
        # What goes to a CUDA device waits in pinned memory: its copies then need no staging.
        pinned = device.type == "cpu" and self.device.type == "cuda"

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=self.dtype, device=device, pin_memory=pinned)

        return SitePool(
            zeros(len(site.slices), rows, site.in_features),
            tuple(zeros(rows, part.out_features) for part in site.slices),
        )

"""Small sites, adapters of integers (sums are exact), pools on the CPU, and copies by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from lora.adapter import Adapter, ModuleWeights
from lora.copies import Copier, Event
from lora.page_image import PageLayout
from lora.pool import AdapterPool
from lora.sites import Site, Slice
from tests.fakes import FakeRunner

QKV = Site("qkv", 6, (Slice("q", 4), Slice("k", 2)))
DOWN = Site("down", 5, (Slice("down", 6),))
HEAD = Site("lm_head", 6, (Slice("lm_head", 9),))
EMBEDDING = Site("embed_tokens", 9, (Slice("embed", 6),), "embedding")
SITES = (QKV, DOWN, HEAD, EMBEDDING)
SHAPES = {
    part.module: (site.in_features, part.out_features) for site in SITES for part in site.slices
}
BLOCK_BYTES = PageLayout(SITES, torch.float32).bytes_per_block  # each adapter fits: one a page


def make_adapter(digest: str, modules: Mapping[str, int] | None = None) -> Adapter:
    """`modules`: rank of each; integers, so that sums are exact."""
    generator = torch.Generator().manual_seed(int.from_bytes(digest.encode()[:6], "big"))
    modules = modules or {"q": 3, "down": 3}
    weights = {}
    for module, rank in modules.items():
        k, n = SHAPES[module]
        a = torch.randint(-3, 4, (rank, k), generator=generator).float()
        b = torch.randint(-3, 4, (rank, n), generator=generator).float()
        weights[module] = ModuleWeights(a, b)
    return Adapter(digest, max(modules.values()), weights, 0, False)


def make_pool(
    num_blocks: int = 4,
    host_bytes: int = 1 << 20,
    dtype: torch.dtype = torch.float32,
    copier: Copier | None = None,
) -> AdapterPool:
    return AdapterPool(SITES, num_blocks * BLOCK_BYTES, dtype, "cpu", host_bytes, copier=copier)


def loaded(
    *digests: str,
    num_blocks: int = 4,
    host_bytes: int = 1 << 20,
    copier: Copier | None = None,
) -> AdapterPool:
    pool = make_pool(num_blocks, host_bytes, copier=copier)
    for digest in digests:
        pool.add(make_adapter(digest))
    return pool


def acquire_and_release(pool: AdapterPool, digest: str) -> bool:
    if not pool.acquire(digest):
        return False
    pool.release(digest)
    return True


# Of rank 3 on q and down: strips of 256 bytes each, and a row of the table.
ADAPTER_BYTES = 4 * 256 + 8 * 16


def rows_in_pool(pool: AdapterPool, adapter: Adapter) -> bool:
    """Returns True if the adapter's blocks hold its q, and no row beyond its rank."""
    found = [
        strip for page in pool.pages(adapter.digest) if (strip := q_strip(pool, page)) is not None
    ]
    return torch.equal(torch.cat(found), adapter.modules["q"].a)


def q_strip(pool: AdapterPool, page: int) -> torch.Tensor | None:
    return pool.site_rows("qkv").a(page, 0)


class HandEvent:
    """The end of a copy, when the test says so or when somebody waits for it. The copy itself is
    as late as it can be."""

    def __init__(self, write: Callable[[], None] | None, before: HandEvent | None) -> None:
        self._write = write
        self._before = before  # the copy before this one, which ends first

    def query(self) -> bool:
        return self._write is None

    def synchronize(self) -> None:
        if self._before is not None:
            self._before.synchronize()
        if self._write is not None:
            self._write()
            self._write = None


class HandCopier:
    max_bytes = 1 << 60

    def __init__(self, max_flying: int = 1) -> None:
        self.max_flying = max_flying
        self.last: HandEvent | None = None
        self.after: list[Event | None] = []  # of each copy, what it waits for
        self.marks: list[Event] = []

    def mark_steps(self) -> Event:
        self.marks.append(HandEvent(None, None))
        return self.marks[-1]

    def copy(self, write: Callable[[], None], after: Event | None) -> HandEvent:
        self.after.append(after)
        self.last = self.make_event(write)
        return self.last

    def make_event(self, write: Callable[[], None]) -> HandEvent:
        return HandEvent(write, self.last)

    def end(self) -> None:
        """Ends all copies that have begun."""
        if self.last is not None:
            self.last.synchronize()


class QuickCopier(HandCopier):
    """A copier whose copies have ended before anybody looks."""

    def copy(self, write: Callable[[], None], after: Event | None) -> HandEvent:
        event = super().copy(write, after)
        event.synchronize()
        return event


class RunnerWithPool(FakeRunner):
    """No tensors but those of a real adapter pool."""

    adapters: AdapterPool  # type: ignore[assignment]

    def __init__(self, pool: AdapterPool, num_blocks: int = 64) -> None:
        super().__init__(num_blocks)
        self.adapters = pool

"""Small sites, adapters of integers (sums are exact), pools on the CPU, and slots by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from lora.adapter import Adapter, ModuleWeights
from lora.pool import PAGE_ROWS, AdapterPool
from lora.sites import Site, Slice
from lora.staging import StagingSlot
from tests.fakes import FakeRunner

QKV = Site("qkv", 6, (Slice("q", 4), Slice("k", 2)))
DOWN = Site("down", 5, (Slice("down", 6),))
HEAD = Site("lm_head", 6, (Slice("lm_head", 9),))
EMBEDDING = Site("embed_tokens", 9, (Slice("embed", 6),), "embedding")
SITES = (QKV, DOWN, HEAD, EMBEDDING)
SHAPES = {
    part.module: (site.in_features, part.out_features) for site in SITES for part in site.slices
}
PAGE_BYTES = 4 * PAGE_ROWS * sum(site.num_row_elements for site in SITES)


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
    num_pages: int = 4,
    host_bytes: int = 1 << 20,
    dtype: torch.dtype = torch.float32,
    slots: Sequence[StagingSlot] | None = None,
) -> AdapterPool:
    return AdapterPool(SITES, num_pages * PAGE_BYTES, dtype, "cpu", host_bytes, slots=slots)


def loaded(
    *digests: str,
    num_pages: int = 4,
    host_bytes: int = 1 << 20,
    slots: Sequence[StagingSlot] | None = None,
) -> AdapterPool:
    pool = make_pool(num_pages, host_bytes, slots=slots)
    for digest in digests:
        pool.add(make_adapter(digest))
    return pool


def acquire_and_release(pool: AdapterPool, digest: str) -> bool:
    if not pool.acquire(digest):
        return False
    pool.release(digest)
    return True


ADAPTER_BYTES = 256 + 4 * PAGE_ROWS * (6 + 4 + 5 + 6)  # one page: table, q, down


def rows_in_pool(pool: AdapterPool, adapter: Adapter) -> bool:
    rows = [p * PAGE_ROWS + r for p in pool.pages(adapter.digest) for r in range(PAGE_ROWS)]
    there = pool.site_pool("qkv")
    assert there is not None
    return torch.equal(there.a[0, rows[: adapter.rank]], adapter.modules["q"].a)


class HandSlot:
    """A slot whose copy ends when the test says so, or when somebody waits for it."""

    def __init__(self) -> None:
        self.is_over = False
        self._image: torch.Tensor | None = None

    def fill(self, image: torch.Tensor) -> None:
        self._image = image
        self.is_over = False

    def is_filled(self) -> bool:
        return self.is_over

    def wait(self) -> None:
        self.is_over = True

    def empty(self, write: Callable[[torch.Tensor], None]) -> None:
        assert self.is_over
        assert self._image is not None
        write(self._image)


class QuickSlot(HandSlot):
    """A slot whose copy has ended before anybody looks."""

    def fill(self, image: torch.Tensor) -> None:
        super().fill(image)
        self.is_over = True


class RunnerWithPool(FakeRunner):
    """No tensors but those of a real adapter pool."""

    adapters: AdapterPool  # type: ignore[assignment]

    def __init__(self, pool: AdapterPool, num_blocks: int = 64) -> None:
        super().__init__(num_blocks)
        self.adapters = pool

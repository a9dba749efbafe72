"""The pool on a CUDA device: steps' reads while blocks change owners, and that no call blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from kernels.lora_shrink_expand import EmbeddingDelta
from lora.adapter import Adapter
from lora.page_image import PageLayout
from lora.pinned_memory import PinnedMemory
from lora.pool import AdapterPool
from tests.lora_helpers import ADAPTER_BYTES, BLOCK_BYTES, SITES, make_adapter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SLEEP_CYCLES = 1_000_000_000  # 500 ms: other processes may take turns on the device


def cuda_pool(
    num_blocks: int = 3,
    dtype: torch.dtype = torch.float32,
    stream: torch.cuda.Stream | None = None,
) -> AdapterPool:
    size = num_blocks * PageLayout(SITES, dtype).bytes_per_block
    return AdapterPool(SITES, size, dtype, "cuda", 1 << 30, stream)


def bring(pool: AdapterPool, digest: str) -> None:
    while not pool.acquire(digest):
        assert pool.has_pending_copies()
        pool.wait_pending()


def page_rows(pool: AdapterPool, digest: str) -> dict[str, torch.Tensor]:
    """Reads the rows as a step would: copies, launched now."""
    found: dict[str, list[torch.Tensor]] = {}
    deltas = pool.deltas(digest)
    for site in SITES:
        for delta in deltas.get(site.name, ()):
            if isinstance(delta, EmbeddingDelta):
                (part,) = site.slices
                found.setdefault(f"{part.module}.b", []).append(delta.b.clone())
                continue
            part = site.slices[delta.index]
            found.setdefault(f"{part.module}.a", []).append(delta.a.clone())
            ((_, b),) = delta.b
            found.setdefault(f"{part.module}.b", []).append(b.clone())
    return {name: torch.cat(some) for name, some in found.items()}


def assert_holds(rows: dict[str, torch.Tensor], adapter: Adapter) -> None:
    assert {name.rsplit(".", 1)[0] for name in rows} == set(adapter.modules)
    for name, tensor in rows.items():
        module, side = name.rsplit(".", 1)
        weights = adapter.modules[module]
        expected = weights.a if side == "a" else weights.b
        assert torch.equal(tensor.cpu().float(), expected), name


@contextmanager
def no_synchronization() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("modules", [{"q": 3}, {"k": 20, "down": 40}, {"embed": 16, "q": 1}])
def test_blocks_hold_the_adapter(dtype: torch.dtype, modules: dict[str, int]) -> None:
    pool = cuda_pool(dtype=dtype)
    pool.add(make_adapter("full", {"q": 48, "k": 48, "down": 48, "lm_head": 48, "embed": 48}))
    bring(pool, "full")
    pool.release("full")
    adapter = make_adapter("a", modules)
    pool.add(adapter)
    bring(pool, "a")
    assert_holds(page_rows(pool, "a"), adapter)


@pytest.mark.parametrize("own_stream", [False, True])
def test_a_step_in_flight_keeps_its_pages(own_stream: bool) -> None:
    stream = torch.cuda.Stream() if own_stream else None  # type: ignore[no-untyped-call]
    pool = cuda_pool(1, stream=stream)
    adapters = {name: make_adapter(name, {"q": 16, "down": 16}) for name in ("a", "b")}
    for adapter in adapters.values():
        pool.add(adapter)
    bring(pool, "a")
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
        in_flight = page_rows(pool, "a")
    pool.release("a")
    bring(pool, "b")
    with torch.cuda.stream(stream):
        after = page_rows(pool, "b")
    torch.cuda.synchronize()
    assert_holds(in_flight, adapters["a"])
    assert_holds(after, adapters["b"])


def test_nothing_waits_while_steps_run() -> None:
    pool = cuda_pool(2)
    for name in ("a", "b", "c"):
        pool.add(make_adapter(name))
    bring(pool, "c")  # the side stream's first copy takes longer
    pool.release("c")
    running = torch.cuda.Event()  # type: ignore[no-untyped-call]
    with no_synchronization():
        torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
        running.record()
        assert not pool.acquire("a")
        pool.prefetch(["b"])
    assert not running.query()  # type: ignore[no-untyped-call]
    pool.wait_pending()  # for the copy, not for the step
    assert pool.acquire("a")
    assert not running.query()  # type: ignore[no-untyped-call]


def test_adapters_that_cycle_through_too_few_pages_are_always_right() -> None:
    pool = cuda_pool(3, torch.bfloat16)
    adapters = [
        make_adapter(f"x{i}", {"q": 1 + 7 * i % 40, "down": 3, "lm_head": 1 + i % 2})
        for i in range(8)
    ]
    for adapter in adapters:
        pool.add(adapter)
    seen = []
    for turn in range(120):
        adapter = adapters[turn * 5 % 8]
        pool.prefetch([adapters[(turn + 1) * 5 % 8].digest])
        bring(pool, adapter.digest)
        torch.cuda._sleep(20_000)  # type: ignore[no-untyped-call]
        seen.append((page_rows(pool, adapter.digest), adapter))
        pool.release(adapter.digest)
    for rows, adapter in seen:
        assert_holds(rows, adapter)


def test_a_removed_adapter_leaves_its_pages_to_others() -> None:
    pool = cuda_pool(1)
    adapters = {name: make_adapter(name) for name in ("a", "b")}
    for adapter in adapters.values():
        pool.add(adapter)
    assert not pool.acquire("a")
    assert pool.remove("a")
    bring(pool, "b")
    assert_holds(page_rows(pool, "b"), adapters["b"])


def test_page_locked_memory_is_used_again_when_its_tensor_is_gone() -> None:
    memory = PinnedMemory(bytes_to_keep=1 << 20)
    first = memory.allocate(5000)
    address, part = first.data_ptr(), first[:8]
    assert memory.allocate(5000).data_ptr() != address
    del first
    assert memory.num_bytes == 2 * 8192
    again = [memory.allocate(7000), memory.allocate(8000)]
    assert memory.num_bytes == 2 * 8192
    assert address in [tensor.data_ptr() for tensor in again]
    assert part.data_ptr() == address


def test_page_locked_memory_beyond_what_is_kept_is_given_back() -> None:
    memory = PinnedMemory(bytes_to_keep=3 * 4096)
    held = [memory.allocate(4096) for _ in range(4)]
    assert memory.num_bytes == 4 * 4096
    del held[1:]
    assert memory.num_bytes == 3 * 4096
    large = memory.allocate(3 * 4096)  # the small ones make room
    assert memory.num_bytes == 4 * 4096
    del held, large
    for _ in range(20):  # registered again at the same addresses
        other = PinnedMemory(bytes_to_keep=1 << 30)
        assert other.allocate(1 << 20).numel() == 1 << 20


def test_a_copy_from_page_locked_memory_does_not_wait_for_the_work_before_it() -> None:
    image = PinnedMemory(bytes_to_keep=0).allocate(8 << 20).fill_(7)
    there = torch.zeros(8 << 20, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
    before = torch.cuda.Event()  # type: ignore[no-untyped-call]
    before.record()
    there.copy_(image, non_blocking=True)
    assert not before.query()  # type: ignore[no-untyped-call]
    assert bool((there == 7).all())


def test_a_host_tier_that_is_full_takes_no_more_memory() -> None:
    pool = AdapterPool(SITES, 3 * BLOCK_BYTES, torch.float32, "cuda", 3 * ADAPTER_BYTES)
    for i in range(20):
        adapter = make_adapter(f"x{i}")
        pool.add(adapter)
        bring(pool, adapter.digest)
        rows = page_rows(pool, adapter.digest)
        pool.release(adapter.digest)
        assert_holds(rows, adapter)
    assert len(pool.on_host()) < 20

"""The memory of adapters without a configured size; on a GPU also the report of torch."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from engine.config import EngineConfig
from engine.device_memory import (
    adapter_budgets,
    check_asked_memory,
    explain_out_of_memory,
    look_at_empty_device,
    peak_bytes,
)
from engine.device_step import DeviceSteps
from engine.errors import EngineMemoryError
from engine.memory_plan import GIB, check_asked
from lora.page_image import PAGE_ROWS, PageLayout
from lora.sites import Site, Slice

SITES = (Site("o", 4096, (Slice("o", 4096),)),)
CPU = torch.device("cpu")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_the_configured_sizes_are_taken_as_they_are() -> None:
    config = EngineConfig("/nowhere", "base", adapter_pool_bytes=5, adapter_host_bytes=6)
    budgets = adapter_budgets(config, SITES, torch.float32, CPU, 0)
    assert budgets == (5, 6)


def test_a_cpu_spares_a_quarter_of_a_gib_for_the_pool() -> None:
    budgets = adapter_budgets(EngineConfig("/nowhere", "base"), SITES, torch.float32, CPU, 0)
    assert budgets == (GIB // 4, 4 * GIB)


@pytest.mark.parametrize(
    "field", ["kv_cache_bytes", "kv_host_bytes", "adapter_pool_bytes", "adapter_host_bytes"]
)
def test_a_size_beyond_the_machine_is_refused_before_anything_is_loaded(field: str) -> None:
    """The folder does not even exist: nothing was read."""
    has = r"this machine has [0-9.]+ GiB of memory"
    config = EngineConfig("/nowhere", "base", device="cpu", **{field: 9000 * GIB})  # type: ignore[arg-type]
    with pytest.raises(EngineMemoryError, match=rf"^{field} is 9000.000 GiB, but {has}$"):
        check_asked_memory(config, CPU)
    check_asked_memory(EngineConfig("/nowhere", "base", device="cpu", **{field: 1}), CPU)  # type: ignore[arg-type]


def test_text_for_drafts_counts_where_an_engine_speculates() -> None:
    asked = EngineConfig("/nowhere", "base", device="cpu", suffix_cache_bytes=9000 * GIB)
    check_asked_memory(asked, CPU)
    with pytest.raises(EngineMemoryError, match=r"^suffix_cache_bytes is 9000"):
        check_asked_memory(replace(asked, speculation="auto"), CPU)


def test_sizes_that_only_together_are_too_large_are_all_named() -> None:
    with pytest.raises(EngineMemoryError, match=r"^a is 6\.000 GiB and b is 5\.000 GiB, but"):
        check_asked({"a": 6 * GIB, "b": 5 * GIB, "c": None}, 10 * GIB, "it")


def test_other_errors_pass() -> None:
    with pytest.raises(ValueError, match="of its own"), explain_out_of_memory("trying", ("x",)):
        raise ValueError("of its own")


@pytest.mark.parametrize(
    "words",
    [
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "Triton Error [CUDA]: out of memory",
    ],
)
def test_libraries_that_find_no_memory_are_explained_as_torch_is(words: str) -> None:
    with (
        pytest.raises(EngineMemoryError, match=r"^out of memory while comparing") as caught,
        explain_out_of_memory("comparing the types of KV", ("kv_cache_dtype", "the device")),
    ):
        raise RuntimeError(words)
    assert words in str(caught.value)
    assert str(caught.value).endswith("change kv_cache_dtype, the device")


def test_no_memory_of_the_host_is_explained() -> None:
    settings = ("adapter_pool_bytes",)
    with (
        pytest.raises(EngineMemoryError, match="can't allocate memory") as caught,
        explain_out_of_memory("making the adapter pool", settings),
    ):
        torch.empty(1 << 60, dtype=torch.uint8)
    found = str(caught.value)
    assert re.search(r"free on the host +\d+\.\d{3} GiB\nchange adapter_pool_bytes$", found)


@pytest.mark.gpu
@needs_cuda
def test_out_of_memory_says_what_was_tried_what_there_is_and_what_to_change() -> None:
    settings = ("adapter_pool_bytes", "gpu_memory_utilization")
    with (
        pytest.raises(EngineMemoryError) as caught,
        explain_out_of_memory("making the adapter pool", settings),
    ):
        torch.empty(1 << 45, dtype=torch.uint8, device="cuda")
    words = str(caught.value)
    assert "out of memory while making the adapter pool: CUDA out of memory" in words
    assert "32768.00 GiB" in words
    total = torch.cuda.mem_get_info()[1]
    assert f"{total / GIB:.3f} GiB" in words
    assert words.splitlines()[-1] == "change adapter_pool_bytes, gpu_memory_utilization"


@pytest.mark.gpu
@needs_cuda
def test_the_peak_of_a_step_is_what_it_held_at_once() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    kept = torch.empty(1 << 20, dtype=torch.uint8, device=device)

    def step() -> None:
        first = torch.empty(64 << 20, dtype=torch.uint8, device=device)
        del first
        for _ in range(3):
            torch.empty(32 << 20, dtype=torch.uint8, device=device)

    peak = peak_bytes(device, step)
    assert 64 << 20 <= peak < 96 << 20
    assert kept.numel() == 1 << 20


@pytest.mark.gpu
@needs_cuda
def test_others_are_what_is_used_beside_this_process() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    total, before = look_at_empty_device(device)
    held = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    total_after, after = look_at_empty_device(device)
    assert total_after == total
    assert abs(after - before) < held.numel() // 2


@pytest.mark.gpu
@needs_cuda
def test_a_cuda_device_spares_whole_pages() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    # An adapter of 32 MB, so that the share is what decides.
    config = EngineConfig("/nowhere", "base")
    sites = [Site(f"o{i}", 4096, (Slice(f"o{i}", 4096),)) for i in range(128)]
    pool_bytes, host_bytes = adapter_budgets(config, sites, torch.bfloat16, device, 0)
    page = PageLayout(sites, torch.bfloat16).page_bytes
    assert 128 * PAGE_ROWS * 2 * 8192 <= page < 1.05 * 128 * PAGE_ROWS * 2 * 8192
    assert pool_bytes % page == 0
    left = int(torch.cuda.mem_get_info(device)[1] * config.gpu_memory_utilization)
    assert pool_bytes <= left // 4
    assert host_bytes >= 4 * GIB


def test_products_of_the_head_leave_the_memory_of_the_largest() -> None:
    """The allocator keeps a segment for each product that no segment before it holds: one after
    the other from few rows to many they would keep 4 GiB of Llama 3's vocabulary."""
    sizes: list[int] = []
    weights = SimpleNamespace(embedding=torch.zeros(1, 8))
    product = lambda hidden: sizes.append(len(hidden))  # noqa: E731
    config = SimpleNamespace(hidden_size=8)
    steps = DeviceSteps.__new__(DeviceSteps)
    steps._model = SimpleNamespace(config=config, weights=weights, head_product=product)  # type: ignore[assignment]
    steps._drawn = torch.zeros(256)
    steps.load_head_products()
    assert sizes == list(range(256, 0, -1))

"""Shares of a device's memory: exact blocks, exact refusals, and the sum in the refusal's text."""

from __future__ import annotations

import logging
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.errors import EngineMemoryError
from engine.kv_cache import block_bytes, count_blocks, plan_kv
from engine.kv_layout import kv_layout
from engine.memory_plan import (
    GIB,
    DeviceUse,
    MemoryPlan,
    default_adapter_host_bytes,
    default_adapter_pool_bytes,
    plan_memory,
)
from engine.model_config import read_model_config
from tests.engine_helpers import make_base

H200 = DeviceUse(
    total=140 * GIB,
    used_by_others=GIB,
    weights=15 * GIB,
    adapter_pool=3 * GIB,
    activations=2 * GIB,
    graphs=GIB,
)
BLOCK = 2 * 1024**2  # 16 tokens of an 8B model


def plan(
    use: DeviceUse = H200,
    utilization: float = 0.9,
    max_useful_blocks: int = 1 << 40,
    kv_cache_bytes: int | None = None,
    num_blocks: int | None = None,
) -> MemoryPlan:
    return plan_memory(
        use,
        utilization=utilization,
        block_bytes=BLOCK,
        max_useful_blocks=max_useful_blocks,
        kv_cache_bytes=kv_cache_bytes,
        num_blocks=num_blocks,
    )


def refusal(use: DeviceUse = H200, **settings: float | int | None) -> str:
    with pytest.raises(EngineMemoryError) as caught:
        plan(use, **settings)  # type: ignore[arg-type]
    return str(caught.value)


def test_kv_is_what_the_share_leaves() -> None:
    assert plan().kv == (126 - 15 - 3 - 2 - 1) * GIB
    assert plan(utilization=0.5).kv == (70 - 21) * GIB


def test_a_part_of_a_block_is_none() -> None:
    one = replace(H200, weights=126 * GIB - 6 * GIB - BLOCK - 1)
    assert plan(one).num_blocks == 1
    assert plan(replace(one, weights=one.weights - BLOCK + 2)).num_blocks == 1


def test_no_more_blocks_than_are_of_use() -> None:
    assert plan(max_useful_blocks=100).num_blocks == 100


def test_what_the_configuration_asks_for_comes_before_the_share() -> None:
    assert plan(num_blocks=7).num_blocks == 7
    assert plan(kv_cache_bytes=10 * BLOCK + 5).num_blocks == 10
    assert plan(utilization=0.01, num_blocks=7).num_blocks == 7


def test_others_do_not_count_while_the_share_is_free() -> None:
    assert plan(replace(H200, used_by_others=14 * GIB)).num_blocks == plan().num_blocks


def test_a_share_that_is_not_free_is_refused_with_the_largest_that_is() -> None:
    words = refusal(replace(H200, used_by_others=40 * GIB))
    assert "the share is 126.000 GiB, but only 100.000 GiB are free" in words
    assert "lower gpu_memory_utilization to 0.71 or less" in words
    assert plan(replace(H200, used_by_others=40 * GIB), utilization=0.71).num_blocks > 0


def test_no_room_for_a_block_is_refused_with_the_sum() -> None:
    words = refusal(replace(H200, weights=121 * GIB))
    assert "no KV block fits, one has 2097152 bytes" in words
    sums = {line[2:17].rstrip(): line.split("GiB")[0].split()[-1] for line in words.splitlines()}
    assert (
        sums
        | {
            "device": "140.000",
            "used by others": "1.000",
            "share": "126.000",
            "- weights": "121.000",
            "- adapter pool": "3.000",
            "- activations": "2.000",
            "- graphs": "1.000",
            "= left for KV": "-1.000",
        }
        == sums
    )
    for setting in ("gpu_memory_utilization", "adapter_pool_bytes", "max_num_batched_tokens"):
        assert setting in words.splitlines()[-1]


def test_kv_bytes_below_a_block_are_refused_by_name() -> None:
    assert "raise kv_cache_bytes" in refusal(kv_cache_bytes=BLOCK - 1)


def test_more_than_the_device_has_is_refused_though_asked_for() -> None:
    words = refusal(num_blocks=200 * GIB // BLOCK)
    assert "weights, adapters, steps and KV need 221.000 GiB, 139.000 GiB are free" in words
    assert "lower num_blocks" in words


def test_the_refusal_travels_between_processes() -> None:
    error = EngineMemoryError(refusal(kv_cache_bytes=1))
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@given(
    st.integers(0, 200),
    st.integers(0, 60),
    st.floats(0.01, 1.0),
    st.integers(0, 150),
    st.integers(1, 1 << 20),
)
def test_a_plan_never_exceeds_its_share_nor_the_device(
    weights: int, others: int, utilization: float, rest: int, useful: int
) -> None:
    use = DeviceUse(140 * GIB, others * GIB, weights * GIB, rest * GIB, 0, 0)
    try:
        found = plan(use, utilization, useful)
    except EngineMemoryError:
        share = int(140 * GIB * utilization)
        assert share > (140 - others) * GIB or share - use.before_kv < BLOCK
        return
    assert 1 <= found.num_blocks <= useful
    assert use.before_kv + found.kv <= found.share <= (140 - others) * GIB
    assert found.num_blocks == useful or use.before_kv + found.kv + BLOCK > found.share


def test_the_default_pool_is_an_eighth_of_what_the_weights_leave() -> None:
    page = 92 * 1024**2
    size = default_adapter_pool_bytes(int(140 * GIB * 0.9) - 15 * GIB, page)
    assert size // page == 111 * GIB // 8 // page == 154
    assert size % page == 0


def test_on_a_small_device_the_pool_leaves_three_quarters_to_kv() -> None:
    page = 92 * 1024**2
    size = default_adapter_pool_bytes(int(24 * GIB * 0.9) - 15 * GIB, page)
    left = int(24 * GIB * 0.9) - 15 * GIB
    assert left // 8 < size <= min(left // 4, 16 * page)
    full = default_adapter_pool_bytes(int(16 * GIB * 0.9) - 15 * GIB, page)
    assert full == 0


def test_a_small_base_gets_no_more_pages_than_are_of_use() -> None:
    size = default_adapter_pool_bytes(int(140 * GIB * 0.9) - GIB, 1024**2)
    assert size == GIB


def test_the_default_host_tier_is_bounded_by_the_machine_but_never_small() -> None:
    assert default_adapter_host_bytes(pool_bytes=GIB // 4, memory_bytes=128 * GIB) == 4 * GIB
    assert default_adapter_host_bytes(pool_bytes=3 * GIB, memory_bytes=128 * GIB) == 12 * GIB
    assert default_adapter_host_bytes(pool_bytes=14 * GIB, memory_bytes=128 * GIB) == 16 * GIB


def test_a_base_whose_longest_request_does_not_fit_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = read_model_config(make_base(tmp_path))
    config = EngineConfig("/nowhere", "base", num_blocks=3)
    layout = kv_layout(model.sliding_windows, 16, 64)
    with caplog.at_level(logging.WARNING):
        found = plan_kv(model, layout, config, 64, torch.float32, H200)
        assert found.num_blocks == 3
        assert found.block_bytes == block_bytes(model, layout, torch.float32)
        assert "hold a request of 48 tokens, max_model_len is 64" in caplog.text
        caplog.clear()
        plan_kv(model, layout, config, 48, torch.float32, H200)
        assert not caplog.text
        # On a CPU as on a GPU.
        assert count_blocks(model, layout, config, 64, torch.float32) == 3
        assert "hold a request of 48 tokens, max_model_len is 64" in caplog.text
        assert "raise kv_cache_bytes" in caplog.text
        caplog.clear()
        count_blocks(model, layout, config, 48, torch.float32)
        assert not caplog.text
        # With a window they hold a decode of 64 tokens, and not its prompt in one chunk.
        windowed = kv_layout([32] * 3, 16, 64)
        assert windowed.num_tokens(3, 64, 64) == 64
        count_blocks(model, windowed, config, 64, torch.float32)
        assert "hold a request of 48 tokens, max_model_len is 64" in caplog.text

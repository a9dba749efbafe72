"""The layout of KV blocks in exact numbers: groups of layers, what a sequence needs, what fits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.families import FAMILIES
from engine.kv_cache import allocate_kv_cache, block_bytes, count_blocks, plan_kv
from engine.kv_layout import kv_layout, num_uncommitted
from engine.memory_plan import GIB, DeviceUse
from engine.model_config import ModelConfig, parse_model_config

LONGEST = 131_072
WINDOWS = st.lists(st.sampled_from([None, 6]), min_size=1, max_size=12)


def gemma_3_4b() -> ModelConfig:
    assert "Gemma3ForCausalLM" in FAMILIES
    raw: dict[str, object] = {
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
        "eos_token_id": 1,
    }
    return parse_model_config(raw, {})


def every(full: int, num_layers: int, window: int) -> list[int | None]:
    return [None if (i + 1) % full == 0 else window for i in range(num_layers)]


@pytest.mark.parametrize(
    ("windows", "groups", "num_layer_blocks"),
    [
        ([None] * 32, [(32, 1, 16)], 32),  # Llama
        ([4096] * 32, [(32, 1, 16)], 32),  # Mistral
        (every(2, 26, 4096), [(13, 1, 16), (13, 1, 16)], 13),  # Gemma 2 2B
        (every(6, 26, 512), [(4, 6, 96), (22, 1, 16)], 24),  # Gemma 3 1B
        (every(6, 34, 1024), [(5, 6, 96), (29, 1, 16)], 30),  # 4B
        (every(6, 48, 1024), [(8, 5, 80), (40, 1, 16)], 40),  # 12B
        (every(6, 62, 1024), [(10, 5, 80), (52, 1, 16)], 52),  # 27B
        (every(4, 32, 4096), [(8, 3, 48), (24, 1, 16)], 24),  # OLMo 3 7B
        ([None, None, 8, None], [(3, 1, 16), (1, 3, 48)], 3),
    ],
)
def test_the_larger_group_of_layers_fills_a_block_with_its_tokens(
    windows: list[int | None], groups: list[tuple[int, int, int]], num_layer_blocks: int
) -> None:
    layout = kv_layout(windows, 16, LONGEST)
    assert [(len(one.layers), one.num_spans, one.size) for one in layout.groups] == groups
    assert layout.num_layer_blocks == num_layer_blocks
    assert layout.hit_size == max(size for *_, size in groups)


def test_a_window_as_long_as_the_longest_sequence_is_none() -> None:
    plain = kv_layout([None] * 26, 16, 4096)
    assert kv_layout(every(2, 26, 4096), 16, 4096) == plain
    assert (plain.has_windows, plain.num_null_blocks, plain.stride) == (False, 0, 1)
    assert kv_layout(every(2, 26, 4096), 16, 4097).has_windows


@given(WINDOWS, st.integers(1, 3))
def test_no_two_layers_share_memory(windows: list[int | None], num_blocks: int) -> None:
    """Every layer, block and span has a layer block of its own, within the block."""
    layout = kv_layout(windows, 2, 100)
    found = set()
    for index, group in enumerate(layout.groups):
        for block in range(index, num_blocks + 1, len(layout.groups)):  # some of each group
            entries = layout.entries(index, [block])
            assert len(entries) == group.num_spans
            for span, entry in enumerate(entries):
                assert entry == layout.entry(index, block, span)
                assert entry // layout.stride == block
                for place, layer in enumerate(group.layers):
                    # One tensor for both groups, or one for each layer.
                    at = entry + place if len(layout.groups) == 2 else (layer, entry)
                    assert at not in found
                    found.add(at)
                    if isinstance(at, int):
                        assert at // layout.stride == block


@given(WINDOWS, st.integers(1, 3))
def test_the_layers_tensors_begin_at_their_places(
    windows: list[int | None], num_blocks: int
) -> None:
    model = gemma_3_4b()
    layout = kv_layout(windows, 2, 100)
    short = ModelConfig(
        **{name: getattr(model, name) for name in model.__slots__}  # type: ignore[arg-type]
        | {"num_layers": len(windows), "head_dim": 2, "num_kv_heads": 1}
    )
    kv = allocate_kv_cache(short, layout, num_blocks, torch.float32, torch.device("cpu"))
    null = layout.num_null_blocks
    if len(layout.groups) == 1:
        size = sum(one.nbytes for one in (*kv.k, *kv.v))
    else:
        size = kv.k[0].untyped_storage().nbytes() + kv.v[0].untyped_storage().nbytes()
    assert size == (num_blocks + null) * block_bytes(short, layout, torch.float32)
    for layer, tensor in enumerate(kv.k):
        group = kv.table_of[layer]
        assert layer in layout.groups[group].layers
        for block in range(group, num_blocks + null, len(layout.groups)):
            for entry in layout.entries(group, [block]):
                assert not tensor[entry].any()
                tensor[entry] = 1 + layer


@given(WINDOWS, st.integers(1, 3))
def test_a_contiguous_block_is_the_k_and_v_of_all_its_layers(
    windows: list[int | None], num_blocks: int
) -> None:
    """And each of its bytes belongs to one layer's K or V, but for those that no layer has."""
    model = gemma_3_4b()
    layout = kv_layout(windows, 2, 100, is_contiguous=True)
    plain = kv_layout(windows, 2, 100)
    short = ModelConfig(
        **{name: getattr(model, name) for name in model.__slots__}  # type: ignore[arg-type]
        | {"num_layers": len(windows), "head_dim": 2, "num_kv_heads": 1}
    )
    size = block_bytes(short, layout, torch.float32)
    assert size == block_bytes(short, plain, torch.float32)
    kv = allocate_kv_cache(short, layout, num_blocks, torch.float32, torch.device("cpu"))
    assert kv.blocks is not None
    assert kv.blocks.shape == (num_blocks + layout.num_null_blocks, size)
    assert kv.blocks.data_ptr() == kv.k[layout.groups[0].layers[0]].data_ptr()
    for block in range(num_blocks):
        group = block % len(layout.groups)
        written = 0
        for layer, pair in enumerate(zip(kv.k, kv.v, strict=True)):
            if kv.table_of[layer] == group:
                for entry in layout.entries(group, [block]):
                    assert entry // layout.stride == block
                    for tensor in pair:
                        assert tensor.is_contiguous()
                        assert not tensor[entry].any()
                        tensor[entry] = 1 + block
                        written += tensor[entry].numel()
        values = kv.blocks[block].view(torch.float32)
        assert int((values == 1 + block).sum()) == written
        assert int((values == 0).sum()) == values.numel() - written


def test_the_figures_of_gemma_3_4b_with_40_gib() -> None:
    model = gemma_3_4b()
    layout = kv_layout(model.sliding_windows, 16, LONGEST)
    plain = kv_layout([None] * 34, 16, LONGEST)
    blocks = 40 * GIB // block_bytes(model, layout, torch.bfloat16)
    plain_blocks = 40 * GIB // block_bytes(model, plain, torch.bfloat16)
    assert blocks // layout.blocks_needed(LONGEST, 2048) == 14
    assert plain_blocks // plain.blocks_needed(LONGEST, 2048) == 2
    assert blocks // layout.blocks_needed(2048, 1) == 251
    assert plain_blocks // plain.blocks_needed(2048, 1) == 150


def test_the_capacity_in_tokens_is_that_of_usual_sequences_and_bounds_the_longest() -> None:
    layout = kv_layout(every(6, 34, 1024), 16, LONGEST)
    ahead = num_uncommitted(2048, runs_ahead=True)
    assert ahead == 2 * num_uncommitted(2048, runs_ahead=False)
    assert layout.longest(21_845, ahead, LONGEST) == LONGEST  # never more than the model's
    assert layout.num_tokens(21_845, ahead, LONGEST) == 251 * 2048
    # Few blocks: the longest sequence decides, and needs all of them.
    longest = layout.longest(500, ahead, LONGEST)
    assert layout.num_tokens(500, ahead, LONGEST) == longest == 17_184
    assert layout.blocks_needed(longest, ahead) == 500 < layout.blocks_needed(longest + 1, ahead)
    # All layers have a window: any length fits into the blocks of a window and of the steps.
    windowed = kv_layout([4096] * 32, 16, LONGEST)
    assert windowed.longest(513, ahead, LONGEST) == LONGEST
    assert windowed.longest(512, ahead, LONGEST) == 512 * 16
    # Without windows, all tokens of all blocks.
    assert kv_layout([None], 16, LONGEST).num_tokens(500, ahead, LONGEST) == 8000


def test_a_plan_has_the_null_block_and_says_how_many_long_sequences_fit() -> None:
    model = gemma_3_4b()
    layout = kv_layout(model.sliding_windows, 16, LONGEST)
    use = DeviceUse(80 * GIB, GIB, 9 * GIB, 2 * GIB, GIB, GIB)
    config = EngineConfig("/nowhere", "base", kv_cache_bytes=40 * GIB)
    plan = plan_kv(model, layout, config, LONGEST, torch.bfloat16, use)
    size = block_bytes(model, layout, torch.bfloat16)
    assert plan.num_blocks == 40 * GIB // size - 1
    assert plan.kv == (plan.num_blocks + 1) * size <= 40 * GIB
    assert "21844 of 1966080 bytes, 15 sequences of 131072 tokens" in plan.table()
    assert plan.longest is not None
    assert plan.longest.count(10) == 0
    # Not more than sequences of the longest length can fill.
    few = EngineConfig("/nowhere", "base", max_num_seqs=1, max_num_batched_tokens=16)
    needed = layout.blocks_needed(LONGEST, 32)
    assert plan_kv(model, layout, few, LONGEST, torch.bfloat16, use).num_blocks == needed
    assert count_blocks(model, layout, few, 4096, torch.bfloat16) == layout.blocks_needed(4096, 32)

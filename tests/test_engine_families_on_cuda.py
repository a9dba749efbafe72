"""Every family on a CUDA device: graphs, pieces and kernels against the decoder on the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.runner import ModelRunner
from engine.types import Request, SamplingParams
from tests.engine_agreement import TOLERANCE, Reply, assert_alike, make_engine, run_all
from tests.engine_helpers import acquire, make_runner, random_prompt
from tests.family_bases import VARIANTS, VOCABULARY, make_family_adapter, make_family_base

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FAMILIES = [name for name, variant in VARIANTS.items() if variant.vision is None]
OWNERS = (None, "layers", "everything")
PARAMS = SamplingParams(max_tokens=8, temperature=0.0, logprobs=2, ignore_eos=True)
# What a layer adds is multiplied, and a soft cap squeezes what lies above it: rounding weighs more.
BF16_TOLERANCE = 2 * TOLERANCE[torch.bfloat16]


def open_runner(folder: Path, name: str, device: str, dtype: str) -> ModelRunner:
    variant = VARIANTS[name]
    base = folder / "base"
    if not base.exists():
        make_family_base(base, variant)
        make_family_adapter(folder / "layers", base, variant.linears, rank=8)
        everything = (*variant.linears, *VOCABULARY)
        make_family_adapter(folder / "everything", base, everything, rank=20, seed=1)
    runner = make_runner(base, device, dtype=dtype, block_size=16, max_num_seqs=32, num_blocks=256)
    for owner in OWNERS:
        if owner is not None:
            runner.load_adapter(owner, folder / owner)
            acquire(runner, owner)
    return runner


def requests() -> list[Request]:
    return [
        Request(f"r{i}", tuple(random_prompt(3 + 7 * i, seed=i)), PARAMS, OWNERS[i % 3])
        for i in range(9)
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_on_the_device_is_that_of_the_cpu(name: str, dtype: str, tmp_path: Path) -> None:
    expected = run_all(make_engine(open_runner(tmp_path, name, "cpu", "float32")), requests())
    runner = open_runner(tmp_path, name, "cuda", dtype)
    tolerance = TOLERANCE[torch.float32] if dtype == "float32" else BF16_TOLERANCE
    for chunk in (512, 32):
        found = run_all(make_engine(runner, max_num_batched_tokens=chunk), requests())
        for one in requests():
            assert_alike(found[one.request_id], expected[one.request_id], tolerance)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_row_keeps_its_bits_beside_other_adapters(name: str, tmp_path: Path) -> None:
    runner = open_runner(tmp_path, name, "cuda", "bfloat16")
    own = requests()
    together = run_all(make_engine(runner), own)
    bare = [replace(one, adapter=None) if i % 3 else one for i, one in enumerate(own)]
    alone = run_all(make_engine(runner), bare)
    for one in own[::3]:
        assert together[one.request_id] == alone[one.request_id]


WINDOWS = {
    # Heads of 64 and 128 in bfloat16 have Hopper's kernels, of 256 the others'.
    "gemma 3, heads of 64": ("gemma 3", {"head_dim": 64, "query_pre_attn_scalar": 64}),
    "gemma 3, heads of 256": ("gemma 3", {"head_dim": 256, "query_pre_attn_scalar": 256}),
    "olmo 3, heads of 128": ("olmo 3", {"head_dim": 128}),
    "phi 3": ("phi 3", {"hidden_size": 128, "num_attention_heads": 2, "head_dim": 64}),
}
LONG = [(300, None), (170, "adapter"), (20, None), (259, "adapter"), (41, None)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", WINDOWS)
def test_graphs_and_kernels_read_no_block_that_a_window_has_passed(
    name: str, dtype: str, tmp_path: Path
) -> None:
    """Prompts of several windows, whole and in chunks, found in the cache and preempted, with steps
    planned ahead. Freed blocks are taken by others at once: there are few."""
    family, shape = WINDOWS[name]
    changes = VARIANTS[family].changes | {
        **shape,
        "sliding_window": 40,
        "num_key_value_heads": 1 if family == "phi 3" else 2,
        "max_position_embeddings": 512,
    }
    variant = replace(VARIANTS[family], changes=changes)
    base = make_family_base(tmp_path / "base", variant)
    adapter = make_family_adapter(tmp_path / "adapter", base, variant.linears, rank=8)

    def replies(device: str, dtype: str, num_blocks: int, chunk: int) -> list[dict[str, Reply]]:
        runner = make_runner(
            base,
            device,
            dtype=dtype,
            block_size=16,
            max_num_seqs=8,
            num_blocks=num_blocks,
            max_num_batched_tokens=chunk,
        )
        assert runner.kv_layout.has_windows
        runner.load_adapter("adapter", adapter)
        acquire(runner, "adapter")
        engine = make_engine(runner, max_num_batched_tokens=chunk, max_num_seqs=8)
        found = [run_all(engine, long_requests(turn)) for turn in range(2)]
        assert engine.load().num_free_blocks == num_blocks
        for tensors in (runner._kv.k, runner._kv.v):
            for layer, tensor in enumerate(tensors):
                null = runner.kv_layout.entry(runner._kv.table_of[layer], num_blocks)
                assert not bool(tensor[null:].any()), "the null block is written"
        return found

    expected = replies("cpu", "float32", 256, 512)
    tolerance = TOLERANCE[torch.float32] if dtype == "float32" else BF16_TOLERANCE
    for num_blocks, chunk in ((256, 512), (256, 48), (44, 64)):
        found = replies("cuda", dtype, num_blocks, chunk)
        for turn in range(2):
            for one in long_requests(turn):
                assert_alike(found[turn][one.request_id], expected[turn][one.request_id], tolerance)


def long_requests(turn: int) -> list[Request]:
    return [
        Request(f"{turn}-{i}", tuple(random_prompt(length, seed=i)), PARAMS, owner)
        for i, (length, owner) in enumerate(LONG)
    ]

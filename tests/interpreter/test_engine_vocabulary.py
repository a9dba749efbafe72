"""Decodes whose adapters have the head or the embedding, kernels interpreted, as a graph computes
them: on static buffers, padded to its size. The graph's work is called again instead of replayed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.decode_graphs import GraphKey
from engine.inputs import LoraReach
from engine.runner import ModelRunner
from engine.types import SamplingParams
from kernels import triton_lora_expand, triton_lora_head, triton_lora_shrink
from tests.called_graphs import with_graphs
from tests.engine_helpers import (
    Job,
    acquire,
    decode_beside,
    make_named_adapters,
    make_sequence,
    make_small_base,
    open_small,
    random_prompt,
    run_mixed,
)

ADAPTERS = {
    "head": (20, ("q_proj", "lm_head")),
    "words": (3, ("v_proj", "embed_tokens")),
    "both": (17, ("lm_head", "embed_tokens")),
    "all": (8, ("q_proj", "o_proj", "up_proj", "down_proj")),
}
LOGPROBS = SamplingParams(temperature=0.0, max_tokens=9, logprobs=3)
NUM_TOKENS = 3


@pytest.fixture(scope="module", autouse=True)
def few_programs() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        for module in (triton_lora_expand, triton_lora_head, triton_lora_shrink):
            patched.setattr(module, "NUM_PROGRAMS", 4)
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary in several pieces of columns."""
    return make_small_base(
        tmp_path_factory.mktemp("models") / "base",
        vocab_size=300,
    )


@pytest.fixture(scope="module")
def adapters(base: Path) -> dict[str, Path]:
    return make_named_adapters(base, ADAPTERS)


def open_runner(base: Path, adapters: dict[str, Path], backend: str, dtype: str) -> ModelRunner:
    runner = open_small(base, adapters, backend, dtype)
    for name in adapters:
        acquire(runner, name)
    return runner


def outputs(runner: ModelRunner) -> list[list[int]]:
    """Prompts first, then decodes side by side."""
    jobs = [
        Job(make_sequence(random_prompt(3 + i, seed=i), 24 * i, adapter=name))
        for i, name in enumerate((None, *ADAPTERS))
    ]
    return run_mixed(runner, jobs, NUM_TOKENS)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_decodes_in_graphs_give_what_the_reference_gives(
    base: Path, adapters: dict[str, Path], dtype: str
) -> None:
    runner = open_runner(base, adapters, "triton", dtype)
    graphs = with_graphs(runner)
    found = outputs(runner)
    assert graphs.replayed == [GraphKey(8, LoraReach.ALL)] * (NUM_TOKENS - 1)
    assert found == outputs(open_runner(base, adapters, "reference", dtype))
    assert runner.adapters.site_rows("lm_head").b_entries.shape[1] > 1


def test_neighbours_with_a_head_change_no_bit(base: Path, adapters: dict[str, Path]) -> None:
    runner = open_runner(base, adapters, "triton", "float32")
    graphs = with_graphs(runner)
    alone = decode_beside(runner, (None, None, None, "all", None), LOGPROBS)
    beside = decode_beside(runner, (None, "head", None, "all", "both"), LOGPROBS)
    again = decode_beside(runner, (None, "words", None, "all", None), LOGPROBS)
    without = decode_beside(runner, (None,) * 5, LOGPROBS)
    for i in (0, 2, 3):
        assert alone[i] == beside[i] == again[i]
    assert (without[0], without[2]) == (alone[0], alone[2])
    assert alone[1].logprobs != beside[1].logprobs != again[1].logprobs
    assert {key.lora for key in graphs.replayed} == {LoraReach.NONE, LoraReach.ALL}

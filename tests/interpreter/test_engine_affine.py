"""DoRA adapters and adapters with biases on the device's backend, kernels interpreted: launched one
by one and as a graph of decodes computes them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from peft import LoraConfig

from engine.decode_graphs import GraphKey
from engine.inputs import LoraReach
from engine.runner import ModelRunner
from engine.types import SamplingParams
from kernels import triton_lora_expand, triton_lora_shrink
from tests.called_graphs import with_graphs
from tests.engine_helpers import (
    Job,
    acquire,
    decode_beside,
    make_adapter,
    make_sequence,
    make_small_base,
    open_small,
    random_prompt,
    run_mixed,
)
from tests.peft_kinds import LINEARS, save_peft

OWNERS = (None, "dora", "lora", "biases", "lora")
LOGPROBS = SamplingParams(temperature=0.0, max_tokens=9, logprobs=3)
NUM_TOKENS = 3


@pytest.fixture(scope="module", autouse=True)
def few_programs() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        for module in (triton_lora_expand, triton_lora_shrink):
            patched.setattr(module, "NUM_PROGRAMS", 4)
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_small_base(
        tmp_path_factory.mktemp("models") / "base",
        "qwen2",
    )


@pytest.fixture(scope="module")
def adapters(base: Path) -> dict[str, Path]:
    linears = list(LINEARS)
    dora = LoraConfig(r=20, lora_alpha=9, target_modules=linears, use_dora=True)
    biases = LoraConfig(r=3, target_modules=["v_proj", "up_proj"], bias="all", lora_bias=True)
    return {
        "dora": save_peft(base.parent / "dora", base, dora, seed=1),
        "biases": save_peft(base.parent / "biases", base, biases, seed=2),
        "lora": make_adapter(base.parent / "lora", base, 8, linears, seed=3),
    }


def open_runner(base: Path, adapters: dict[str, Path], backend: str, dtype: str) -> ModelRunner:
    runner = open_small(base, adapters, backend, dtype)
    for name in adapters:
        acquire(runner, name)
    return runner


def outputs(runner: ModelRunner) -> list[list[int]]:
    jobs = [
        Job(make_sequence(random_prompt(3 + i, seed=i), 24 * i, adapter=name))
        for i, name in enumerate(OWNERS)
    ]
    return run_mixed(runner, jobs, NUM_TOKENS)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_tokens_are_those_of_the_reference(
    base: Path, adapters: dict[str, Path], dtype: str
) -> None:
    expected = outputs(open_runner(base, adapters, "reference", dtype))
    assert outputs(open_runner(base, adapters, "triton", dtype)) == expected
    runner = open_runner(base, adapters, "triton", dtype)
    graphs = with_graphs(runner)
    assert outputs(runner) == expected
    assert graphs.replayed == [GraphKey(8, LoraReach.AFFINE)] * (NUM_TOKENS - 1)


def test_rows_beside_them_keep_their_bits(base: Path, adapters: dict[str, Path]) -> None:
    runner = open_runner(base, adapters, "triton", "float32")
    graphs = with_graphs(runner)
    plain = decode_beside(runner, (None, None, "lora", None, "lora"), LOGPROBS)
    beside = decode_beside(runner, (None, "dora", "lora", "biases", "lora"), LOGPROBS)
    for i in (0, 2, 4):
        assert plain[i] == beside[i]
    for i in (1, 3):
        assert plain[i] != beside[i]
    found = {key.lora for key in graphs.replayed}
    assert found == {LoraReach.ALL, LoraReach.AFFINE}

"""Graphs of steps with prompts, padded to their size, with interpreted kernels and without CUDA: a
graph's work is called again instead of replayed.
"""

from __future__ import annotations

import pytest
import torch

from engine.device_step import DeviceSteps
from engine.inputs import ForwardInputs
from engine.mixed_graphs import MixedGraphs
from engine.runner import ModelRunner
from kernels.paged_plan import HEADER, PagedPlan
from tests.engine_helpers import (
    Job,
    make_adapter,
    make_base,
    make_mixed_graphs,
    make_runner,
    make_sequence,
    part,
    random_prompt,
    run_mixed,
    step,
)

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ADAPTERS = {
    "all": (8, LINEARS),
    "wide": (20, ("q_proj", "down_proj", "embed_tokens")),
    "head": (4, ("lm_head",)),
}
# Adapter, prompt, first step, chunk. One chunk has enough rows for large tiles.
JOBS = ((None, 5, 0, 5), ("all", 67, 1, 66), ("wide", 20, 2, 11), ("head", 4, 4, 4))
SIZES = [12, 72, 12, 12, 12, 12]  # of steps of 5, 67, 12, 10, 5 tokens, and of one

# numpy's, of what a capture computes: no step has filled its inputs.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    base = make_base(
        tmp_path_factory.mktemp("models") / "base",
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    runner = make_runner(base, backend="triton", block_size=16, max_num_seqs=8)
    for i, (name, (rank, targets)) in enumerate(ADAPTERS.items()):
        runner.load_adapter(name, make_adapter(base.parent / name, base, rank, targets, seed=i))
        assert runner.adapters.acquire(name)
    return runner


@pytest.fixture(scope="module")
def whole_steps(runner: ModelRunner) -> list[list[int]]:
    """Returns the outputs of whole steps, before there are graphs."""
    return mixed_outputs(runner)


@pytest.fixture(scope="module")
def graphs(runner: ModelRunner, whole_steps: object) -> MixedGraphs:
    return make_mixed_graphs(runner, 12, 72)


def mixed_outputs(runner: ModelRunner) -> list[list[int]]:
    """Prompts in chunks beside decodes."""
    jobs = [
        Job(make_sequence(random_prompt(n, seed=n), 24 * i, adapter=name), starts_at, chunk)
        for i, (name, n, starts_at, chunk) in enumerate(JOBS)
    ]
    return run_mixed(runner, jobs, num_tokens=2)


def test_padded_graphs_give_what_whole_steps_give(
    runner: ModelRunner,
    whole_steps: list[list[int]],
    graphs: MixedGraphs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[int] = []
    forward = graphs.forward

    def noted(inputs: ForwardInputs, size: int) -> torch.Tensor:
        taken.append(size)
        return forward(inputs, size)

    monkeypatch.setattr(graphs, "forward", noted)
    assert mixed_outputs(runner) == whole_steps
    assert taken == SIZES


def test_a_graph_of_no_step_has_no_work_of_an_earlier_one(runner: ModelRunner) -> None:
    """The memory of the largest graph is measured after a step of more tokens."""
    assert isinstance(runner._steps, DeviceSteps)
    sequence = make_sequence(random_prompt(40, seed=1), 3)
    step(runner, part(sequence))
    (plan,) = runner._steps._mixed.for_mixed_graph(12, has_lora=False).attention
    assert isinstance(plan, PagedPlan)
    assert plan.work[:HEADER].tolist() == [0] * HEADER


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("adapter", [None, "all"])
def test_padding_writes_no_keys(runner: ModelRunner, adapter: str | None) -> None:
    caches = (*runner._kv.k, *runner._kv.v)
    for cache in caches:
        cache.fill_(7.0)
    sequence = make_sequence(random_prompt(7, seed=1), 3, adapter=adapter, num_blocks=2)
    step(runner, part(sequence))
    written = [sequence.block_table[0] * 16 + i for i in range(7)]
    for cache in caches:
        changed = (cache.flatten(0, 1) != 7.0).flatten(1).any(1).nonzero().flatten().tolist()
        assert changed == written

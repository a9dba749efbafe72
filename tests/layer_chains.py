"""Chains of layers in CUDA graphs, and engines with quantized layers, for the tests on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from engine.device_step import DeviceSteps
from engine.runner import ModelRunner
from kernels.backend import reference_only
from kernels.linear import linear, linear_shrink
from kernels.lora_add_rms_norm import lora_add_rms_norm
from kernels.lora_plan import LoraPlan
from kernels.matrix import Matrix
from kernels.rms_norm import add_rms_norm
from tests.engine_agreement import (
    OWNERS,
    Reply,
    assert_alike,
    make_engine,
    neighbours,
    probe,
    run_all,
)
from tests.engine_helpers import acquire, make_runner
from tests.lora_kernel_cases import LoraCase, make_case, with_drawn_runs, write_plan


def mixed_case(rows: int) -> LoraCase:
    """Returns a problem of 60 adapters and so many rows, for a weight [1024, 1024]."""
    return make_case(
        [8, 16, 64, 48] * 15,
        [(None, rows)],
        in_features=1024,
        sizes=(1024,),
        dtype=torch.bfloat16,
        device="cuda",
    )


class LayerChain:
    """Six layers of one weight, whose tensors take each other's memory, with norms and adapters."""

    def __init__(self, first: LoraCase, weight: Matrix) -> None:
        self._first, self._weight = first, weight
        self._norm = torch.ones_like(first.y[0])
        self._static = torch.from_numpy(write_plan(first, large=False)[0]).cuda()
        rows = first.x.shape[0]
        self.plan = LoraPlan.for_graph(self._static, rows, first.max_tokens, first.max_pages)
        self._graph = torch.cuda.CUDAGraph()

    def run(self, plan: LoraPlan | None) -> torch.Tensor:
        first, weight, norm = self._first, self._weight, self._norm
        hidden, residual = first.x, first.y.clone()
        for _ in range(6):
            if plan is None:
                y = linear(hidden, weight, None)
                hidden, residual = add_rms_norm(y, residual, norm, 1e-5)
                continue
            y, bridge = linear_shrink(hidden, weight, None, first.site, plan)
            hidden, residual = lora_add_rms_norm(y, residual, norm, 1e-5, bridge, first.site, plan)
        return hidden

    def capture(self) -> None:
        torch.cuda.synchronize()
        with torch.cuda.graph(self._graph):
            self._out = self.run(self.plan)

    def assert_replays_serve_any_mix(self, num_replays: int) -> None:
        """Asserts that replays with other adapters and rows have the bits of the kernels in a row,
        and rows of the base those without adapters."""
        first, draw = self._first, torch.Generator().manual_seed(3)
        for _ in range(num_replays):
            case = with_drawn_runs(first, draw, longest=min(19, first.x.shape[0] - 1))
            first.x.normal_()
            self._static.copy_(torch.from_numpy(write_plan(case, large=False)[0]))
            self._graph.replay()
            replayed = self._out.clone()
            assert torch.equal(replayed, self.run(case.plan(large=False)))
            base = case.base_rows()
            assert torch.equal(replayed[base], self.run(None)[base])
            assert not torch.equal(replayed, self.run(None))


Run = Callable[[Callable[[], None]], torch.Tensor]  # calls its argument behind each kernel


def run_of_products(
    first: torch.Tensor, norm: torch.Tensor, layers: Sequence[tuple[Matrix, Matrix]]
) -> Run:
    def run(pause: Callable[[], None]) -> torch.Tensor:
        hidden, residual = first.clone(), torch.zeros_like(first)
        for up, down in layers:
            inner = linear(hidden, up, None)
            pause()
            added = linear(inner, down, None)
            pause()
            hidden, residual = add_rms_norm(added, residual, norm, 1e-5)
            pause()
        return hidden

    return run


def assert_overlap_changes_no_bit(run: Run, prepare: Callable[[], None] = lambda: None) -> None:
    """Asserts that kernels of a graph, which overlap, have the bits of kernels in turn. `prepare`:
    called before each run."""
    prepare()
    in_turn = run(torch.cuda.synchronize)
    assert in_turn.isfinite().all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        overlapped = run(lambda: None)
    for _ in range(20):
        prepare()
        graph.replay()
        assert torch.equal(overlapped, in_turn)


# -- engines ------------------------------------------------------------------------------------


def open_quantized(
    base: Path, adapters: dict[str, Path], device: str, **more: object
) -> ModelRunner:
    """Returns a runner with every adapter on the device."""
    runner = make_runner(base, device, block_size=16, max_num_seqs=64, num_blocks=320, **more)
    for name, path in adapters.items():
        runner.load_adapter(name, path)
        acquire(runner, name)
    return runner


def assert_answers_are_those_of(
    open_on_cpu: Callable[[], ModelRunner], runner: ModelRunner, tolerance: float
) -> None:
    """An engine allows or forbids Triton for its process: the one on the CPU, in float32, must not
    leave the runner's steps without it."""
    requests = [probe(i) for i in range(2 * len(OWNERS))]
    with reference_only():
        expected = run_all(make_engine(open_on_cpu()), requests)
    found = run_all(make_engine(runner), requests)
    for one in requests:
        assert_alike(found[one.request_id], expected[one.request_id], tolerance)


def assert_any_company_gives_the_answer(runner: ModelRunner, tolerance: float) -> None:
    probes = [probe(i) for i in range(6)]
    alone = {one.request_id: run_all(make_engine(runner), [one])[one.request_id] for one in probes}
    for count in (11, 58):
        replies = run_all(make_engine(runner), [*neighbours(count, count), *probes])
        for one in probes:
            assert_alike(replies[one.request_id], alone[one.request_id], tolerance)


def assert_graphs_have_the_bits_of_kernels(runner: ModelRunner) -> None:
    """Steps of exactly a graph's size: 1, 4, 8, 32 and 64 sequences of one length."""
    assert isinstance(runner._steps, DeviceSteps)
    graphs, mixed = runner._steps._graphs, runner._steps._mixed_graphs

    def answers(count: int) -> dict[str, Reply]:
        return run_all(make_engine(runner), neighbours(count, 5, length=3))

    kept = graphs._graphs, mixed._graphs
    assert kept[0]
    mixed._graphs = {}
    try:
        for count in (1, 4, 8, 32, 64):
            replayed, graphs._graphs = answers(count), {}
            launched, graphs._graphs = answers(count), kept[0]
            assert replayed == launched, count
    finally:
        graphs._graphs, mixed._graphs = kept


def assert_rows_of_the_base_keep_their_bits(runner: ModelRunner) -> None:
    for count in (4, 30):
        own = neighbours(count, 7, length=5)
        own[0] = replace(own[0], adapter=None)
        bare = [replace(one, adapter=None) for one in own]
        together, alone = run_all(make_engine(runner), own), run_all(make_engine(runner), bare)
        of_base = [one.request_id for one in own if one.adapter is None]
        assert of_base
        for name in of_base:
            assert together[name] == alone[name]
        assert together != alone

"""The shares of the engine's time that requests are charged."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import ClassVar

import pytest

from engine.config import EngineConfig
from engine.core import Engine
from engine.step_times import charge_step
from engine.types import (
    PROMPT_RANK,
    Request,
    SamplingParams,
    ScheduledBatch,
    ScheduledSequence,
    Sequence,
)
from serve_app.admission.cost import token_cost
from tests.fakes import FakePool, FakeRunner, FakeStep


class TimedStep(FakeStep):
    now_s: ClassVar[list[float]]

    def collect(self):  # type: ignore[no-untyped-def]
        self.now_s[0] += 0.004  # the rest of the device's time
        return super().collect()


class TimedRunner(FakeRunner):
    """A launch lasts a time that grows with the step, and collecting it 4 ms."""

    def __init__(self, *, runs_ahead: bool) -> None:
        super().__init__(num_blocks=200, adapters=FakePool(known={"a", "b"}))
        self.runs_ahead = runs_ahead
        self.now_s = TimedStep.now_s = [0.0]

    def launch(self, batch: ScheduledBatch) -> FakeStep:
        self.now_s[0] += 0.001 + 1e-4 * batch.num_tokens
        step = super().launch(batch)
        return TimedStep(step.samples, step.error)


@pytest.mark.parametrize(
    ("start", "active_from", "num_active"),
    [(0, None, 10), (0, 0, 10), (0, 4, 6), (5, 4, 10), (0, 10, 0), (0, 30, 0)],
)
def test_adapter_is_charged_where_it_is_active(
    start: int, active_from: int | None, num_active: int
) -> None:
    request = Request("a", (1,) * 40, SamplingParams(), "a", adapter_rank=16)
    request = replace(request, active_from=active_from)
    base = Request("b", (1,) * 40, SamplingParams())
    parts = [
        ScheduledSequence(Sequence(one, 0, 0, [1] * 40), start, start + 10, False)
        for one in (request, base)
    ]
    charge_step(ScheduledBatch(tuple(parts)), 1.0)
    with_adapter, without = (part.sequence.engine_s for part in parts)
    assert with_adapter / without == pytest.approx(1 + num_active / 10 * PROMPT_RANK * 16)


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_the_shares_of_all_requests_sum_to_the_time_of_the_steps(runs_ahead: bool) -> None:
    runner = TimedRunner(runs_ahead=runs_ahead)
    config = EngineConfig("", "base", block_size=4, max_num_seqs=8, max_num_batched_tokens=32)
    engine = Engine(config, runner, clock=lambda: runner.now_s[0])
    for number in range(12):
        rank = (0, 8, 64)[number % 3]
        params = SamplingParams(max_tokens=20 + number, ignore_eos=True, seed=number, n=1)
        prompt = tuple(range(3, 3 + 5 + number // 2))
        adapter = (None, "a", "b")[number % 3]
        engine.add_request(Request(f"r{number}", prompt, params, adapter, adapter_rank=rank))
    shares: defaultdict[str, float] = defaultdict(float)
    while engine.has_work:
        for output in engine.step().outputs:
            shares[output.request_id] += output.engine_s
    assert len(shares) == 12
    # A sequence that ended has a row in one more step of an engine that runs ahead.
    assert sum(shares.values()) == pytest.approx(runner.now_s[0], rel=0.02)
    assert shares["r2"] > shares["r1"] > shares["r0"]  # by rank, with nearly the same tokens


def test_a_row_weighs_as_much_as_the_fair_queue_charges() -> None:
    rows = [(0, 0, 1), (16, 0, 1), (64, 5, 6), (0, 0, 40), (32, 8, 72)]
    items = [
        ScheduledSequence(
            Sequence(Request(str(i), (1,) * end, SamplingParams(), adapter_rank=rank), 0, 0, [1]),
            *(start, end, True),
        )
        for i, (rank, start, end) in enumerate(rows)
    ]
    charge_step(ScheduledBatch(tuple(items)), 2.0)
    costs = [
        token_cost(rank, 0, 1) if end - start == 1 else token_cost(rank, end - start, 0)
        for rank, start, end in rows
    ]
    shares = [item.sequence.engine_s for item in items]
    assert shares == pytest.approx([2.0 * cost / sum(costs) for cost in costs])
    charge_step(ScheduledBatch(()), 1.0)  # nothing to charge


def test_a_choice_that_ends_reports_its_share_once() -> None:
    runner = TimedRunner(runs_ahead=False)
    config = EngineConfig("", "base", block_size=4, max_num_seqs=8, max_num_batched_tokens=32)
    engine = Engine(config, runner, clock=lambda: runner.now_s[0])
    engine.add_request(
        Request("r", (3, 4, 5), SamplingParams(max_tokens=3, ignore_eos=True, seed=1))
    )
    outputs = []
    while engine.has_work:
        outputs += engine.step().outputs
    # Alone it has all of each step: 1 ms, 0.1 ms per token, and 4 ms.
    assert [output.engine_s for output in outputs] == pytest.approx([0.0053, 0.0051, 0.0051])

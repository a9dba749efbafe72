"""The gate of drafts: it opens where they save time, and costs nothing where they do not."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import cache
from typing import ClassVar

import pytest

from engine.core import Engine
from engine.draft_gate import Acceptance, Acceptances, DraftGate
from engine.drafts import Draft
from engine.sampler import by_sequence
from engine.types import Sample, ScheduledBatch, Sequence
from tests.fakes import FakeRunner, FakeStep, make_config, make_request
from tests.speculation_helpers import Script, ScriptedDrafter

Seconds = Callable[[int, int], float]  # of a step, by its sequences and tokens of drafts

COSTS: dict[str, Seconds] = {
    # The weights are read once, whatever the rows: an idle GPU.
    "memory": lambda sequences, drafted: 8e-3 + 5e-5 * (sequences + drafted),
    # A graph replays 32 rows almost as fast as 160; without drafts the host's work is hidden.
    "graphs": lambda sequences, drafted: (
        6.3e-3 + 8e-6 * (sequences + drafted) + 1e-3 * (drafted > 0)
    ),
    # Every row costs alike: a full GPU, or a CPU beside many sequences.
    "compute": lambda sequences, drafted: 2e-4 + 1e-3 * (sequences + drafted),
    # Steps with drafts have no graphs.
    "no graphs": lambda sequences, drafted: 5e-3 + 1e-4 * sequences + (4e-3 if drafted else 0),
    # Cheap up to eight rows.
    "tile": lambda sequences, drafted: 5e-3 * (1 + (sequences + drafted - 1) // 8),
}


class TimedStep(FakeStep):
    now_s: ClassVar[list[float]]
    took_s: float

    def collect(self):  # type: ignore[no-untyped-def]
        self.now_s[0] += self.took_s
        return super().collect()


def token_at(sequence: Sequence, position: int) -> int:
    return tokens_of(sequence.seed)[position]


@cache
def tokens_of(seed: int) -> tuple[int, ...]:
    """Returns a token for each position; a draft asks for hundreds."""
    return tuple(1 + zlib.crc32(f"{seed} {position}".encode()) % 15 for position in range(1000))


class TimedRunner(FakeRunner):
    """A runner whose tokens and times need no look at the tokens before."""

    def __init__(self, seconds: Seconds) -> None:
        super().__init__(num_blocks=4000)
        self.now_s = TimedStep.now_s = [0.0]
        self._seconds = seconds

    def launch(self, batch: ScheduledBatch) -> FakeStep:
        drawn = iter([Sample(token_at(row.sequence, row.end)) for row in batch.rows])
        step = TimedStep(tuple(by_sequence(batch, drawn)))
        step.took_s = self._seconds(len(batch.sequences), batch.num_draft_tokens)
        return step


def truth(sequence: Sequence) -> tuple[int, ...]:
    first, count = sequence.num_prompt_tokens, sequence.num_output_tokens
    return tokens_of(sequence.seed)[first : first + count + 8]


def seconds_of(
    cost: str, num_sequences: int, script: Script, mode: str, num_tokens: int = 300
) -> float:
    runner = TimedRunner(COSTS[cost])
    config = make_config(
        speculation=mode, max_num_seqs=64, max_num_batched_tokens=512, num_speculative_tokens=4
    )
    drafter = ScriptedDrafter(script, 16, truth)
    engine = Engine(config, runner, lambda: runner.now_s[0], drafter=drafter)
    for index in range(num_sequences):
        engine.add_request(make_request(f"r{index}", 4, seed=index, max_tokens=num_tokens))
    while engine.has_work:
        engine.step()
    return runner.now_s[0]


@pytest.mark.parametrize("num_sequences", [1, 6, 40])
@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("script", ["wrong", "random"])
def test_drafts_that_are_wrong_cost_two_percent_at_most(
    cost: str, num_sequences: int, script: Script
) -> None:
    plain_s = seconds_of(cost, num_sequences, script, "off")
    assert seconds_of(cost, num_sequences, script, "auto") <= 1.02 * plain_s


@pytest.mark.parametrize(
    ("cost", "num_sequences", "most"),
    [
        ("memory", 1, 0.5),
        ("memory", 6, 0.5),
        ("memory", 40, 0.6),
        ("graphs", 1, 0.5),
        ("graphs", 6, 0.5),
        ("graphs", 40, 0.5),
        ("no graphs", 6, 0.8),
        ("tile", 1, 0.5),
    ],
)
def test_drafts_that_are_right_save_time(cost: str, num_sequences: int, most: float) -> None:
    plain_s = seconds_of(cost, num_sequences, "right", "off")
    assert seconds_of(cost, num_sequences, "right", "auto") < most * plain_s


@pytest.mark.parametrize("script", ["right", "half"])
def test_rows_that_cost_as_much_as_a_sequence_get_no_drafts(script: Script) -> None:
    plain_s = seconds_of("compute", 40, script, "off")
    assert seconds_of("compute", 40, script, "auto") <= 1.02 * plain_s


def test_acceptance_is_learned_by_the_length_of_the_match() -> None:
    found = Acceptance()
    for _ in range(200):
        found.observe(2, is_hit=False)
        found.observe(9, is_hit=True)
    assert found.probability(2) < 0.05
    assert found.probability(9) > 0.95


def test_a_sequence_that_differs_from_its_source_is_known_soon() -> None:
    acceptances = Acceptances()
    usual, odd = acceptances.of_sequence("a"), acceptances.of_sequence("a")
    for _ in range(100):
        usual.observe(Draft((1, 2), 4), (1, 2))
    before = odd.survivals(Draft((1,), 4))[0]
    for _ in range(8):
        odd.observe(Draft((1,), 4), (2,))
    assert before > 0.9
    assert odd.survivals(Draft((1,), 4))[0] < 0.6


def test_the_best_beginnings_of_all_drafts_are_chosen() -> None:
    gate = DraftGate()
    for _ in range(10):
        gate.observe(2, 0, 0.010)
        gate.observe(2, 3, 0.012)
    assert gate.choose(2, [[0.9, 0.8, 0.01], [0.5, 0.02]], 0.0005) == [2, 1]
    assert gate.choose(2, [[0.1, 0.01]], 0.0005) == [0]


def test_nothing_is_chosen_before_a_step_without_drafts_was_measured() -> None:
    gate = DraftGate()
    assert gate.choose(2, [[0.9], [0.9]], 0.0) == [0, 0]
    gate.observe(2, 0, 0.010)
    assert gate.choose(2, [[0.9], [0.9]], 0.0) == [1, 1]
    for _ in range(70):
        gate.observe(2, 2, 0.010)
    assert gate.choose(2, [[0.9], [0.9]], 0.0) == [0, 0]


def test_a_request_that_always_drafts_leaves_the_cost_of_steps_measured() -> None:
    """Otherwise the drafts of all others would stay out, and the cost of steps unknown."""
    runner = TimedRunner(COSTS["memory"])
    config = make_config(speculation="auto", num_speculative_tokens=4)
    drafter = ScriptedDrafter("right", 16, truth)
    engine = Engine(config, runner, lambda: runner.now_s[0], drafter=drafter)
    for index, mode in enumerate(("suffix", None, None)):
        request = make_request(f"r{index}", 4, seed=index, max_tokens=900, speculation=mode)
        engine.add_request(request)
    num_outputs = [0, 0, 0]
    for _ in range(300):
        for output in engine.step().outputs:
            num_outputs[int(output.request_id[1:])] += len(output.token_ids)
    assert min(num_outputs[1:]) > 0.8 * num_outputs[0]
    assert engine.load().step_fixed_s > 0

"""The draw that follows the step before, kernels interpreted: rows with grammars and penalties
against the reference backend, and the rows beside them against a run without such rows."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from engine import device_step, masks
from engine.device_step import DeviceStep, DeviceSteps
from engine.grammar_state import GrammarState
from engine.runner import ModelRunner
from engine.types import Sample, SamplingParams, ScheduledBatch, ScheduledSequence, Sequence
from tests.draw_helpers import (
    OTHERS,
    PENALTIES,
    grammar_of,
    neighbours,
    run_ahead,
    run_in_turn,
    sequence_of,
    text_of,
)
from tests.engine_helpers import make_base, make_runner, part

NUM_TOKENS = 5
DIGITS = "[0-9]{3}(x|y){9}"
DRAWN = SamplingParams(temperature=1.0, logprobs=2, max_tokens=64)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("models") / "base", num_hidden_layers=1)


def open_runner(base: Path, backend: str) -> ModelRunner:
    return make_runner(base, backend=backend, block_size=16, max_num_seqs=8, num_blocks=32)


@pytest.fixture(scope="module")
def runner(base: Path) -> ModelRunner:
    return open_runner(base, "triton")


@pytest.fixture(scope="module")
def reference(base: Path) -> ModelRunner:
    return open_runner(base, "reference")


def late_rows() -> list[Sequence]:
    """Returns a grammar, penalties, and both."""
    return [
        sequence_of(0, DRAWN, grammar_of(DIGITS)),
        sequence_of(1, PENALTIES),
        sequence_of(2, PENALTIES, grammar_of("(a|b|c){9}")),
    ]


def facts(steps: list[list[Sample]]) -> list[list[object]]:
    """Tokens to the bit, log-probabilities up to rounding."""
    return [
        [
            (
                sample.token_id,
                [
                    (e.token_id, e.rank, [t for t, _ in e.top], pytest.approx(e.logprob, abs=1e-4))
                    for e in (sample.logprobs, *sample.prompt_logprobs)
                    if e
                ],
            )
            for sample in step
        ]
        for step in steps
    ]


def steps_of(runner: ModelRunner) -> DeviceSteps:
    assert isinstance(runner._steps, DeviceSteps)
    return runner._steps


def test_a_step_ahead_draws_what_the_reference_draws_in_turn(
    runner: ModelRunner, reference: ModelRunner
) -> None:
    ours, theirs = [*late_rows(), *neighbours(3)], [*late_rows(), *neighbours(3)]
    assert facts(run_ahead(runner, ours, NUM_TOKENS)) == facts(
        run_in_turn(reference, theirs, NUM_TOKENS)
    )
    assert re.fullmatch("[0-9]{3}(x|y){2}", text_of(ours[0]))
    assert set(text_of(ours[2])) <= set("abc")
    free = sequence_of(0, DRAWN)
    run_ahead(runner, [free], NUM_TOKENS)
    assert free.token_ids != ours[0].token_ids


def test_neighbours_of_late_rows_draw_what_they_draw_alone(runner: ModelRunner) -> None:
    beside, alone = neighbours(3), neighbours(3)
    found = run_ahead(runner, [*late_rows(), *beside], NUM_TOKENS)
    expected = run_ahead(runner, alone, NUM_TOKENS)
    assert facts([step[3:] for step in found]) == facts(expected)
    assert [one.token_ids for one in beside] == [one.token_ids for one in alone]


def test_a_late_draw_repeats_the_draw_at_the_launch(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = facts(run_ahead(runner, neighbours(0), NUM_TOKENS))
    monkeypatch.setattr(device_step, "draws_late", lambda _: True)
    assert facts(run_ahead(runner, neighbours(0), NUM_TOKENS)) == expected


def test_a_grammar_that_begins_with_the_token_in_flight_limits_the_next_one(
    runner: ModelRunner,
) -> None:
    free = sequence_of(0, OTHERS[0])
    run_ahead(runner, [free], 3)
    second = free.token_ids[free.num_prompt_tokens + 1]
    assert free.token_ids[free.num_prompt_tokens] != second
    limited = sequence_of(0, OTHERS[0], grammar_of("[0-9]+", starts_after=second))
    run_ahead(runner, [limited], 5)
    before, after = limited.num_prompt_tokens + 1, limited.num_prompt_tokens + 2
    assert limited.token_ids[: before + 1] == free.token_ids[: before + 1]
    limited.token_ids[limited.num_prompt_tokens : after] = []
    assert re.fullmatch("[0-9]{3}", text_of(limited))


def test_steps_without_late_rows_are_drawn_by_their_launch(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws: list[int] = []
    sample_rows = device_step.sample_rows
    monkeypatch.setattr(
        device_step, "sample_rows", lambda *args: (draws.append(1), sample_rows(*args))
    )
    sequences = neighbours(0)
    step = runner.launch(ScheduledBatch(tuple(part(one) for one in sequences)))
    assert isinstance(step, DeviceStep)
    assert step.drawn is not None
    assert draws == [1]
    step.draw()
    assert draws == [1]
    step.collect()
    late = runner.launch(ScheduledBatch(tuple(part(one) for one in late_rows())))
    assert isinstance(late, DeviceStep)
    assert late.drawn is None
    assert draws == [1]
    late.draw()
    late.draw()
    assert draws == [1, 1]
    late.collect()


def test_penalties_without_a_token_in_flight_wait_for_nothing(runner: ModelRunner) -> None:
    step = runner.launch(ScheduledBatch((part(sequence_of(0, PENALTIES)),)))
    assert isinstance(step, DeviceStep)
    assert step.drawn is not None
    step.collect()


def test_a_draw_too_early_or_none_at_all_is_an_error(runner: ModelRunner) -> None:
    sequence = sequence_of(0, PENALTIES)
    first = runner.launch(ScheduledBatch((part(sequence),)))
    length = sequence.num_prompt_tokens
    next_part = ScheduledSequence(sequence, length, length + 1, True)
    second = runner.launch(ScheduledBatch((next_part,)))
    with pytest.raises(AssertionError, match="before its draw"):
        second.collect()
    third = ScheduledSequence(sequence, length + 1, length + 2, True)
    with pytest.raises(KeyError):  # no step builds on a token that is not drawn
        runner.launch(ScheduledBatch((third,)))
    with pytest.raises(AssertionError, match="before the step before is committed"):
        second.draw()
    with pytest.raises(AssertionError, match="before its draw"):
        second.collect()  # a draw that failed is not repeated
    assert first.collect()[0].token_id is not None


def test_a_sequence_that_ended_before_the_draw_is_not_masked(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled: list[int] = []
    fill = masks.fill_masks
    monkeypatch.setattr(
        masks, "fill_masks", lambda states, rows: (filled.append(len(states)), fill(states, rows))
    )
    ended, kept = sequence_of(0, DRAWN, grammar_of("[0-9]")), late_rows()[2]
    step = runner.launch(ScheduledBatch((part(ended), part(kept))))
    ended.block_table = []
    step.draw()
    assert filled == [1]
    assert all(sample.is_finite for sample in step.collect())


def test_a_row_without_any_allowed_token_fails_alone(
    runner: ModelRunner, reference: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill = masks.fill_masks

    def fill_none(states: list[GrammarState], rows: NDArray[np.int32]) -> None:
        fill(states, rows)
        rows[0] = 0

    monkeypatch.setattr(masks, "fill_masks", fill_none)
    monkeypatch.setattr("engine.sampler.fill_masks", fill_none)
    expected = run_ahead(runner, neighbours(3), 2)
    for one in (runner, reference):
        sequences = [*late_rows()[::2], *neighbours(3)]
        steps = run_ahead(one, sequences, 1)
        assert [sample.is_finite for sample in steps[0]] == [False, *[True] * (len(sequences) - 1)]
        assert facts([steps[0][2:]]) == facts(expected[:1])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinities subtracted
def test_a_row_that_is_not_finite_fails_alone_though_it_is_masked(runner: ModelRunner) -> None:
    broken, kept = sequence_of(0, DRAWN, grammar_of("[0-9]+")), late_rows()[2]
    run_in_turn(runner, [broken, kept], 1)
    runner._kv.v[0][broken.block_table[0]] = float("nan")
    parts = tuple(
        ScheduledSequence(one, one.num_prompt_tokens, one.num_prompt_tokens + 1, True)
        for one in (broken, kept)
    )
    step = runner.launch(ScheduledBatch(parts))
    step.draw()
    assert [sample.is_finite for sample in step.collect()] == [False, True]
    runner._kv.v[0][broken.block_table[0]] = 0.0


def test_log_probabilities_are_those_before_the_mask(runner: ModelRunner) -> None:
    free, masked = sequence_of(0, DRAWN), sequence_of(0, DRAWN, grammar_of("[0-9]+"))
    ours, theirs = run_ahead(runner, [masked], 1)[0][0], run_ahead(runner, [free], 1)[0][0]
    assert ours.logprobs is not None
    assert theirs.logprobs is not None
    assert ours.logprobs.top == theirs.logprobs.top
    assert ours.token_id != theirs.token_id
    assert ours.logprobs.rank > 1


def test_masks_have_room_for_every_row(runner: ModelRunner) -> None:
    held = steps_of(runner).mask_bytes
    assert held == 4 * (8 + 8 * 5)
    sequences = [sequence_of(i, DRAWN, grammar_of("[0-9]{9}")) for i in range(8)]
    run_ahead(runner, sequences, 2)
    assert all(text_of(one).isdigit() for one in sequences)
    assert steps_of(runner).mask_bytes == held

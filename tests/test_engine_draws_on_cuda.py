"""The draw that follows the step before, on a CUDA device: rows with grammars and penalties in
steps launched ahead, replayed by graphs, to the bit the same as one step after the other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from engine import device_step
from engine.runner import ModelRunner
from engine.types import SamplingParams, ScheduledBatch, ScheduledSequence, Sequence
from tests.draw_helpers import (
    PENALTIES,
    grammar_of,
    neighbours,
    run_ahead,
    run_in_turn,
    sequence_of,
    text_of,
)
from tests.engine_helpers import make_base, make_runner, part

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NUM_TOKENS = 12
NUM_LATE = 3
DRAWN = SamplingParams(temperature=1.0, logprobs=2, max_tokens=64)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("models") / "base", num_hidden_layers=2)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def runner(base: Path, request: pytest.FixtureRequest) -> ModelRunner:
    return make_runner(base, "cuda", dtype=request.param, max_num_seqs=8)


def late_rows() -> list[Sequence]:
    """Returns a grammar, penalties, and both."""
    return [
        sequence_of(0, DRAWN, grammar_of("[0-9]{3}(x|y){20}")),
        sequence_of(1, PENALTIES),
        sequence_of(2, PENALTIES, grammar_of("(a|b|c){30}")),
    ]


def free_rows() -> list[Sequence]:
    """Returns sequences of the same lengths at the same places."""
    return [sequence_of(i, DRAWN) for i in range(NUM_LATE)]


def test_steps_ahead_draw_what_steps_in_turn_draw(runner: ModelRunner) -> None:
    ahead, in_turn = [*late_rows(), *neighbours(3)], [*late_rows(), *neighbours(3)]
    before = runner.num_late_compilations
    assert run_ahead(runner, ahead, NUM_TOKENS) == run_in_turn(runner, in_turn, NUM_TOKENS)
    assert re.fullmatch("[0-9]{3}(x|y){9}", text_of(ahead[0]))
    assert set(text_of(ahead[2])) <= set("abc")
    assert runner.num_late_compilations == before


def test_neighbours_draw_the_same_bits_beside_late_rows(runner: ModelRunner) -> None:
    beside, among_free = neighbours(3), neighbours(3)
    found = run_ahead(runner, [*late_rows(), *beside], NUM_TOKENS)
    expected = run_ahead(runner, [*free_rows(), *among_free], NUM_TOKENS)
    assert [step[NUM_LATE:] for step in found] == [step[NUM_LATE:] for step in expected]


def test_a_second_draw_repeats_the_draw_of_the_graph(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run_ahead(runner, neighbours(0), NUM_TOKENS)
    monkeypatch.setattr(device_step, "draws_late", lambda _: True)
    monkeypatch.setattr(device_step, "changes_logits", lambda _: True)  # draws again
    assert run_ahead(runner, neighbours(0), NUM_TOKENS) == expected


def test_graphs_change_no_masked_token(base: Path, runner: ModelRunner) -> None:
    if runner.dtype != torch.float32:
        pytest.skip("a draw in bfloat16 may part by rounding")
    eager = make_runner(base, "cuda", max_num_seqs=8, enforce_eager=True)
    ours, theirs = [*late_rows(), *neighbours(3)], [*late_rows(), *neighbours(3)]
    run_ahead(runner, ours, NUM_TOKENS)
    run_ahead(eager, theirs, NUM_TOKENS)
    assert [one.token_ids for one in ours] == [one.token_ids for one in theirs]


def test_a_masked_row_that_is_not_finite_fails_alone(runner: ModelRunner) -> None:
    broken, kept = late_rows()[::2]
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


def test_masks_of_steps_that_were_never_collected_do_not_mix(runner: ModelRunner) -> None:
    """The page-locked memory is filled again while the copy before may be under way."""
    regexes = ("[0-9]{9}", "(a|b){9}", "[c-f]{9}")
    allowed = ("0123456789", "ab", "cdef")
    for number in range(30):
        kind = number % 3
        dropped = runner.launch(
            ScheduledBatch((part(sequence_of(0, DRAWN, grammar_of(regexes[kind - 1]))),))
        )
        dropped.draw()
        chosen = [sequence_of(i, DRAWN, grammar_of(regexes[kind])) for i in range(8)]
        run_ahead(runner, chosen, 1)
        assert set("".join(map(text_of, chosen))) <= set(allowed[kind])

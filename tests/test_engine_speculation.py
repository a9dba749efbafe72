"""Speculation changes no token: with scripted drafters on engines without a model."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence as Many
from dataclasses import replace

import numpy as np
import pytest

from engine.block_tables import BlockTables
from engine.core import Engine
from engine.drafts import Draft
from engine.grammar_state import fill_masks
from engine.kv_layout import kv_layout
from engine.outputs import kept_draws
from engine.sampler import masked_rows
from engine.speculation import Speculation
from engine.types import (
    Request,
    ResumedChoice,
    Sample,
    ScheduledSequence,
    Sequence,
    TokenOutput,
)
from tests.fakes import (
    FakeModel,
    FakePool,
    FakeRunner,
    check_invariants,
    make_config,
    make_request,
    solo_tokens,
)
from tests.grammar_helpers import VOCAB, ambiguous, grammars, tokenizer
from tests.speculation_helpers import SCRIPTS, Script, ScriptedDrafter

WINDOWS: tuple[tuple[int | None, ...], ...] = ((None,), (7,), (9, None), (5, 5, 5, None))


def make_speculating(
    script: Script,
    runner: FakeRunner | None = None,
    mode: str = "suffix",
    seed: int = 0,
    **config: int | bool | str | None,
) -> tuple[Engine, FakeRunner, ScriptedDrafter]:
    runner = runner or FakeRunner()
    model = runner.model_config

    def truth(sequence: Sequence) -> tuple[int, ...]:
        return solo_tokens(sequence.request, sequence.choice, model)

    drafter = ScriptedDrafter(script, model.vocab_size, truth, seed)
    settings = make_config(block_size=runner.block_size, speculation=mode, **config)
    return Engine(settings, runner, drafter=drafter), runner, drafter


def run(engine: Engine) -> list[TokenOutput]:
    outputs: list[TokenOutput] = []
    while engine.has_work:
        outputs += engine.step().outputs
    return outputs


def tokens_of(outputs: Many[TokenOutput], request_id: str, choice: int = 0) -> tuple[int, ...]:
    own = [o for o in outputs if (o.request_id, o.choice) == (request_id, choice)]
    found: list[int] = []
    for output in own:
        assert output.offset == len(found)
        found += output.token_ids
    return tuple(found)


@pytest.mark.parametrize("ahead", [False, True])
def test_right_drafts_save_steps_and_change_no_token(ahead: bool) -> None:
    runner = FakeRunner()
    runner.runs_ahead = ahead
    engine, _, _ = make_speculating("right", runner, num_speculative_tokens=4)
    request = make_request("r", 5, max_tokens=40)
    engine.add_request(request)
    outputs = run(engine)
    assert tokens_of(outputs, "r") == solo_tokens(request, 0, runner.model_config)
    load = engine.load()
    assert len(runner.batches) < 30
    assert load.num_accepted_tokens == load.num_draft_tokens == sum(load.accepted_per_position)
    assert load.num_accepted_tokens == 40 - len(runner.batches)


class SpoilingRunner(FakeRunner):
    """The guessed tokens of one request spoil the row before them."""

    def _sample(self, item: ScheduledSequence) -> Sample:
        sample = super()._sample(item)
        if item.draft and item.sequence.request.request_id == "spoiled":
            return Sample(None, is_finite=False)
        return sample


@pytest.mark.parametrize("ahead", [False, True])
def test_a_draft_that_spoils_its_step_ends_no_request(ahead: bool) -> None:
    runner = SpoilingRunner()
    runner.runs_ahead = ahead
    engine, _, _ = make_speculating("right", runner, num_speculative_tokens=4)
    requests = [make_request(name, 5, max_tokens=30, seed=3) for name in ("spoiled", "other")]
    for request in requests:
        engine.add_request(request)
    outputs = run(engine)
    for request in requests:
        expected = solo_tokens(request, 0, runner.model_config)
        assert tokens_of(outputs, request.request_id) == expected
    assert engine.load().num_free_blocks == runner.num_blocks
    drafted = [
        end - start
        for batch in runner.batches
        for name, _, start, end in batch
        if name == "spoiled" and start >= 5 and end - start > 1
    ]
    assert len(drafted) == 1


def test_wrong_drafts_change_no_token_and_no_step() -> None:
    engine, runner, drafter = make_speculating("wrong")
    request = make_request("r", 5, max_tokens=20)
    engine.add_request(request)
    assert tokens_of(run(engine), "r") == solo_tokens(request, 0, runner.model_config)
    load = engine.load()
    assert len(runner.batches) == 20
    assert load.num_accepted_tokens == 0 < load.num_draft_tokens
    assert load.num_drafts == 18  # not beside the prompt, nor where one token is left
    assert not drafter.open


def test_each_token_of_an_accepted_run_has_its_log_probabilities() -> None:
    engine, _, _ = make_speculating("right")
    engine.add_request(make_request("r", 5, max_tokens=20, logprobs=0))
    outputs = run(engine)
    assert max(len(output.token_ids) for output in outputs) > 2
    for output in outputs:
        assert tuple(found.token_id for found in output.logprobs) == output.token_ids


def test_a_stop_token_within_a_run_ends_it_there() -> None:
    engine, runner, _ = make_speculating("right", seed=1)
    request = make_request("r", 5, max_tokens=60, stop_token_ids=(3,), seed=2)
    engine.add_request(request)
    outputs = run(engine)
    expected = solo_tokens(request, 0, runner.model_config)
    assert expected[-1] == 3
    assert tokens_of(outputs, "r") == expected
    assert (outputs[-1].finish_reason, outputs[-1].stop_token_id) == ("stop", 3)


def test_accepted_tokens_fill_blocks_that_other_requests_find() -> None:
    engine, runner, _ = make_speculating("right", num_speculative_tokens=8)
    first = make_request("a", 6, max_tokens=30)
    engine.add_request(first)
    output = tokens_of(run(engine), "a")
    again = make_request("b", [*first.prompt_token_ids, *output], max_tokens=4)
    engine.add_request(again)
    outputs = run(engine)
    assert outputs[0].num_cached_tokens >= 32
    assert tokens_of(outputs, "b") == solo_tokens(again, 0, runner.model_config)


def test_a_request_may_switch_speculation_off() -> None:
    engine, _, _ = make_speculating("right")
    for name, mode in (("with", None), ("without", "off")):
        engine.add_request(make_request(name, 5, max_tokens=20, speculation=mode))
    outputs = run(engine)
    assert len([o for o in outputs if o.request_id == "without"]) == 20
    assert len([o for o in outputs if o.request_id == "with"]) < 15


def test_a_draft_takes_no_block_that_a_running_sequence_needs_next() -> None:
    runner = FakeRunner(num_blocks=6)
    engine, _, _ = make_speculating("right", runner, num_speculative_tokens=8)
    for i in range(2):
        engine.add_request(make_request(f"r{i}", 4, max_tokens=8, seed=i))
    outputs = run(engine)
    for i in range(2):
        request = make_request(f"r{i}", 4, max_tokens=8, seed=i)
        assert tokens_of(outputs, f"r{i}") == solo_tokens(request, 0, runner.model_config)
    assert engine.load().num_preemptions == 0


@pytest.mark.parametrize("windows", [(None,), (9, None)])
def test_drafts_leave_a_block_of_each_group_for_every_running_sequence(
    windows: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts of up to three blocks, in a cache that is full at times."""
    extend, left = Speculation.extend, []

    def observed(
        self: Speculation, parts: list[ScheduledSequence], tables: BlockTables, num_running: int
    ) -> None:
        before = tables.pool.num_free
        extend(self, parts, tables, num_running)
        if tables.pool.num_free < before:
            left.append(tables.pool.num_free - num_running * len(windows))

    monkeypatch.setattr(Speculation, "extend", observed)
    layout = kv_layout(windows, 4, 1 << 20)
    runner = FakeRunner(num_blocks=26, layout=layout)
    engine, _, _ = make_speculating("right", runner, num_speculative_tokens=10)
    for i in range(4):
        engine.add_request(make_request(f"r{i}", 4, max_tokens=30, seed=i))
    run(engine)
    assert left
    assert min(left) >= 0


def test_a_run_that_breaks_ends_its_request_after_the_tokens_before() -> None:
    """The second draw is not finite: the next step meets it again."""
    sequence = Sequence(make_request(), 0, 0, [1, 2, 3, 4])
    item = ScheduledSequence(sequence, 3, 6, True, (7, 8))
    broken = Sample(None, is_finite=False)
    assert kept_draws(item, Sample(7, after_draft=(broken, Sample(9)))) == (
        Sample(7, after_draft=(broken, Sample(9))),
    )
    kept = kept_draws(item, Sample(7, after_draft=(Sample(8), Sample(9))))
    assert [draw.token_id for draw in kept] == [7, 8, 9]
    kept = kept_draws(item, Sample(7, after_draft=(Sample(5), Sample(9))))
    assert [draw.token_id for draw in kept] == [7, 5]
    kept = kept_draws(item, Sample(6, after_draft=(Sample(8), Sample(9))))
    assert [draw.token_id for draw in kept] == [6]


class MaskingRunner(FakeRunner):
    """Draws the next token of a text wherever the grammar allows it, with drafts."""

    def __init__(self, answer: Many[int]) -> None:
        super().__init__(256, model=FakeModel(VOCAB, 4096, (0,)))
        self.answer = answer

    def _draw(self, row: ScheduledSequence) -> Sample:
        (state,) = masked_rows([row])[1]
        masks = np.zeros((1, (VOCAB + 31) // 32), dtype=np.int32)
        fill_masks([state], masks)
        allowed = np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little")).tolist()
        wanted = self.answer[row.end - row.sequence.num_prompt_tokens]
        return Sample(wanted if wanted in allowed else allowed[0])


class AnswerDrafter:
    def __init__(self, answer: Many[int]) -> None:
        self.answer = answer

    def propose(self, sequence: Sequence, limit: int) -> Draft | None:
        return Draft(tuple(self.answer[sequence.num_output_tokens :][:limit]), 4)

    def learn(self) -> None: ...

    def end(self, sequence: Sequence) -> None: ...


@pytest.mark.parametrize(
    ("num_rules", "limit"), [(300, "Too many items"), (900, r"Current row has \d+ items")]
)
def test_a_limit_that_a_draft_exceeds_ends_its_request_as_without(
    num_rules: int, limit: str
) -> None:
    """A mask of a draft fails in the first grammar, and a token of it in the second."""
    answer = tokenizer().encode("xyzxyz" + "a" * 60).ids
    found = []
    for mode in ("off", "suffix"):
        runner = MaskingRunner(answer)
        config = make_config(block_size=runner.block_size, speculation=mode)
        engine = Engine(config, runner, grammars=grammars(), drafter=AnswerDrafter(answer))
        grammar = ambiguous(num_rules)
        engine.add_request(make_request("r", grammar=grammar, max_tokens=60, ignore_eos=False))
        outputs = run(engine)
        assert outputs[-1].error is not None
        assert re.search(limit, outputs[-1].error), outputs[-1].error
        assert engine.load().num_free_blocks == 256
        found.append((tokens_of(outputs, "r"), outputs[-1].finish_reason, outputs[-1].error))
    assert engine.load().num_accepted_tokens > 0
    assert found[0] == found[1]


def random_requests(draw: random.Random, count: int, max_len: int) -> list[Request]:
    prefixes = [[draw.randint(1, 15) for _ in range(max_len)] for _ in range(3)]
    requests = []
    for index in range(count):
        length = draw.randint(1, max_len - 1)
        max_tokens = draw.randint(0, min(24, max_len - length))
        requests.append(
            make_request(
                f"r{index}",
                draw.choice(prefixes)[:length],
                draw.choice((None, "a", "b")),
                draw.choice(("", "salt")),
                max_tokens=max_tokens,
                min_tokens=draw.randint(0, max_tokens),
                n=draw.choice((1, 1, 1, 2, 3)),
                seed=draw.randint(0, 9),
                ignore_eos=draw.random() < 0.5,
                stop_token_ids=(3, 4) if draw.random() < 0.3 else (),
                logprobs=0 if draw.random() < 0.2 else None,
                prompt_logprobs=1 if draw.random() < 0.15 else None,
                speculation=draw.choice((None, None, "off", "suffix", "auto")),
            )
        )
    return requests


def resumed_at_random(draw: random.Random, request: Request, model: FakeModel) -> Request:
    """The request as another engine continues it."""
    choices = []
    for choice in range(request.params.n):
        tokens = solo_tokens(request, choice, model)
        choices.append(ResumedChoice(choice, tokens[: draw.randrange(len(tokens))]))
    return replace(request, resumed=tuple(choices))


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("seed", range(8))
def test_no_drafter_changes_a_token_or_keeps_a_block(script: Script, seed: int) -> None:
    """The blocks are few, so that sequences are preempted, and requests leave in the middle."""
    draw = random.Random(seed)
    block_size, max_len = draw.choice((1, 2, 4)), 48
    layout = kv_layout(WINDOWS[seed % len(WINDOWS)], block_size, max_len)
    model = FakeModel(max_model_len=max_len)
    num_blocks = layout.blocks_needed(max_len, 64) + draw.randint(0, 12)
    pool = FakePool(known={"a", "b"})
    runner = FakeRunner(num_blocks, block_size, pool, model, layout)
    runner.runs_ahead = draw.random() < 0.5
    engine, _, drafter = make_speculating(
        script,
        runner,
        draw.choice(("suffix", "auto")),
        seed,
        max_num_seqs=draw.choice((2, 4, 8)),
        max_num_batched_tokens=draw.choice((3, 8, 32)),
        num_speculative_tokens=draw.choice((2, 8)),
        enable_prefix_caching=draw.random() < 0.8,
    )
    requests = random_requests(draw, 40, min(max_len, engine.limits.max_request_tokens))
    waiting = [
        resumed_at_random(draw, r, model) if r.params.max_tokens > 2 and draw.random() < 0.2 else r
        for r in requests
    ]
    outputs: list[TokenOutput] = []
    aborted: set[str] = set()
    while waiting or engine.has_work:
        if waiting and draw.random() < 0.4:
            engine.add_request(waiting.pop())
        if draw.random() < 0.03:
            aborted.add(request_id := draw.choice(requests).request_id)
            engine.abort(request_id, draw.choice((None, 0)))
        if draw.random() < 0.01:
            runner.most_tokens = draw.randint(1, 8)
        if engine.has_work:
            outputs += engine.step().outputs
        runner.most_tokens = None
        if not runner.runs_ahead:
            check_invariants(engine.scheduler, engine._blocks, pool, layout)
    for request in requests:
        check_outputs(request, outputs, model, is_aborted=request.request_id in aborted)
    load = engine.load()
    assert load.num_free_blocks == num_blocks
    assert not drafter.open
    assert drafter.num_proposals > 0


def check_outputs(
    request: Request, outputs: Many[TokenOutput], model: FakeModel, *, is_aborted: bool
) -> None:
    for choice in range(request.params.n):
        own = [o for o in outputs if (o.request_id, o.choice) == (request.request_id, choice)]
        expected = solo_tokens(request, choice, model) if request.params.max_tokens else ()
        found = tuple(token for output in own for token in output.token_ids)
        if not own:
            assert is_aborted
            continue
        start = own[0].offset
        assert own[-1].finish_reason is not None
        whole = expected[start:]
        if is_aborted and own[-1].finish_reason == "abort":
            whole = whole[: len(found)]
        assert found == whole, request
        if request.params.logprobs is not None:
            assert all(len(o.logprobs) == len(o.token_ids) for o in own)

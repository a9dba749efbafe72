"""Choices continued from another engine: the tokens are those of an undisturbed run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine.core import Engine
from engine.errors import InvalidRequestError
from engine.types import Request, ResumedChoice, SamplingParams, TokenOutput
from tests.engine_helpers import BLOCK_SIZE, GREEDY, make_base, make_runner, random_prompt
from tests.fakes import FakeRunner, make_config, make_engine, make_request, ranges, solo_tokens

MAX_TOKENS = 14
PARAMS = {
    "greedy": replace(GREEDY, max_tokens=MAX_TOKENS),
    "drawn": SamplingParams(max_tokens=MAX_TOKENS, seed=7, ignore_eos=True),
    "penalties": SamplingParams(
        max_tokens=MAX_TOKENS,
        seed=7,
        ignore_eos=True,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.7,
        min_p=0.01,
    ),
    "logprobs": SamplingParams(max_tokens=MAX_TOKENS, seed=3, ignore_eos=True, logprobs=2),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base"))


def new_engine(base: Path, **config: int | bool) -> Engine:
    settings = make_config(block_size=BLOCK_SIZE, **config)
    return Engine(settings, make_runner(base, "cpu", **config))


def run(engine: Engine, request: Request) -> dict[int, list[TokenOutput]]:
    engine.add_request(request)
    outputs: dict[int, list[TokenOutput]] = {choice: [] for choice in request.choices}
    while engine.has_work:
        for output in engine.step().outputs:
            outputs[output.choice].append(output)
    return outputs


def tokens(outputs: list[TokenOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def resume(request: Request, done: dict[int, tuple[int, ...]]) -> Request:
    resumed = tuple(ResumedChoice(choice, token_ids) for choice, token_ids in done.items())
    return replace(request, request_id="again", resumed=resumed)


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("name", PARAMS)
def test_a_choice_interrupted_anywhere_gives_the_tokens_of_an_undisturbed_run(
    base: Path, name: str, shares: bool
) -> None:
    request = Request("r", tuple(random_prompt(10, 1)), PARAMS[name])
    (whole,) = run(new_engine(base, enable_prefix_caching=shares), request).values()
    # 10 prompt tokens: 2 and 6 of the output end at a block's boundary, 3 and 7 are past it.
    for done in (0, 1, 2, 3, 6, 7, MAX_TOKENS - 1):
        engine = new_engine(base, enable_prefix_caching=shares, max_num_batched_tokens=7)
        output = tuple(tokens(whole)[:done])
        (rest,) = run(engine, resume(request, {0: output})).values()
        assert [one.offset for one in rest] == list(range(done, MAX_TOKENS))
        assert [one.token_ids for one in rest] == [one.token_ids for one in whole[done:]]
        assert rest[-1].finish_reason == "length"
        for one, other in zip(rest, whole[done:], strict=True):
            for found, wanted in zip(one.logprobs, other.logprobs, strict=True):
                assert found.logprob == pytest.approx(wanted.logprob, abs=1e-4)
                assert found.rank == wanted.rank
                assert [token for token, _ in found.top] == [token for token, _ in wanted.top]
        # Once more, with what the cache now holds.
        (cached,) = run(engine, resume(request, {0: output})).values()
        assert tokens(cached) == tokens(rest)
        assert (engine.load().prefix_hits > 0) == shares


@pytest.mark.parametrize(
    "progress", [{0: 3, 1: 0, 2: 9}, {2: 5, 1: 13}, {0: 0, 2: 1}, {1: 4}], ids=str
)
def test_choices_of_different_progress_go_on_each_for_itself(
    base: Path, progress: dict[int, int]
) -> None:
    params = replace(PARAMS["penalties"], n=3)
    request = Request("r", tuple(random_prompt(9, 2)), params)
    whole = run(new_engine(base), request)
    engine = new_engine(base, max_num_batched_tokens=16)
    done = {choice: tuple(tokens(whole[choice])[:count]) for choice, count in progress.items()}
    rest = run(engine, resume(request, done))
    assert sorted(rest) == sorted(progress)
    for choice, count in progress.items():
        assert tokens(rest[choice]) == tokens(whole[choice])[count:]
    assert engine.load().num_free_blocks == engine.load().num_blocks


def test_the_first_of_the_resumed_choices_computes_the_prompt_for_the_others() -> None:
    engine, runner = make_engine(max_num_batched_tokens=32)
    request = resume(make_request("r", 8, n=4, max_tokens=9), {3: (4, 5), 1: (6,), 2: ()})
    engine.add_request(request)
    engine.step()
    engine.step()
    assert runner.batches == [
        (("again", 1, 0, 9),),
        (("again", 1, 9, 10), ("again", 2, 4, 8), ("again", 3, 8, 10)),
    ]


def test_an_end_is_found_where_an_undisturbed_run_ends() -> None:
    engine, runner = make_engine()
    for seed in range(12):
        request = make_request(
            "r", 5, seed=seed, ignore_eos=False, max_tokens=40, min_tokens=3, stop_token_ids=(7,)
        )
        whole = solo_tokens(request, 0, runner.model_config)
        for done in range(len(whole)):
            (rest,) = run(engine, resume(request, {0: whole[:done]})).values()
            assert tuple(tokens(rest)) == whole[done:]


def test_a_resumed_choice_that_is_preempted_goes_on_once_more() -> None:
    engine, runner = make_engine(FakeRunner(num_blocks=12), max_num_batched_tokens=7)
    requests = [make_request(f"r{i}", 3 + 2 * i, seed=i, max_tokens=20) for i in range(5)]
    wholes = {r.request_id: solo_tokens(r, 0, runner.model_config) for r in requests}
    for request in requests:
        done = ResumedChoice(0, wholes[request.request_id][:6])
        engine.add_request(replace(request, resumed=(done,)))
    found: dict[str, list[int]] = {request.request_id: [] for request in requests}
    while engine.has_work:
        for output in engine.step().outputs:
            found[output.request_id] += output.token_ids
    assert engine.load().num_preemptions > 0
    assert {name: tuple(ids) for name, ids in found.items()} == {
        name: ids[6:] for name, ids in wholes.items()
    }


def test_prompt_log_probabilities_come_only_where_no_output_is_there_yet() -> None:
    engine, _ = make_engine()
    request = make_request("r", 6, n=2, prompt_logprobs=0, logprobs=0)
    outputs = run(engine, resume(request, {0: (5,), 1: ()}))
    assert [len(output.prompt_logprobs) for output in outputs[0]] == [0, 0, 0]
    assert [len(output.prompt_logprobs) for output in outputs[1]] == [6, 0, 0, 0]


@pytest.mark.parametrize(
    ("resumed", "words"),
    [
        ([ResumedChoice(2, ())], "choice 2 is resumed, but n is 2"),
        ([ResumedChoice(-1, ())], "choice -1"),
        ([ResumedChoice(1, ()), ResumedChoice(1, (3,))], "some twice"),
        ([ResumedChoice(0, (16,))], "token id 16 in the output of choice 0"),
        ([ResumedChoice(0, (-1,))], "token id -1"),
        ([ResumedChoice(0, (3,) * 4)], "it is complete: it has 4 of 4 tokens"),
        ([ResumedChoice(0, (3,) * 5)], "it is complete: it has 5 of 4 tokens"),
        ([ResumedChoice(1, (3, 0))], "choice 1 .* complete: its last token 0 ends it"),
        ([ResumedChoice(1, (3, 9))], "complete: its last token 9 ends it"),
    ],
)
def test_what_cannot_go_on_is_refused(resumed: list[ResumedChoice], words: str) -> None:
    engine, _ = make_engine()
    request = make_request("r", n=2, ignore_eos=False, stop_token_ids=(9,))
    with pytest.raises(InvalidRequestError, match=words) as caught:
        engine.add_request(replace(request, resumed=tuple(resumed)))
    assert caught.value.param == "resumed"
    assert not engine.has_work


def test_old_tokens_count_as_queued_until_they_are_computed_again() -> None:
    engine, _ = make_engine(max_num_batched_tokens=6)
    engine.add_request(resume(make_request("r", 5, max_tokens=30), {0: (1, 2, 3, 4, 5)}))
    assert engine.load().queued_tokens == 10
    engine.step()
    assert engine.load().queued_tokens == 4
    assert [output.offset for output in engine.step().outputs] == [5]
    assert ranges(engine.scheduler.schedule()) == [("again", 0, 10, 11)]

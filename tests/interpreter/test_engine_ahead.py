"""Steps that run ahead, kernels interpreted: whole engines compared with the reference backend, and
the effect of an abort, a preemption or a failed step on the step in flight.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine.core import Engine
from engine.runner import ModelRunner
from engine.types import Request, ResumedChoice, SamplingParams
from tests.engine_agreement import Reply, make_engine, run_all
from tests.engine_helpers import make_adapter, make_runner, make_small_base, random_prompt

GREEDY = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_small_base(
        tmp_path_factory.mktemp("models") / "base",
    )


@pytest.fixture(scope="module")
def head(base: Path) -> Path:
    return make_adapter(base.parent / "head", base, 8, ("q_proj", "lm_head"))


@pytest.fixture(scope="module")
def reference(base: Path, head: Path) -> ModelRunner:
    return open_runner(base, head, "reference")


@pytest.fixture(scope="module")
def runner(base: Path, head: Path) -> ModelRunner:
    return open_runner(base, head, "triton")


def open_runner(base: Path, head: Path, backend: str) -> ModelRunner:
    runner = make_runner(base, backend=backend, block_size=16, max_num_seqs=4, num_blocks=8)
    runner.load_adapter("head", head)
    return runner


def request(name: str, length: int, adapter: str | None = None, **changes: object) -> Request:
    values: dict[str, object] = {"max_tokens": 3, "temperature": 0.0, "ignore_eos": True}
    params = SamplingParams(**(values | changes))  # type: ignore[arg-type]
    return Request(name, tuple(random_prompt(length, seed=length)), params, adapter)


def tokens_of(engine: Engine, found: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    for output in engine.step().outputs:
        assert output.error is None
        found[output.request_id] = found.get(output.request_id, ()) + output.token_ids
    return found


def alone(runner: ModelRunner, wanted: Request) -> Reply:
    return run_all(make_engine(runner), [wanted])[wanted.request_id]


def test_log_probabilities_of_prompts_come_from_steps_already_overtaken(
    reference: ModelRunner, runner: ModelRunner
) -> None:
    """Their logits are made when the step is collected: the next one has other inputs by then."""
    requests = [
        request("a", 14, "head", prompt_logprobs=1, logprobs=1),
        request("b", 6, prompt_logprobs=0),
        request("c", 3, "head", max_tokens=1),
    ]

    def logprobs(runner: ModelRunner) -> list[object]:
        engine = make_engine(runner, max_num_batched_tokens=8, max_num_seqs=4)
        for wanted in requests:
            engine.add_request(wanted)
        found: list[object] = []
        while engine.has_work:
            for output in engine.step().outputs:
                known = [*output.prompt_logprobs, *output.logprobs]
                values = [(e.token_id, pytest.approx(e.logprob, abs=1e-4)) for e in known if e]
                found.append((output.request_id, output.offset, output.token_ids, values))
        return sorted(found, key=lambda entry: str(entry)[:8])

    ours, theirs = logprobs(runner), logprobs(reference)
    assert ours == theirs
    assert len(ours) == 7


def test_choices_and_prompts_without_an_answer(reference: ModelRunner, runner: ModelRunner) -> None:
    def outputs(runner: ModelRunner) -> set[tuple[str, int, tuple[int, ...], str | None]]:
        engine = make_engine(runner, max_num_seqs=4)
        engine.add_request(request("n", 17, n=3, temperature=1.5, seed=7, max_tokens=2))
        engine.add_request(request("none", 5, max_tokens=0))
        found: set[tuple[str, int, tuple[int, ...], str | None]] = set()
        while engine.has_work:
            for o in engine.step().outputs:
                found.add((o.request_id, o.choice, o.token_ids, o.finish_reason))
        return found

    ours = outputs(runner)
    assert ours == outputs(reference)
    assert ("none", 0, (), "length") in ours
    assert len(ours) == 7


def test_an_abort_in_flight_leaves_its_row_to_nobody(runner: ModelRunner) -> None:
    kept, gone = request("kept", 7), request("gone", 9, "head")
    expected = alone(runner, kept).tokens, alone(runner, gone).tokens
    engine = make_engine(runner)
    engine.add_request(gone)
    engine.add_request(kept)
    found = tokens_of(engine, tokens_of(engine, {}))  # their first decode is under way
    engine.abort("gone")
    engine.add_request(Request("again", gone.prompt_token_ids, GREEDY, "head"))
    while engine.has_work:
        tokens_of(engine, found)
    assert (found["kept"], found["again"]) == expected
    assert found["gone"] == expected[1][:1]
    assert engine.load().num_free_blocks == 8


def test_what_is_preempted_in_flight_draws_the_same_again(runner: ModelRunner) -> None:
    requests = [request(f"r{i}", 30 + i, max_tokens=4) for i in range(4)]
    expected = {r.request_id: alone(runner, r).tokens for r in requests}
    engine = make_engine(runner, max_num_seqs=4, enable_prefix_caching=False)
    for wanted in requests:
        engine.add_request(wanted)
    found: dict[str, tuple[int, ...]] = {}
    while engine.has_work:
        tokens_of(engine, found)
    assert engine.load().num_preemptions > 0
    assert found == expected


def test_what_is_resumed_draws_the_same_as_the_undisturbed(runner: ModelRunner) -> None:
    """While one sequence decodes, the other's old tokens are computed in the same step."""
    drawn = {"temperature": 1.0, "seed": 11}
    penalties = {"repetition_penalty": 1.4, "presence_penalty": 0.6, "frequency_penalty": 0.3}
    requests = [request("a", 14, "head", **drawn, **penalties), request("b", 9, None, **drawn)]
    expected = {r.request_id: alone(runner, r).tokens for r in requests}
    engine = make_engine(runner, max_num_batched_tokens=12)
    found = {name: tokens[:1] for name, tokens in expected.items()}
    for wanted in requests:
        resumed = (ResumedChoice(0, found[wanted.request_id]),)
        engine.add_request(replace(wanted, resumed=resumed))
    while engine.has_work:
        tokens_of(engine, found)
    assert found == expected


def test_a_failed_launch_harms_neither_the_step_before_nor_those_after(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step in flight is collected, the next ones find no row of the lost one."""
    early, late = request("early", 5, max_tokens=1), request("late", 8)
    expected = alone(runner, early).tokens, alone(runner, late).tokens
    engine = make_engine(runner)
    engine.add_request(early)
    engine.step()
    engine.add_request(request("lost", 6))
    with monkeypatch.context() as patched:
        patched.setattr(runner._rank.model, "logits", None)  # raises half way through the step
        outputs = {o.request_id: o for o in engine.step().outputs}
    assert outputs["early"].token_ids == expected[0]
    assert outputs["lost"].error is not None
    engine.add_request(late)
    found: dict[str, tuple[int, ...]] = {}
    while engine.has_work:
        tokens_of(engine, found)
    assert found["late"] == expected[1]
    assert engine.load().num_free_blocks == 8

"""The device's steps, kernels interpreted, against the reference backend on the same base."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.core import Engine
from engine.runner import ModelRunner
from engine.types import Request, SamplingParams
from tests.engine_helpers import (
    Job,
    make_base,
    make_named_adapters,
    make_sequence,
    open_small,
    part,
    random_prompt,
    run_mixed,
    step,
)

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ADAPTERS = {
    "all": (8, (*ATTENTION, "gate_proj", "up_proj", "down_proj")),
    "head": (16, ("q_proj", "down_proj", "lm_head")),
    "words": (3, ("v_proj", "up_proj", "embed_tokens")),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(
        tmp_path_factory.mktemp("models") / "base",
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )


@pytest.fixture(scope="module")
def adapters(base: Path) -> dict[str, Path]:
    return make_named_adapters(base, ADAPTERS)


def mixed_outputs(runner: ModelRunner, names: tuple[str | None, ...]) -> list[list[int]]:
    """Prompts in chunks beside decodes, neighbours with other adapters."""
    for name in names:
        assert name is None or runner.adapters.acquire(name)
    jobs = [
        Job(
            make_sequence(random_prompt(9 + 5 * i, seed=20 + i), 24 * i, adapter=name),
            starts_at=i % 2,
            chunk=5 + 3 * i,
        )
        for i, name in enumerate(names)
    ]
    return run_mixed(runner, jobs, num_tokens=5)


@pytest.mark.parametrize("dtype", ["float32", "float16"])  # few rows in 16 bits: other kernels
def test_mixed_steps_give_what_the_reference_gives(
    base: Path, adapters: dict[str, Path], dtype: str
) -> None:
    names = (None, "all", "head", "words", "all")
    expected = mixed_outputs(open_small(base, adapters, "reference", dtype), names)
    found = mixed_outputs(open_small(base, adapters, "triton", dtype), names)
    assert found == expected
    assert expected[1] != expected[4]


def test_combinations_give_what_the_reference_gives(base: Path, adapters: dict[str, Path]) -> None:
    names = (None, "0.5*all+words", "words+head", "all", "0.5*all+words")
    expected = mixed_outputs(open_small(base, adapters, "reference"), names)
    found = mixed_outputs(open_small(base, adapters, "triton"), names)
    assert found == expected


def test_adapters_that_become_active_in_a_step_give_what_the_reference_gives(
    base: Path, adapters: dict[str, Path]
) -> None:
    """The first becomes active in its first chunk, among the base's rows of the second chunk of
    another, and in one step of more than a large tile."""

    def outputs(backend: str) -> list[list[int]]:
        runner = open_small(base, adapters, backend)
        assert runner.adapters.acquire("all")
        assert runner.adapters.acquire("head")
        jobs = []
        for i, (name, length, active_from) in enumerate(
            [("all", 14, 9), ("all", 90, 20), ("head", 23, 13), ("all", 9, 0), ("head", 12, None)]
        ):
            sequence = make_sequence(random_prompt(length, seed=20 + i), 24 * i, adapter=name)
            request = replace(sequence.request, active_from=active_from)
            jobs.append(Job(replace(sequence, request=request), chunk=(100, 100, 7, 4, 9)[i]))
        return run_mixed(runner, jobs, num_tokens=3)

    assert outputs("triton") == outputs("reference")


def test_parameters_of_the_draw_reach_the_device(base: Path, adapters: dict[str, Path]) -> None:
    varied = [
        SamplingParams(temperature=1.2, top_k=20, logprobs=2, max_tokens=9),
        SamplingParams(temperature=0.9, top_p=0.8, max_tokens=9),
        SamplingParams(temperature=1.0, min_p=0.05, prompt_logprobs=1, max_tokens=9),
        SamplingParams(temperature=0.0, repetition_penalty=1.5, logit_bias=((7, 3.0),)),
        SamplingParams(temperature=0.0, min_tokens=8, stop_token_ids=(5, 9), logprobs=0),
    ]

    def answers(backend: str) -> list[object]:
        runner = open_small(base, {}, backend)
        sequences = [
            make_sequence(random_prompt(6, seed=i), 24 * i, params, seed=2**40 + i)
            for i, params in enumerate(varied)
        ]
        found: list[object] = []
        for _ in range(3):
            for sample in step(runner, *(part(sequence) for sequence in sequences)):
                logprobs = [*sample.prompt_logprobs, sample.logprobs]
                found.append(sample.token_id)
                found += [
                    (e.token_id, e.rank, [t for t, _ in e.top], pytest.approx(e.logprob, abs=1e-4))
                    for e in logprobs
                    if e
                ]
        return found

    assert answers("triton") == answers("reference")


def test_a_step_launched_ahead_takes_its_token_from_the_device(
    base: Path, adapters: dict[str, Path]
) -> None:
    def outputs(asynchronous: bool) -> dict[str, list[int]]:
        runner = open_small(base, adapters, "triton")
        config = EngineConfig(
            "",
            "base",
            block_size=16,
            max_num_batched_tokens=16,
            max_num_seqs=8,
            async_scheduling=asynchronous,
        )
        engine = Engine(config, runner)
        for i, adapter in enumerate((None, "all", "words")):
            params = SamplingParams(max_tokens=4, temperature=1.0, seed=i, ignore_eos=True)
            engine.add_request(Request(f"r{i}", tuple(random_prompt(7, i)), params, adapter))
        found: dict[str, list[int]] = {}
        while engine.has_work:
            for output in engine.step().outputs:
                found.setdefault(output.request_id, []).extend(output.token_ids)
        assert engine.load().num_free_blocks == runner.num_blocks
        return found

    ahead = outputs(True)
    assert ahead == outputs(False)
    assert [len(tokens) for tokens in ahead.values()] == [4, 4, 4]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinities subtracted
def test_a_row_that_is_not_finite_fails_alone(base: Path) -> None:
    runner = open_small(base, {}, "triton")
    prompt = random_prompt(6, seed=1)
    healthy = step(runner, part(make_sequence(prompt)))[0]
    broken = make_sequence(random_prompt(5, seed=2), 24)
    step(runner, part(broken))
    runner._kv.v[0][broken.block_table[0]] = float("nan")
    answers = step(runner, part(broken), part(make_sequence(prompt, 48)))
    assert [answer.is_finite for answer in answers] == [False, True]
    assert answers[1] == healthy

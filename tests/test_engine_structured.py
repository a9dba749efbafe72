"""Constrained answers of a random base on the CPU: always valid, and neighbours never differ."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import jsonschema
import pytest

from engine.core import Engine
from engine.runner import ModelRunner
from engine.types import Request, ResumedChoice, SamplingParams
from tests.engine_helpers import BLOCK_SIZE, make_base, make_runner, random_prompt
from tests.fakes import make_config
from tests.grammar_helpers import (
    EOS,
    VOCAB,
    grammars,
    random_schema,
    run,
    schema_grammar,
    text,
    token_ids,
)

NUM_SCHEMAS = 100


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    base = make_base(
        tmp_path_factory.mktemp("base"),
        vocab_size=VOCAB,
        eos_token_id=EOS,
        num_hidden_layers=2,
        max_position_embeddings=1024,
    )
    return make_runner(base, num_blocks=1024)


def new_engine(runner: ModelRunner, **config: int | bool) -> Engine:
    settings = make_config(
        block_size=BLOCK_SIZE, max_num_batched_tokens=512, max_num_seqs=32, **config
    )
    return Engine(settings, runner, grammars=grammars())


def constrained(count: int, **params: object) -> dict[Request, dict[str, object]]:
    """Requests of any sampling parameters, by schema."""
    generator = random.Random(count)
    found = {}
    for i in range(count):
        schema = random_schema(generator, 3)
        sampling = SamplingParams(
            max_tokens=700,
            temperature=generator.choice([0.0, 1.0, 2.0]),
            top_k=generator.choice([0, 0, 5]),
            top_p=generator.choice([1.0, 0.7]),
            min_p=generator.choice([0.0, 0.2]),
            repetition_penalty=generator.choice([1.0, 1.5]),
            frequency_penalty=generator.choice([0.0, 0.8]),
            logit_bias=generator.choice([(), ((EOS, 100.0),), ((EOS, -100.0),)]),
            seed=i,
            grammar=schema_grammar(schema),
        )
        prompt = tuple(random_prompt(5 + i % 7, i))
        found[Request(f"c{i}", prompt, replace(sampling, **params))] = schema  # type: ignore[arg-type]
    return found


def free(count: int) -> list[Request]:
    return [
        Request(
            f"f{i}",
            tuple(random_prompt(9, 1000 + i)),
            SamplingParams(
                max_tokens=40, temperature=float(i % 2), seed=i, presence_penalty=0.3 * (i % 3)
            ),
        )
        for i in range(count)
    ]


def test_every_ended_answer_of_a_random_base_is_valid_and_neighbours_do_not_change(
    runner: ModelRunner,
) -> None:
    requests = constrained(NUM_SCHEMAS)
    alone = {key: token_ids(found) for key, found in run(new_engine(runner), free(8)).items()}
    together = run(new_engine(runner), [*requests, *free(8)])
    num_ended = 0
    for request, schema in requests.items():
        outputs = together[request.request_id, 0]
        assert outputs[-1].finish_reason in ("stop", "length"), outputs[-1]
        if outputs[-1].finish_reason == "stop":
            num_ended += 1
            answer = text([token for token in token_ids(outputs) if token != EOS])
            jsonschema.validate(json.loads(answer), schema)
    assert num_ended > 0.95 * NUM_SCHEMAS
    assert {key: token_ids(together[key]) for key in alone} == alone


def test_answers_do_not_depend_on_the_batch_or_on_forced_tokens(runner: ModelRunner) -> None:
    requests = list(constrained(30, n=2))
    together = run(new_engine(runner), requests)
    drawn = run(new_engine(runner, force_grammar_tokens=False), requests)
    assert {key: token_ids(found) for key, found in together.items()} == {
        key: token_ids(found) for key, found in drawn.items()
    }
    for request in requests[:8]:
        for key, outputs in run(new_engine(runner), [request]).items():
            assert token_ids(outputs) == token_ids(together[key])


def test_log_probabilities_are_those_before_the_mask(runner: ModelRunner) -> None:
    """The most likely tokens of the first position are the same as without a grammar."""
    (request,) = constrained(1, logprobs=3, temperature=0.0, logit_bias=())
    plain = replace(request, params=replace(request.params, grammar=None, max_tokens=1))
    ((first, *_),) = run(new_engine(runner), [request]).values()
    ((expected,),) = run(new_engine(runner), [plain]).values()
    assert first.logprobs[0].top == expected.logprobs[0].top
    assert first.logprobs[0].token_id == first.token_ids[0]


@pytest.mark.parametrize("part", [0.2, 0.5, 0.8])
def test_an_answer_continued_by_another_engine_is_the_undisturbed_one(
    runner: ModelRunner, part: float
) -> None:
    requests = [r for r in constrained(40, repetition_penalty=1.2) if r.params.temperature < 2]
    whole = run(new_engine(runner), requests)
    resumed, expected = [], {}
    for request in requests:
        ids = token_ids(whole[request.request_id, 0])
        done = tuple(ids[: int(part * len(ids))])
        resumed.append(replace(request, resumed=(ResumedChoice(0, done),)))
        expected[request.request_id, 0] = ids[len(done) :]
    rest = run(new_engine(runner), resumed)
    assert {key: token_ids(found) for key, found in rest.items()} == expected

"""Requests with grammars and penalties that come, end and are aborted in any order, kernels
interpreted and steps ahead, against each request alone on the reference backend."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.core import Engine
from engine.grammars import Grammars
from engine.runner import ModelRunner
from engine.types import Grammar, Request, SamplingParams
from tests.draw_helpers import tokenizer
from tests.engine_helpers import make_base, make_runner, random_prompt

NUM_BLOCKS = 4
KINDS: tuple[dict[str, object], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "top_k": 30},
    {"temperature": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"temperature": 1.0, "grammar": Grammar("regex", "(a|b)[0-9]+end!")},
    {"temperature": 1.0, "grammar": Grammar("regex", "forced(x|y|z)+"), "presence_penalty": 0.5},
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("models") / "base", num_hidden_layers=1)


def open_runner(base: Path, backend: str) -> ModelRunner:
    return make_runner(base, backend=backend, block_size=16, max_num_seqs=4, num_blocks=NUM_BLOCKS)


def open_engine(runner: ModelRunner, grammars: Grammars) -> Engine:
    config = EngineConfig("", "base", block_size=16, max_num_seqs=4, max_num_batched_tokens=48)
    return Engine(config, runner, grammars=grammars)


def request(draw: random.Random, number: int) -> Request:
    params = SamplingParams(
        max_tokens=draw.randint(2, 8),
        seed=number,
        **draw.choice(KINDS),  # type: ignore[arg-type]
    )
    length = draw.choice((13, 14, 28, 29, 30))  # soon in need of another block
    return Request(f"r{number}", tuple(random_prompt(length, seed=number)), params)


def take(engine: Engine, found: dict[str, tuple[int, ...]], ended: set[str]) -> None:
    for output in engine.step().outputs:
        assert output.error is None
        assert output.offset == len(found.setdefault(output.request_id, ()))
        found[output.request_id] += output.token_ids
        if output.finish_reason not in (None, "abort"):
            ended.add(output.request_id)


def test_any_order_gives_the_tokens_of_each_request_alone(base: Path) -> None:
    grammars = Grammars(tokenizer())
    runner, reference = open_runner(base, "triton"), open_runner(base, "reference")
    num_preempted, num_aborted = 0, 0
    for seed in range(2):
        draw = random.Random(seed)
        engine, requests = open_engine(runner, grammars), []
        found: dict[str, tuple[int, ...]] = {}
        ended: set[str] = set()
        aborted: set[str] = set()
        for _ in range(14):
            if draw.random() < 0.8 and len(requests) < 7:
                requests.append(request(draw, 100 * seed + len(requests)))
                engine.add_request(requests[-1])
            running = [one.request_id for one in requests if one.request_id not in ended | aborted]
            if running and draw.random() < 0.1:
                gone = draw.choice(running)
                aborted.add(gone)
                engine.abort(gone)
            take(engine, found, ended)
        while engine.has_work:
            take(engine, found, ended)
        assert engine.load().num_free_blocks == NUM_BLOCKS
        num_preempted += engine.load().num_preemptions
        num_aborted += len(aborted)
        assert ended | aborted == {one.request_id for one in requests}
        for one in requests:
            alone: dict[str, tuple[int, ...]] = {}
            quiet = open_engine(reference, grammars)
            quiet.add_request(one)
            while quiet.has_work:
                take(quiet, alone, set())
            expected, ours = alone[one.request_id], found.get(one.request_id, ())
            assert ours == expected[: len(ours)]
            assert one.request_id in aborted or ours == expected
    grammars.close()
    assert num_preempted
    assert num_aborted

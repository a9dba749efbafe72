"""Requests through a whole engine, and the allowed differences of their outputs: shared by the
tests on a GPU and in the interpreter.

A sequence's numbers may change with the size of its step, because matrix products do, by no more
than rounding: the first token that differs must have been a near tie.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.core import Engine
from engine.runner import ModelRunner
from engine.types import Request, SamplingParams, TokenLogprobs
from engine.types import Sequence as Choice
from tests.engine_helpers import (
    acquire,
    make_named_adapters,
    make_runner,
    make_sequence,
    random_prompt,
)

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ADAPTERS = {"all": (8, LINEARS), "wide": (40, ("q_proj", "down_proj")), "mlp": (16, LINEARS[4:])}
OPTIONAL = {
    "head": (16, ("q_proj", "down_proj", "lm_head")),
    "words": (3, ("v_proj", "up_proj", "embed_tokens")),
}
OWNERS: tuple[str | None, ...] = (None, *ADAPTERS, *OPTIONAL)
NUM_TOKENS = 8
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.3}  # of log-probabilities
PARAMS = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, logprobs=2, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Reply:
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    error: str | None = None
    num_cached: int = 0


def make_adapters(base: Path) -> dict[str, Path]:
    return make_named_adapters(base, ADAPTERS | OPTIONAL)


def make_engine(runner: ModelRunner, is_ahead: bool = True, **changes: object) -> Engine:
    values: dict[str, object] = {
        "model_path": "",
        "base_digest": "base",
        "block_size": 16,
        "max_num_seqs": 64,
        "async_scheduling": is_ahead,
    }
    return Engine(EngineConfig(**(values | changes)), runner)  # type: ignore[arg-type]


def open_runner(
    base: Path, adapters: dict[str, Path], device: str, dtype: str, max_seqs: int
) -> ModelRunner:
    """Returns a runner with every adapter on the device."""
    runner = make_runner(
        base,
        device,
        backend="triton",
        dtype=dtype,
        block_size=16,
        max_num_seqs=max_seqs,
        num_blocks=5 * max_seqs,
    )
    for name, path in adapters.items():
        runner.load_adapter(name, path)
        acquire(runner, name)
    return runner


def probe(i: int, length: int | None = None) -> Request:
    """Returns the i-th of the requests that are repeated with other neighbours."""
    prompt = random_prompt(5 + 7 * (i % 6) if length is None else length, seed=300 + i)
    return Request(f"probe-{i}", tuple(prompt), PARAMS, OWNERS[i % len(OWNERS)])


def neighbours(
    count: int, seed: int, length: int | None = None, owners: Sequence[str | None] = OWNERS
) -> list[Request]:
    draw = random.Random(seed)
    return [
        Request(
            f"neighbour-{i}",
            tuple(random_prompt(length or draw.randint(1, 40), seed=1000 * seed + i)),
            replace(PARAMS, max_tokens=NUM_TOKENS if length else draw.randint(1, NUM_TOKENS)),
            draw.choice(owners),
        )
        for i in range(count)
    ]


def run_all(engine: Engine, requests: Sequence[Request]) -> dict[str, Reply]:
    for request in requests:
        engine.add_request(request)
    replies = {request.request_id: Reply() for request in requests}
    while engine.has_work:
        for output in engine.step().outputs:
            reply = replies[output.request_id]
            replies[output.request_id] = Reply(
                reply.tokens + output.token_ids,
                reply.logprobs + output.logprobs,
                reply.error or output.error,
                output.num_cached_tokens,
            )
    load = engine.load()
    assert load.num_free_blocks == load.num_blocks
    return replies


def assert_alike(found: Reply, expected: Reply, tolerance: float) -> None:
    """Asserts equality up to rounding: log-probabilities are close as far as the tokens are the
    same, and where the tokens differ, the two best were nearly equal."""
    assert (found.error, expected.error) == (None, None)
    assert len(found.tokens) == len(expected.tokens) > 0
    for ours, theirs in zip(found.logprobs, expected.logprobs, strict=True):
        assert abs(ours.top[0][1] - theirs.top[0][1]) < tolerance
        if ours.token_id != theirs.token_id:
            assert theirs.top[0][1] - theirs.top[1][1] < tolerance
            return


def assert_same(runner: ModelRunner, found: Reply, expected: Reply) -> None:
    assert_alike(found, expected, TOLERANCE[runner.dtype])
    if runner.dtype == torch.float32:
        assert found.tokens == expected.tokens


def decoding(count: int) -> list[Choice]:
    """Returns sequences with two blocks each, their prompts not computed yet."""
    params = SamplingParams(temperature=0.0, logprobs=2, max_tokens=9)
    drawn = replace(params, temperature=0.9, top_p=0.9)
    return [
        make_sequence(
            random_prompt(1 + i % 30, seed=i), 2 * i, (params, drawn)[i % 2], seed=i, num_blocks=2
        )
        for i in range(count)
    ]

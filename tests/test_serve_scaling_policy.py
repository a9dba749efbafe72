"""The number of replicas of a base: the need by tables, the decision over time by simulation."""

from __future__ import annotations

import math
import pickle
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.serve.config import AutoscalingPolicy

from serve_app.autoscaling.policy import (
    BaseSample,
    EngineScalingPolicy,
    ReplicaSample,
    ScalingArgs,
    ScalingState,
    from_stats,
    replicas_needed,
    to_stats,
    wanted_replicas,
)
from tests.scaling_world import TICK_S, TOKEN_S, World

ARGS = ScalingArgs(1, 16)
# 0.1 ms a token, 64 rows: the tables below reckon in these.
IDLE = ReplicaSample(
    step_token_s=0.0001, max_num_seqs=64, max_num_batched_tokens=8192, max_kv_tokens=100_000
)


def base(*replicas: ReplicaSample, requests: float = 0, unsent: float = 0) -> BaseSample:
    return BaseSample(replicas, len(replicas), requests, unsent)


@pytest.mark.parametrize(
    ("sample", "resource", "replicas"),
    [
        (base(IDLE, IDLE), "time", 0.0),
        # 20,000 tokens per second are 2 s of work per second; a replica is full at 0.8.
        (base(replace(IDLE, arriving_tokens_per_s=20_000)), "time", 2.5),
        # 20 rows in steps of 20 + 20 ms decode 500 tokens per second; in steps with all 64 rows a
        # token needs 20 / 64 + 1 ms: 0.656 s per second.
        (
            base(replace(IDLE, num_running=20, step_fixed_s=0.02, step_sequence_s=0.001)),
            "time",
            0.656 / 0.8,
        ),
        # The memory holds 25 sequences: a token needs 20 / 25 + 1 ms.
        (
            base(
                replace(
                    IDLE, num_running=20, kv_usage=0.68, step_fixed_s=0.02, step_sequence_s=0.001
                )
            ),
            "time",
            0.9 / 0.8,
        ),
        # Half of the time goes into 5,000 prompt tokens per second, the other half decodes 250.
        (
            base(
                replace(
                    IDLE,
                    num_running=20,
                    arriving_tokens_per_s=5000,
                    step_fixed_s=0.02,
                    step_sequence_s=0.001,
                )
            ),
            "time",
            (0.5 + 0.328) / 0.8,
        ),
        # Twice as many are refused as sent.
        (
            base(
                replace(IDLE, arriving_tokens_per_s=8000, sent_per_s=5, refused_per_s=10),
                replace(IDLE, arriving_tokens_per_s=8000, sent_per_s=5, refused_per_s=10),
            ),
            "time",
            6.0,
        ),
        (base(replace(IDLE, num_running=57.6, sent_per_s=1, refused_per_s=2)), "rows", 3.0),
        (base(replace(IDLE, num_running=57.6, sent_per_s=1, refused_per_s=1e6)), "rows", 16.0),
        (base(replace(IDLE, num_running=57.6, refused_per_s=5)), "rows", 1.0),  # none was sent
        (base(replace(IDLE, kv_usage=0.85, sent_per_s=1, refused_per_s=1)), "kv", 2.0),
        # 11 s of work are waiting; in 10 s all but 1 s per replica must be done.
        (base(replace(IDLE, queued_tokens=110_000)), "ttft", 1.0),
        (base(replace(IDLE, queued_tokens=110_000), IDLE), "ttft", 1.0),
        (base(replace(IDLE, backlog_tokens=440_000), replace(IDLE)), "ttft", 4.0),
        # 10 s of work, and 2 s of work that arrive each second.
        (base(replace(IDLE, queued_tokens=130_000, arriving_tokens_per_s=20_000)), "ttft", 3.0),
        # A full step also decodes: 8192 tokens need 0.82 s and 0.41 s.
        (
            base(
                replace(
                    IDLE,
                    queued_tokens=110_000,
                    num_running=40,
                    step_fixed_s=0.0096,
                    step_sequence_s=0.01,
                )
            ),
            "ttft",
            1.5,
        ),
        (base(replace(IDLE, num_running=57.6)), "rows", 1.0),
        (base(replace(IDLE, num_running=57.6, num_waiting=57.6), IDLE), "rows", 2.0),
        (base(replace(IDLE, num_running=57.6), unsent=57.6), "rows", 2.0),
        (base(IDLE, requests=172.8), "rows", 3.0),  # waiting for their adapters
        (base(replace(IDLE, num_running=57.6, backlog_requests=115.2)), "rows", 3.0),
        (base(replace(IDLE, kv_usage=0.85), replace(IDLE, kv_usage=0.85)), "kv", 2.0),
        (base(replace(IDLE, kv_usage=0.85, queued_tokens=85_000)), "kv", 2.0),
    ],
)
def test_what_a_load_needs(sample: BaseSample, resource: str, replicas: float) -> None:
    need = replicas_needed(sample, ARGS)
    assert getattr(need, resource) == pytest.approx(replicas, rel=0.01)
    assert need.replicas >= getattr(need, resource)


def test_a_queue_that_grows_before_the_engines_counts_as_arrivals() -> None:
    assert replicas_needed(base(IDLE), ARGS, 16_000).time == pytest.approx(2.0)
    assert replicas_needed(base(IDLE), ARGS, -16_000).time == 0.0


def constant(tokens_per_s: float) -> Callable[[float], float]:
    return lambda _: tokens_per_s


@pytest.mark.parametrize("engine_queue_s", [None, 0.5])
def test_a_step_is_followed_at_once_upward_and_slowly_downward(
    engine_queue_s: float | None,
) -> None:
    world = World(ARGS, engine_queue_s=engine_queue_s)
    world.run(30, constant(3000))
    assert world.orders == [1]
    world.run(5, constant(45_000))  # 4.5 replicas' work
    assert world.ordered >= 4  # in a single order, not step by step
    world.run(55, constant(45_000))
    assert world.history[-1][3] <= ARGS.target_ttft_s
    assert 6 <= max(world.orders) <= 14  # full at 0.8, and more for the grown queue
    world.run(600, constant(45_000))
    assert world.ordered in (6, 7)
    began = len(world.history)
    world.run(55, constant(3000))
    assert len({ordered for _, ordered, _, _ in world.history[began:]}) == 1
    world.run(900, constant(3000))
    assert world.ordered == 1
    assert world.num_turns == 1


def test_a_ramp_is_climbed_without_a_queue() -> None:
    world = World(ARGS)
    world.run(600, lambda at_s: 3000 + 100 * at_s)
    assert world.num_turns == 0
    assert max(queue_s for *_, queue_s in world.history) < ARGS.target_ttft_s


def test_a_saw_faster_than_the_delay_is_not_followed_downward() -> None:
    world = World(ARGS)
    world.run(1200, lambda at_s: 5000 + at_s % 40 * 1000)
    assert world.num_turns == 0
    assert world.history[-1][3] <= ARGS.target_ttft_s


def test_a_slow_saw_moves_few_replicas() -> None:
    world = World(ARGS)
    world.run(240, lambda at_s: 5000 + at_s % 120 * 333)
    began = len(world.history)
    world.run(1200, lambda at_s: 5000 + at_s % 120 * 333)
    later = {ordered for _, ordered, _, _ in world.history[began:]}
    assert max(later) - min(later) <= 1


@pytest.mark.parametrize("seed", range(5))
def test_noise_moves_nothing(seed: int) -> None:
    draw = random.Random(seed)
    world = World(ARGS)
    world.run(300, lambda _: max(0.0, draw.gauss(25_000, 8000)))
    settled = len(world.history)
    world.run(1200, lambda _: max(0.0, draw.gauss(25_000, 8000)))
    assert len({ordered for _, ordered, _, _ in world.history[settled:]}) <= 2
    assert world.num_turns <= 2


def test_sequences_that_stay_long_get_rows() -> None:
    world = World(ARGS, row_s=30.0)
    world.run(300, constant(15_000))  # 15 per second, 450 at a time, 57.6 per replica
    assert world.ordered == 8


def test_a_replica_that_reports_nothing_keeps_its_place() -> None:
    state = ScalingState()
    silent = BaseSample((IDLE,), 2)
    for second in range(600):
        assert wanted_replicas(silent, 2, ARGS, state, float(second)) == 2
    assert wanted_replicas(BaseSample((), 0), 5, ARGS, state, 600.0) == 5


def test_bounds_hold_whatever_the_load() -> None:
    state, args = ScalingState(), ScalingArgs(2, 3)
    flood = base(replace(IDLE, queued_tokens=1e9))
    wanted = [wanted_replicas(flood, 2, args, state, float(second)) for second in range(10)]
    assert wanted[0] == 2
    assert max(wanted) == 3
    assert wanted_replicas(base(IDLE), 0, args, ScalingState(), 0.0) == 2


NUMBERS = st.just(0.0) | st.floats(min_value=1e-6, max_value=1e9)
SAMPLES = st.builds(ReplicaSample, *[NUMBERS] * len(fields(ReplicaSample)))


@given(SAMPLES, NUMBERS, NUMBERS, st.integers(1, 50))
def test_more_load_never_needs_less(
    one: ReplicaSample, requests: float, unsent: float, count: int
) -> None:
    sample = BaseSample((one,) * count, count, requests, unsent)
    need = replicas_needed(sample, ARGS).replicas
    assert 0 <= need < math.inf
    more = replace(
        sample,
        replicas=(
            replace(one, queued_tokens=one.queued_tokens + 1000, num_waiting=one.num_waiting + 1),
            *sample.replicas[1:],
        ),
    )
    assert replicas_needed(more, ARGS).replicas >= need


@given(st.lists(st.tuples(SAMPLES, st.integers(0, 20))))
def test_every_answer_lies_within_the_bounds(
    moments: list[tuple[ReplicaSample, int]],
) -> None:
    state, args = ScalingState(), ScalingArgs(2, 9, downscale_delay_s=3.0)
    for number, (one, current) in enumerate(moments):
        sample = BaseSample((one,) * current, current)
        assert 2 <= wanted_replicas(sample, current, args, state, number * TICK_S) <= 9


@dataclass(frozen=True)
class Point:
    timestamp: float
    value: object


def context(raw: object, **fields: object) -> SimpleNamespace:
    known: dict[str, object] = {
        "current_num_replicas": 1,
        "target_num_replicas": 1,
        "total_num_requests": 0.0,
        "total_queued_requests": 0.0,
        "current_time": 100.0,
        "raw_metrics": raw,
    }
    return SimpleNamespace(**known | fields)


def series(sample: ReplicaSample, at_s: float = 100.0) -> dict[str, dict[object, list[Point]]]:
    return {name: {"one": [Point(at_s, value)]} for name, value in to_stats(sample).items()}


FULL = replace(IDLE, queued_tokens=1e6)
POLICY = {"min_replicas": 1, "max_replicas": 8, "upscale_delay_s": 0.0}


def test_the_policy_reads_what_a_replica_reports() -> None:
    assert from_stats(to_stats(FULL)) == FULL
    answer, state = EngineScalingPolicy(**POLICY)(context(series(FULL)))
    assert (answer, state) == (8, {})
    stale = context(series(FULL, at_s=50.0))
    assert EngineScalingPolicy(**POLICY)(stale)[0] == 1


@pytest.mark.parametrize(
    "broken",
    [
        context(None),
        context({}),
        context("nonsense"),
        context({"queued_tokens": {"one": [Point(math.nan, "many")]}}),
        context({"max_num_seqs": {"one": [Point(100.0, math.nan)]}}),
        context(series(replace(FULL, queued_tokens=math.inf))),
        context(series(FULL), total_num_requests="many", total_queued_requests=None),
        context(series(FULL), current_time=None, current_num_replicas=None),
        SimpleNamespace(target_num_replicas=1),
    ],
)
def test_nothing_makes_the_policy_raise(broken: SimpleNamespace) -> None:
    answer, _ = EngineScalingPolicy(**POLICY)(broken)
    assert 1 <= answer <= 8


def test_options_that_nobody_knows_leave_the_replicas_alone() -> None:
    policy = EngineScalingPolicy(speed=3.0)
    assert policy(context(series(FULL), target_num_replicas=5))[0] == 5


def test_the_policy_works_in_a_process_that_has_none_of_our_modules() -> None:
    """The policy must unpickle in Serve's controller, where the product's modules are missing."""
    policy = AutoscalingPolicy(  # type: ignore[no-untyped-call]
        policy_function="serve_app.autoscaling.policy:EngineScalingPolicy", policy_kwargs=POLICY
    )
    code = """
import pickle, sys
from types import SimpleNamespace as Space
policy = pickle.loads(sys.stdin.buffer.read())(min_replicas=1, max_replicas=8, upscale_delay_s=0.0)
points = lambda value: {"one": [Space(timestamp=100.0, value=value)]}
raw = {"num_waiting": points(640.0), "max_num_seqs": points(64.0)}
context = Space(current_num_replicas=1, target_num_replicas=1, total_num_requests=0.0,
                total_queued_requests=0.0, current_time=100.0, raw_metrics=raw)
assert policy(context) == (8, {}), policy(context)
assert "serve_app" not in sys.modules
"""
    payload = policy.get_serialized_policy_def()
    assert payload is not None
    assert pickle.loads(payload).__name__ == "EngineScalingPolicy"
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], input=payload, capture_output=True, cwd="/"
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]


def test_the_simulated_replica_is_the_one_of_the_tables() -> None:
    assert IDLE.step_token_s == TOKEN_S

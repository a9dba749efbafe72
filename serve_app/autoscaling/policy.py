"""How many engine replicas a base needs, and when it gets more or fewer of them.

`wanted_replicas` is the decision: plain numbers in, a number out, time given by the caller; its
`ScalingState` belongs to one base. `EngineScalingPolicy` puts it behind Serve's autoscaling API.
Serve pickles this file by value into its controller, where an exception would stop all deployments:
nothing here raises into it, and nothing but the standard library is imported.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from math import ceil, exp, isfinite
from typing import Protocol

logger = logging.getLogger("ray.serve")

# What counts as full. Above it waits grow faster than load.
_FULL_TIME = 0.8  # of a replica's time
_FULL_ROWS = 0.9  # of max_num_seqs
# A replica is given up only where the others would stay below this share of full.
_SPARE = 0.9
_MOST_REFUSED = 15.0  # to one that is served: who is refused may come again and again
_RECOVERY_S = 10.0  # a queue that is too long is gone so long after the replicas for it came
_SMOOTHING_S = 1.0
_GROWTH_S = 3.0  # the growth of the queue before the engines, smoothed
_SLOWEST_SHRINK = 4  # at most one replica in so many goes at a time

_EVERY_S = 0.5  # Serve asks ten times a second, engines report once
_MAX_AGE_S = 10.0  # of a replica's report
_COMPLAIN_EVERY_S = 60.0


@dataclass(frozen=True, slots=True)
class ScalingArgs:
    """`models[].autoscaling`."""

    min_replicas: int
    max_replicas: int
    target_ttft_s: float = 1.0
    target_kv_usage: float = 0.85
    upscale_delay_s: float = 3.0
    downscale_delay_s: float = 60.0


@dataclass(frozen=True, slots=True)
class ReplicaSample:
    """One engine replica now. 0 where it is not known."""

    num_running: float = 0.0  # sequences
    num_waiting: float = 0.0
    queued_tokens: float = 0.0  # still to prefill
    arriving_tokens_per_s: float = 0.0  # of prompts, without what the prefix cache had
    kv_usage: float = 0.0
    step_fixed_s: float = 0.0  # see `EngineLoad`
    step_token_s: float = 0.0
    step_sequence_s: float = 0.0
    max_num_seqs: float = 0.0
    max_num_batched_tokens: float = 0.0
    max_kv_tokens: float = 0.0
    # Of the whole base, in the ingresses' queues, as this replica was told.
    backlog_requests: float = 0.0
    backlog_tokens: float = 0.0
    sent_per_s: float = 0.0  # requests that went from there to engines
    refused_per_s: float = 0.0  # and that found no place there


@dataclass(frozen=True, slots=True)
class BaseSample:
    """All of one base now."""

    replicas: tuple[ReplicaSample, ...]  # those that reported
    num_running_replicas: int  # reports may be missing
    # Requests that Serve holds for it or that are with its engines, as Serve counts.
    num_requests: float = 0.0
    num_unsent_requests: float = 0.0  # of these, in handles


@dataclass(frozen=True, slots=True)
class Need:
    """How many replicas each resource asks for; the largest counts. Of what is refused it is taken
    that it resembles what is served."""

    time: float  # the prompts that keep arriving and the tokens that keep being drawn
    ttft: float  # the queue that is there, down to the target soon
    rows: float  # a row of the batch for each sequence
    kv: float

    @property
    def replicas(self) -> float:
        return max(self.time, self.ttft, self.rows, self.kv)


@dataclass(slots=True)
class ScalingState:
    """What a decision remembers of those before it."""

    at_s: float | None = None
    need: float = 0.0  # smoothed
    backlog_tokens: float = 0.0
    growth_tokens_per_s: float = 0.0  # of the backlog
    above_since_s: float | None = None  # more are needed than there are, without a pause
    below_since_s: float | None = None  # fewer would do
    most_below: int = 0  # the most that would have done since then


def wanted_replicas(
    sample: BaseSample, current: int, args: ScalingArgs, state: ScalingState, now_s: float
) -> int:
    """`current`: how many were ordered, those that still start included."""
    current = min(args.max_replicas, max(args.min_replicas, current))
    if not sample.replicas:
        return current
    _remember(sample, args, state, now_s)
    needed = ceil(state.need - 1e-6)
    if needed > current:
        state.below_since_s = None
        if state.above_since_s is None:
            state.above_since_s = now_s
        if current < args.max_replicas and now_s - state.above_since_s >= args.upscale_delay_s:
            state.above_since_s = None
            return min(args.max_replicas, needed)
        return current
    state.above_since_s = None
    enough = max(args.min_replicas, ceil(state.need / _SPARE - 1e-6))
    # A replica that says nothing may be the one that is full.
    if enough >= current or len(sample.replicas) < sample.num_running_replicas:
        state.below_since_s = None
        return current
    if state.below_since_s is None:
        state.below_since_s, state.most_below = now_s, enough
    state.most_below = max(state.most_below, enough)
    if now_s - state.below_since_s < args.downscale_delay_s:
        return current
    state.below_since_s = None
    return max(state.most_below, current - max(1, current // _SLOWEST_SHRINK))


def replicas_needed(
    sample: BaseSample, args: ScalingArgs, growth_tokens_per_s: float = 0.0
) -> Need:
    """`growth_tokens_per_s`: of the queues before the engines, whose arrivals engines do not see.
    Needs at least one report."""
    replicas = sample.replicas
    token_s = _mean(_token_s(one) for one in replicas)
    backlog_tokens = max(one.backlog_tokens for one in replicas)
    backlog_requests = max(one.backlog_requests for one in replicas)
    queued_tokens = sum(one.queued_tokens for one in replicas) + backlog_tokens
    arriving = sum(one.arriving_tokens_per_s for one in replicas) + max(0.0, growth_tokens_per_s)
    demand = 1 + refused_share(replicas)
    arriving *= demand
    work = arriving * token_s  # seconds of work a second
    recovery_s = _RECOVERY_S + args.target_ttft_s
    sequences = sum(one.num_running + one.num_waiting for one in replicas)
    requests = max(sequences + sample.num_unsent_requests, sample.num_requests)
    rows = _mean(one.max_num_seqs for one in replicas)
    kv_tokens = _mean(one.max_kv_tokens for one in replicas)
    used = sum(one.kv_usage for one in replicas)
    kv = demand * used + (queued_tokens / kv_tokens if kv_tokens else 0.0)
    running = sum(one.num_running for one in replicas)
    # As many as the memory holds.
    most_rows = min(rows, args.target_kv_usage * running / used) if used and running else rows
    prompts = arriving * _mean(one.step_token_s for one in replicas)
    drawing = demand * _drawing(replicas, most_rows)
    return Need(
        time=(prompts + drawing) / _FULL_TIME,
        # What clears the queue but for `target_ttft_s` of each replica's work, while more arrives:
        # n * recovery - work * recovery = queue - n * target.
        ttft=(work * _RECOVERY_S + queued_tokens * token_s) / recovery_s,
        rows=(demand * requests + backlog_requests) / (rows * _FULL_ROWS) if rows else 0.0,
        kv=kv / args.target_kv_usage,
    )


def _drawing(replicas: Sequence[ReplicaSample], most_rows: float) -> float:
    """Seconds a second that the output tokens of now would take in steps with `most_rows` rows.

    Rows alone tell little: they fill up the faster the less time is left, so that a replica with a
    fifth of its rows in use may have half of its load. In a step of s = fixed + rows * sequence
    seconds and the prompts' share of the time, rows / s tokens are drawn.
    """
    tokens_per_s = 0.0
    for one in replicas:
        step_s = one.step_fixed_s + one.step_sequence_s * one.num_running
        if step_s:
            prompts = min(_FULL_TIME, one.arriving_tokens_per_s * one.step_token_s)
            tokens_per_s += one.num_running * (1 - prompts) / step_s
    token_s = _mean(one.step_sequence_s for one in replicas)
    if most_rows:
        token_s += _mean(one.step_fixed_s for one in replicas) / most_rows
    return tokens_per_s * token_s


def refused_share(replicas: Sequence[ReplicaSample]) -> float:
    """Requests that were refused, to one that went to an engine."""
    sent = max(one.sent_per_s for one in replicas)
    refused = max(one.refused_per_s for one in replicas)
    return min(_MOST_REFUSED, refused / sent) if sent else 0.0


def _remember(sample: BaseSample, args: ScalingArgs, state: ScalingState, now_s: float) -> None:
    backlog = max(one.backlog_tokens for one in sample.replicas)
    if state.at_s is None:
        state.need = min(args.max_replicas, replicas_needed(sample, args).replicas)
    elif (passed_s := now_s - state.at_s) > 0:
        slope = (backlog - state.backlog_tokens) / passed_s
        state.growth_tokens_per_s += (slope - state.growth_tokens_per_s) * _share(
            passed_s, _GROWTH_S
        )
        need = replicas_needed(sample, args, state.growth_tokens_per_s).replicas
        # Capped, so that a flood is forgotten as fast as it came.
        need = min(args.max_replicas, need)
        state.need += (need - state.need) * _share(passed_s, _SMOOTHING_S)
    state.at_s, state.backlog_tokens = now_s, backlog


def _share(passed_s: float, over_s: float) -> float:
    """Of the new value in a mean that forgets."""
    return 1 - exp(-passed_s / over_s)


def _token_s(one: ReplicaSample) -> float:
    """A queued prompt token's time in full steps, which decode beside it. 0: not measured yet."""
    if not one.step_token_s or not one.max_num_batched_tokens:
        return one.step_token_s
    decode_s = one.step_fixed_s + one.step_sequence_s * one.num_running
    return one.step_token_s + decode_s / one.max_num_batched_tokens


def _mean(values: Iterable[float]) -> float:
    """Of those that are known."""
    known = [value for value in values if value > 0]
    return sum(known) / len(known) if known else 0.0


_NAMES = tuple(one.name for one in fields(ReplicaSample))


def to_stats(sample: ReplicaSample) -> dict[str, float]:
    """What `record_autoscaling_stats` returns: Serve takes finite numbers and nothing else."""
    return {name: _finite(value) for name, value in asdict(sample).items()}


def from_stats(numbers: Mapping[str, object]) -> ReplicaSample:
    return ReplicaSample(**{name: _finite(numbers.get(name, 0.0)) for name in _NAMES})


def _finite(value: object) -> float:
    is_number = isinstance(value, int | float) and isfinite(value)
    return max(0.0, float(value)) if is_number else 0.0  # type: ignore[arg-type]


class _Point(Protocol):
    timestamp: float
    value: float


class ScalingContext(Protocol):
    """What is read of `ray.serve.config.AutoscalingContext`."""

    current_num_replicas: int
    target_num_replicas: int
    total_num_requests: float
    total_queued_requests: float
    raw_metrics: Mapping[str, Mapping[object, Sequence[_Point]]] | None
    current_time: float | None


@dataclass(slots=True)
class _Ticks:
    due_s: float = 0.0
    complain_s: float = 0.0


class EngineScalingPolicy:
    """Made once a base by Serve's controller, called ten times a second."""

    def __init__(self, **options: float) -> None:
        self._args: ScalingArgs | None = None
        try:
            self._args = ScalingArgs(**options)  # type: ignore[arg-type]
        except TypeError:
            logger.exception("autoscaling options %s", options)
        self._state = ScalingState()
        self._ticks = _Ticks()

    def __call__(self, context: ScalingContext) -> tuple[int, dict[str, object]]:
        target = context.target_num_replicas
        now_s = time.monotonic()
        try:
            if now_s >= self._ticks.due_s and self._args is not None:
                self._ticks.due_s = now_s + _EVERY_S
                target = self._decide(context, self._args, now_s)
        except Exception:  # whatever it is, the replicas that there are stay
            self._state = ScalingState()
            if now_s >= self._ticks.complain_s:
                self._ticks.complain_s = now_s + _COMPLAIN_EVERY_S
                logger.exception("the number of engine replicas stays as it is")
        return target, {}

    def _decide(self, context: ScalingContext, args: ScalingArgs, now_s: float) -> int:
        current = context.target_num_replicas
        sample = sample_of(context)
        wanted = wanted_replicas(sample, current, args, self._state, now_s)
        if wanted != current:
            logger.info("engine replicas %d -> %d for %s", current, wanted, _words(sample))
        return wanted


@dataclass(slots=True)
class _Collected:
    numbers: dict[str, object] = field(default_factory=dict)
    newest_s: float = 0.0


def sample_of(context: ScalingContext) -> BaseSample:
    """The newest number of each replica; Serve's own means would be a look-back period old."""
    found: dict[object, _Collected] = {}
    for name, by_replica in (context.raw_metrics or {}).items():
        for replica, points in by_replica.items():
            if points:
                one = found.setdefault(replica, _Collected())
                one.numbers[name] = points[-1].value
                one.newest_s = max(one.newest_s, points[-1].timestamp)
    oldest_s = (context.current_time or 0.0) - _MAX_AGE_S
    reported = tuple(
        from_stats(one.numbers)
        for one in found.values()
        if one.newest_s >= oldest_s and "max_num_seqs" in one.numbers
    )
    return BaseSample(
        reported,
        context.current_num_replicas,
        _finite(context.total_num_requests),
        _finite(context.total_queued_requests),
    )


def _words(sample: BaseSample) -> str:
    running = sum(one.num_running for one in sample.replicas)
    waiting = sum(one.num_waiting for one in sample.replicas) + sample.num_unsent_requests
    backlog = max((one.backlog_requests for one in sample.replicas), default=0.0)
    tokens = sum(one.queued_tokens for one in sample.replicas)
    return (
        f"{running:.0f} running, {waiting:.0f} waiting, {backlog:.0f} in ingresses' queues, "
        f"{tokens:.0f} tokens to prefill"
    )

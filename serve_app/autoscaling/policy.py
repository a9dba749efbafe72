"""Decides how many engine replicas a base needs, and when it gets more or fewer of them.

`wanted_replicas` is the decision: plain numbers in, a number out; the caller passes the time, and a
`ScalingState` for each base. `EngineScalingPolicy` adapts it to Serve's autoscaling API. Serve
pickles this file by value into its controller, where an exception would stop all deployments: so it
lets no exception reach the controller, and imports only the standard library.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import ceil, exp, isfinite
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

logger = logging.getLogger("ray.serve")

# The usage that counts as full. Above it waiting times grow faster than load.
_FULL_TIME = 0.8  # of a replica's time
_FULL_ROWS = 0.9  # of max_num_seqs
# A replica is removed only if the others would stay below this share of full.
_DOWNSCALE_USAGE = 0.9
_MAX_REFUSED = 15.0  # refused per served request, because refused clients may retry often
_RECOVERY_S = 10.0  # new replicas clear a queue that is too long within this time
_SMOOTHING_S = 1.0
_GROWTH_S = 3.0  # smoothing of the growth of the ingresses' queues
_SHRINK_DIVISOR = 4  # at most one of so many replicas is removed at a time

_PERIOD_S = 0.5  # Serve calls ten times per second, engines report once
_MAX_AGE_S = 10.0  # of a replica's report
_LOG_PERIOD_S = 60.0


@dataclass(frozen=True, slots=True)
class ScalingArgs:
    """The fields of `models[].autoscaling`."""

    min_replicas: int
    max_replicas: int
    target_ttft_s: float = 1.0
    target_kv_usage: float = 0.85
    upscale_delay_s: float = 3.0
    downscale_delay_s: float = 60.0


@dataclass(frozen=True, slots=True)
class ReplicaSample:
    """The present state of an engine replica. 0 if unknown."""

    num_running: float = 0.0  # sequences
    num_waiting: float = 0.0
    queued_tokens: float = 0.0  # still to prefill
    arriving_tokens_per_s: float = 0.0  # prompt tokens that the prefix cache does not have
    kv_usage: float = 0.0
    step_fixed_s: float = 0.0  # see `EngineLoad`
    step_token_s: float = 0.0
    step_sequence_s: float = 0.0
    max_num_seqs: float = 0.0
    max_num_batched_tokens: float = 0.0
    max_kv_tokens: float = 0.0
    # Of the whole base, in the ingresses' queues, as reported to this replica.
    backlog_requests: float = 0.0
    backlog_tokens: float = 0.0
    sent_per_s: float = 0.0  # requests sent from there to engines
    refused_per_s: float = 0.0  # requests refused there


@dataclass(frozen=True, slots=True)
class BaseSample:
    """The present state of a base."""

    replicas: tuple[ReplicaSample, ...]  # of the replicas that reported
    num_running_replicas: int  # may be more than reported
    # Requests that Serve holds for the base or that its engines have, as counted by Serve.
    num_requests: float = 0.0
    num_unsent_requests: float = 0.0  # of these, the requests in handles


@dataclass(frozen=True, slots=True)
class Need:
    """The replicas that each resource needs; the largest number counts. Refused requests are
    assumed to be like the served requests."""

    time: float  # to prefill the arriving prompts and decode at the present rate
    ttft: float  # to reduce the present queue to the target soon
    rows: float  # to give each sequence a row of a batch
    kv: float  # to hold the KV cache

    @property
    def replicas(self) -> float:
        return max(self.time, self.ttft, self.rows, self.kv)


@dataclass(slots=True)
class ScalingState:
    """The memory of earlier decisions about a base."""

    at_s: float | None = None
    need: float = 0.0  # smoothed
    backlog_tokens: float = 0.0
    growth_tokens_per_s: float = 0.0  # of the backlog, smoothed
    above_since_s: float | None = None  # since when more replicas are needed than ordered
    below_since_s: float | None = None  # since when fewer would suffice
    most_below: int = 0  # the largest number that was needed since then


def wanted_replicas(
    sample: BaseSample, current: int, args: ScalingArgs, state: ScalingState, now_s: float
) -> int:
    """Returns the number of replicas to order. `current`: the number ordered before, including
    replicas that are still starting."""
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
    enough = max(args.min_replicas, ceil(state.need / _DOWNSCALE_USAGE - 1e-6))
    # A replica without a report may be full.
    if enough >= current or len(sample.replicas) < sample.num_running_replicas:
        state.below_since_s = None
        return current
    if state.below_since_s is None:
        state.below_since_s, state.most_below = now_s, enough
    state.most_below = max(state.most_below, enough)
    if now_s - state.below_since_s < args.downscale_delay_s:
        return current
    state.below_since_s = None
    return max(state.most_below, current - max(1, current // _SHRINK_DIVISOR))


def replicas_needed(
    sample: BaseSample, args: ScalingArgs, growth_tokens_per_s: float = 0.0
) -> Need:
    """Computes the need from the reports (never empty). `growth_tokens_per_s`: the growth of the
    ingresses' queues, whose requests the engines do not see yet."""
    replicas = sample.replicas
    token_s = _mean(_token_s(replica) for replica in replicas)
    backlog_tokens = max(replica.backlog_tokens for replica in replicas)
    backlog_requests = max(replica.backlog_requests for replica in replicas)
    queued_tokens = sum(replica.queued_tokens for replica in replicas) + backlog_tokens
    arriving = sum(replica.arriving_tokens_per_s for replica in replicas)
    arriving += max(0.0, growth_tokens_per_s)
    demand = 1 + refused_share(replicas)
    arriving *= demand
    work = arriving * token_s  # seconds of work per second
    recovery_s = _RECOVERY_S + args.target_ttft_s
    sequences = sum(replica.num_running + replica.num_waiting for replica in replicas)
    requests = max(sequences + sample.num_unsent_requests, sample.num_requests)
    rows = _mean(replica.max_num_seqs for replica in replicas)
    kv_tokens = _mean(replica.max_kv_tokens for replica in replicas)
    used = sum(replica.kv_usage for replica in replicas)
    kv = demand * used + (queued_tokens / kv_tokens if kv_tokens else 0.0)
    running = sum(replica.num_running for replica in replicas)
    # The rows that the KV cache has memory for.
    most_rows = min(rows, args.target_kv_usage * running / used) if used and running else rows
    prompts = arriving * _mean(replica.step_token_s for replica in replicas)
    decoding = demand * _decoding(replicas, most_rows)
    return Need(
        time=(prompts + decoding) / _FULL_TIME,
        # The n that reduces the queue to `target_ttft_s` of work per replica while more arrives:
        # n * recovery - work * recovery = queue - n * target.
        ttft=(work * _RECOVERY_S + queued_tokens * token_s) / recovery_s,
        rows=(demand * requests + backlog_requests) / (rows * _FULL_ROWS) if rows else 0.0,
        kv=kv / args.target_kv_usage,
    )


def _decoding(replicas: Sequence[ReplicaSample], most_rows: float) -> float:
    """Returns the seconds per second to decode at the present rate in steps with `most_rows` rows.

    The number of rows alone is misleading: rows fill up faster the less time is left, so a replica
    with a fifth of its rows in use may be half loaded. A step lasts s = fixed + rows * sequence
    seconds and decodes `rows` tokens, in the share of time that prompts leave.
    """
    tokens_per_s = 0.0
    for replica in replicas:
        step_s = replica.step_fixed_s + replica.step_sequence_s * replica.num_running
        if step_s:
            prompts = min(_FULL_TIME, replica.arriving_tokens_per_s * replica.step_token_s)
            tokens_per_s += replica.num_running * (1 - prompts) / step_s
    token_s = _mean(replica.step_sequence_s for replica in replicas)
    if most_rows:
        token_s += _mean(replica.step_fixed_s for replica in replicas) / most_rows
    return tokens_per_s * token_s


def refused_share(replicas: Sequence[ReplicaSample]) -> float:
    """Returns the refused requests per request sent to an engine."""
    sent = max(replica.sent_per_s for replica in replicas)
    refused = max(replica.refused_per_s for replica in replicas)
    return min(_MAX_REFUSED, refused / sent) if sent else 0.0


def _remember(sample: BaseSample, args: ScalingArgs, state: ScalingState, now_s: float) -> None:
    backlog = max(replica.backlog_tokens for replica in sample.replicas)
    if state.at_s is None:
        state.need = min(args.max_replicas, replicas_needed(sample, args).replicas)
    elif (passed_s := now_s - state.at_s) > 0:
        slope = (backlog - state.backlog_tokens) / passed_s
        state.growth_tokens_per_s += (slope - state.growth_tokens_per_s) * _share(
            passed_s, _GROWTH_S
        )
        need = replicas_needed(sample, args, state.growth_tokens_per_s).replicas
        # Capped, so that the need falls as fast after a flood as it rose.
        need = min(args.max_replicas, need)
        state.need += (need - state.need) * _share(passed_s, _SMOOTHING_S)
    state.at_s, state.backlog_tokens = now_s, backlog


def _share(passed_s: float, over_s: float) -> float:
    """Returns the weight of a new value in an exponentially decaying mean."""
    return 1 - exp(-passed_s / over_s)


def _token_s(replica: ReplicaSample) -> float:
    """Returns the seconds of a queued prompt token in full steps that also decode; 0 if not
    measured."""
    if not replica.step_token_s or not replica.max_num_batched_tokens:
        return replica.step_token_s
    decode_s = replica.step_fixed_s + replica.step_sequence_s * replica.num_running
    return replica.step_token_s + decode_s / replica.max_num_batched_tokens


def _mean(values: Iterable[float]) -> float:
    """Returns the mean of the known (positive) values, or 0."""
    known = [value for value in values if value > 0]
    return sum(known) / len(known) if known else 0.0


_NAMES = tuple(entry.name for entry in fields(ReplicaSample))


def to_stats(sample: ReplicaSample) -> dict[str, float]:
    """Returns the result of `record_autoscaling_stats`: Serve accepts finite numbers only."""
    return {name: _finite(value) for name, value in asdict(sample).items()}


def from_stats(numbers: Mapping[str, object]) -> ReplicaSample:
    return ReplicaSample(**{name: _finite(numbers.get(name, 0.0)) for name in _NAMES})


def _finite(value: object) -> float:
    is_number = isinstance(value, int | float) and isfinite(value)
    return max(0.0, float(value)) if is_number else 0.0  # type: ignore[arg-type]


class EngineScalingPolicy:
    """The policy of a base. Serve's controller makes it and calls it ten times per second."""

    def __init__(self, **options: float) -> None:
        self._args: ScalingArgs | None = None
        try:
            self._args = ScalingArgs(**options)  # type: ignore[arg-type]
        except TypeError:
            logger.exception("invalid autoscaling options, not scaling: %s", options)
        self._state = ScalingState()
        self._due_s = 0.0  # of the next decision
        self._log_s = 0.0  # when an error may be logged again

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, object]]:
        target = context.target_num_replicas
        now_s = time.monotonic()
        try:
            if now_s >= self._due_s and self._args is not None:
                self._due_s = now_s + _PERIOD_S
                sample = sample_of(context)
                wanted = wanted_replicas(sample, target, self._args, self._state, now_s)
                if wanted != target:
                    words = _summary(sample)
                    logger.info("engine replicas %d -> %d for %s", target, wanted, words)
                target = wanted
        except Exception:  # the number of replicas stays
            self._state = ScalingState()
            if now_s >= self._log_s:
                self._log_s = now_s + _LOG_PERIOD_S
                logger.exception("could not decide on the number of engine replicas, keeping it")
        return target, {}


def sample_of(context: AutoscalingContext) -> BaseSample:
    """Collects the newest numbers of each replica, because Serve's means are as old as the
    look-back period."""
    found: dict[object, dict[str, object]] = {}
    newest_s: dict[object, float] = {}
    for name, by_replica in (context.raw_metrics or {}).items():
        for replica, points in by_replica.items():
            if points:
                found.setdefault(replica, {})[name] = points[-1].value
                newest_s[replica] = max(newest_s.get(replica, 0.0), points[-1].timestamp)
    oldest_s = (context.current_time or 0.0) - _MAX_AGE_S
    reported = tuple(
        from_stats(numbers)
        for replica, numbers in found.items()
        if newest_s[replica] >= oldest_s and "max_num_seqs" in numbers
    )
    return BaseSample(
        reported,
        context.current_num_replicas,
        _finite(context.total_num_requests),
        _finite(context.total_queued_requests),
    )


def _summary(sample: BaseSample) -> str:
    running = sum(replica.num_running for replica in sample.replicas)
    waiting = sum(replica.num_waiting for replica in sample.replicas) + sample.num_unsent_requests
    backlog = max((replica.backlog_requests for replica in sample.replicas), default=0.0)
    tokens = sum(replica.queued_tokens for replica in sample.replicas)
    return (
        f"{running:.0f} running, {waiting:.0f} waiting, {backlog:.0f} queued in ingresses, "
        f"{tokens:.0f} tokens to prefill"
    )

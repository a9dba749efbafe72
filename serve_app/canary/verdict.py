"""The rule that decides whether a canary is worse than its stable version, from the counts of both.

A canary is rolled back when it is worse by more than the configured margin and the counts make that
certain: a canary that is not worse than allowed is rolled back in less than 1 % of hours
(FALSE_ROLLBACKS_PER_HOUR), however often it is judged; see `sequential`. The hour's 1 % is shared
among the spans of time that are judged (`Trial`) and the four questions asked of each: errors,
empty outputs, clients that left, the first token. A fifth question is asked of the whole trial
while the stable version has too few requests: do most requests fail?

The first token: if the canary were at most r times as slow as the stable version, then for every
time t it would be later than r t at most as often as the stable version is later than t. That is
tested with t around the stable version's p95, at bounds of ARM_SECONDS, so that r counts as up to
1.41 times more; and only if the canary's p95 exceeds r times that of the stable version.

Pure: the counts are given, and the caller acts on the verdict.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from serve_app.canary.sequential import Proportion, log_evidence
from serve_app.config import CanaryArgs
from serve_app.tally import ARM_SECONDS, ArmCounts, ArmOutcome, quantile

FIRST_TOKEN_QUANTILE = 0.95
FALSE_ROLLBACKS_PER_HOUR = 0.01
SPANS_PER_WINDOW = 4  # spans that begin per window at most, each judged separately
_NUM_QUESTIONS = 4
# The error rate that a stable version with hardly any requests is assumed to stay below. A client
# with all the traffic always has the same arm; if that is the canary, this is the only comparison.
_MAX_STABLE_ERROR_RATE = 0.5
_BUCKETS_PER_DOUBLING = 2  # of ARM_SECONDS


@dataclass(frozen=True, slots=True)
class Verdict:
    reason: str | None  # to roll back; None: none
    has_enough: bool  # requests of both arms, for every question of the rule


def judge(stable: ArmCounts, canary: ArmCounts, rule: CanaryArgs) -> Verdict:
    """Compares rates once the canary has `min_requests`, and the first token once both arms have.
    The rates of a stable version without requests count as 0."""
    has_enough = min(canary.num_judged, stable.num_judged) >= rule.min_requests
    reason = (
        _outcome_increase(
            "errors", stable, canary, rule, rule.max_error_rate_increase, "error", "non_finite"
        )
        or _outcome_increase(
            "empty outputs", stable, canary, rule, rule.max_empty_rate_increase, "empty"
        )
        or _left_increase(stable, canary, rule)
        or _slower_first_token(stable, canary, rule)
    )
    return Verdict(reason, has_enough)


def non_finite(canary: ArmCounts, rule: CanaryArgs) -> str | None:
    """Returns a reason to roll back as soon as there are more than `max_non_finite`."""
    num = canary.count("non_finite")
    if num <= rule.max_non_finite:
        return None
    return f"{num} of {canary.num_judged} outputs not finite, {rule.max_non_finite} allowed"


def mostly_fails(stable: ArmCounts, canary: ArmCounts, rule: CanaryArgs) -> str | None:
    """Returns a reason to roll back before the stable version has `min_requests`: the canary's
    error rate exceeds one half by the margin, with certainty. A stable version is assumed to fail
    less often."""
    failed = Proportion(stable.count("error", "non_finite"), stable.num_judged)
    if failed.total >= rule.min_requests or failed.rate > _MAX_STABLE_ERROR_RATE:
        return None
    limit = _MAX_STABLE_ERROR_RATE + rule.max_error_rate_increase
    return _outcome_increase("errors", ArmCounts(), canary, rule, limit, "error", "non_finite")


def needed_log_evidence(rule: CanaryArgs) -> float:
    """Returns the evidence that a question about a span needs. Each question of each span that
    begins in an hour has an equal part of the error rate for all its life; the whole trial is the
    first span, and `mostly_fails` is asked of it alone."""
    num_spans = 1 + 3600 * SPANS_PER_WINDOW / rule.window_s
    return math.log((num_spans * _NUM_QUESTIONS + 1) / FALSE_ROLLBACKS_PER_HOUR)


def _outcome_increase(
    noun: str,
    stable: ArmCounts,
    canary: ArmCounts,
    rule: CanaryArgs,
    limit: float,
    *outcomes: ArmOutcome,
) -> str | None:
    return _increase(
        noun,
        Proportion(stable.count(*outcomes), stable.num_judged),
        Proportion(canary.count(*outcomes), canary.num_judged),
        rule,
        limit,
    )


def _left_increase(stable: ArmCounts, canary: ArmCounts, rule: CanaryArgs) -> str | None:
    """Clients leave a version that hangs or talks nonsense. They also leave while a version is
    being loaded, which is not counted."""
    return _increase(
        "clients left",
        Proportion(stable.num_warm_left, stable.num_judged + stable.num_warm_left),
        Proportion(canary.num_warm_left, canary.num_judged + canary.num_warm_left),
        rule,
        rule.max_left_rate_increase,
    )


def _increase(
    noun: str, stable: Proportion, canary: Proportion, rule: CanaryArgs, limit: float
) -> str | None:
    if canary.total < rule.min_requests:
        return None
    if log_evidence(stable, canary, limit) < needed_log_evidence(rule):
        return None
    return (
        f"{canary.num} {noun} in {canary.total} requests against {stable.num} in {stable.total}: "
        f"more than {100 * limit:g} points"
    )


def _slower_first_token(stable: ArmCounts, canary: ArmCounts, rule: CanaryArgs) -> str | None:
    slow, slower = stable.warm_first_token, canary.warm_first_token
    num, num_canary = sum(slow), sum(slower)
    if min(num, num_canary) < rule.min_requests:
        return None
    stable_s = quantile(slow, FIRST_TOKEN_QUANTILE)
    canary_s = quantile(slower, FIRST_TOKEN_QUANTILE)
    assert stable_s is not None
    assert canary_s is not None
    if canary_s <= rule.max_latency_ratio * stable_s:
        return None
    shift = math.ceil(_BUCKETS_PER_DOUBLING * math.log2(rule.max_latency_ratio) - 1e-9)
    p95 = next(i for i in range(len(slow)) if sum(slow[: i + 1]) >= FIRST_TOKEN_QUANTILE * num)
    evidence = max(
        log_evidence(
            Proportion(sum(slow[edge + 1 :]), num),
            Proportion(sum(slower[edge + shift + 1 :]), num_canary),
            0.0,
        )
        for edge in (p95 - 1, p95)  # the quantile is between them
        if edge >= 0
    )
    if evidence < needed_log_evidence(rule) + math.log(len(ARM_SECONDS)):  # for any of the bounds
        return None
    return (
        f"p95 time to first token {1000 * canary_s:.0f} ms against {1000 * stable_s:.0f} ms: "
        f"more than {rule.max_latency_ratio:g} times"
    )

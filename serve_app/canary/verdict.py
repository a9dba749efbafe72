"""Whether a canary is worse than what it shall replace: the rule, on the counts of both arms.

A canary is rolled back when it is worse by more than the margin that the configuration allows, and
the counts make that certain: a canary that is not worse than allowed is rolled back in less than
1 % of hours (FALSE_ROLLBACKS_PER_HOUR), looked at as often as one likes; see `sequential`. The
hour's 1 % is shared out among the spans of time that are judged (`Trial`) and the four questions
that are asked of each: errors, empty outputs, clients that left, the first token. One more is asked
of the whole trial while the stable version has had too few requests: whether most requests fail.

The first token: were the canary at most r times as slow as the stable version, then for every time
t it would be later than r t at most as often as the stable version is later than t. That is tested
with t around the stable version's p95, at edges of ARM_SECONDS, so that r counts as up to 1.41
times more; and only where the canary's p95 is above r times that of the stable version.

Pure; ignorant of where the counts come from and of what follows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from serve_app.canary.sequential import Hits, log_evidence
from serve_app.config import CanaryArgs
from serve_app.tally import ARM_SECONDS, ArmCounts, ArmOutcome, quantile

FIRST_TOKEN_QUANTILE = 0.95
FALSE_ROLLBACKS_PER_HOUR = 0.01
SPANS_A_WINDOW = 4  # begun at most, to be judged apart from what was before
_NUM_QUESTIONS = 4
# Of the requests of a stable version that hardly had any. One client with all the traffic always
# meets the same arm, and where that is the canary nothing else can be said against it.
_MOST_ERRORS = 0.5
_BUCKETS_PER_DOUBLING = 2  # of ARM_SECONDS


@dataclass(frozen=True, slots=True)
class Verdict:
    reason: str | None  # to roll back
    has_enough: bool  # requests, for all of the rule


def judge(stable: ArmCounts, canary: ArmCounts, rule: CanaryArgs) -> Verdict:
    """Rates count once the canary has `min_requests`; the latency once both have. Where stable saw
    nothing its rates count as 0."""
    has_enough = min(canary.num_judged, stable.num_judged) >= rule.min_requests
    reason = (
        _more("errors", stable, canary, rule, rule.max_error_rate_increase, "error", "non_finite")
        or _more("empty outputs", stable, canary, rule, rule.max_empty_rate_increase, "empty")
        or _more_left(stable, canary, rule)
        or _slowness(stable, canary, rule)
    )
    return Verdict(reason, has_enough)


def non_finite(canary: ArmCounts, rule: CanaryArgs) -> str | None:
    """A reason to roll back from the first one on that is too many."""
    num = canary.count("non_finite")
    if num <= rule.max_non_finite:
        return None
    return f"{num} of {canary.num_judged} outputs not finite, {rule.max_non_finite} allowed"


def mostly_fails(stable: ArmCounts, canary: ArmCounts, rule: CanaryArgs) -> str | None:
    """A reason to roll back before the stable version has `min_requests`: the canary's error rate
    is certain to exceed one half by the margin. A stable version is taken to fail less often."""
    failed = Hits(stable.count("error", "non_finite"), stable.num_judged)
    if failed.of >= rule.min_requests or failed.rate > _MOST_ERRORS:
        return None
    limit = _MOST_ERRORS + rule.max_error_rate_increase
    return _more("errors", ArmCounts(), canary, rule, limit, "error", "non_finite")


def needed_log_evidence(rule: CanaryArgs) -> float:
    """For one question asked of one span. In an hour at most so many spans begin, the trial's own
    the first of them, and each question of each has its part of the error rate for all its life;
    `mostly_fails` is asked of the trial's own."""
    num_spans = 1 + 3600 * SPANS_A_WINDOW / rule.window_s
    return math.log((num_spans * _NUM_QUESTIONS + 1) / FALSE_ROLLBACKS_PER_HOUR)


def _more(
    what: str,
    stable: ArmCounts,
    canary: ArmCounts,
    rule: CanaryArgs,
    limit: float,
    *outcomes: ArmOutcome,
) -> str | None:
    return _increase(
        what,
        Hits(stable.count(*outcomes), stable.num_judged),
        Hits(canary.count(*outcomes), canary.num_judged),
        rule,
        limit,
    )


def _more_left(stable: ArmCounts, canary: ArmCounts, rule: CanaryArgs) -> str | None:
    """Clients leave a version that hangs or talks nonsense, but also one that is only being loaded:
    those who left then are not counted."""
    return _increase(
        "clients left",
        Hits(stable.num_warm_left, stable.num_judged + stable.num_warm_left),
        Hits(canary.num_warm_left, canary.num_judged + canary.num_warm_left),
        rule,
        rule.max_left_rate_increase,
    )


def _increase(what: str, stable: Hits, canary: Hits, rule: CanaryArgs, limit: float) -> str | None:
    if canary.of < rule.min_requests:
        return None
    if log_evidence(stable, canary, limit) < needed_log_evidence(rule):
        return None
    return (
        f"{canary.num} {what} in {canary.of} requests against {stable.num} in {stable.of}: "
        f"more than {100 * limit:g} points"
    )


def _slowness(stable: ArmCounts, canary: ArmCounts, rule: CanaryArgs) -> str | None:
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
            Hits(sum(slow[edge + 1 :]), num), Hits(sum(slower[edge + shift + 1 :]), num_canary), 0.0
        )
        for edge in (p95 - 1, p95)  # the quantile lies between them
        if edge >= 0
    )
    if evidence < needed_log_evidence(rule) + math.log(len(ARM_SECONDS)):  # any edge may be asked
        return None
    return (
        f"p95 time to first token {1000 * canary_s:.0f} ms against {1000 * stable_s:.0f} ms: "
        f"more than {rule.max_latency_ratio:g} times"
    )

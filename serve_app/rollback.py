"""Whether a canary is worse than what it shall replace: the rule, on the counts of both arms.

Pure; ignorant of where the counts come from and of what follows.
"""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.arms import Outcome, Tally, quantile
from serve_app.config import CanaryArgs

FIRST_TOKEN_QUANTILE = 0.95
_ROUNDING = 1e-9  # 0.07 - 0.05 > 0.02


@dataclass(frozen=True, slots=True)
class Verdict:
    reason: str | None  # to roll back
    has_enough: bool  # requests, for all of the rule


def judge(stable: Tally, canary: Tally, rule: CanaryArgs) -> Verdict:
    """Non-finite outputs count from the first on; rates once the canary has `min_requests`; the
    latency once both have. Where stable saw nothing its rates count as 0."""
    num = canary.num_judged
    has_enough = min(num, stable.num_judged) >= rule.min_requests
    num_non_finite = canary.count("non_finite")
    if num_non_finite > rule.max_non_finite:
        reason = f"{num_non_finite} of {num} outputs not finite, {rule.max_non_finite} allowed"
        return Verdict(reason, has_enough)
    if num < rule.min_requests:
        return Verdict(None, has_enough)
    errors = _increase("errors", stable, canary, ("error", "non_finite"))
    empty = _increase("empty outputs", stable, canary, ("empty",))
    for limit, (increase, words) in (
        (rule.max_error_rate_increase, errors),
        (rule.max_empty_rate_increase, empty),
    ):
        if increase > limit + _ROUNDING:
            return Verdict(f"{words}: more than {100 * limit:g} points", has_enough)
    return Verdict(_slowness(stable, canary, rule) if has_enough else None, has_enough)


def _increase(
    what: str, stable: Tally, canary: Tally, outcomes: tuple[Outcome, ...]
) -> tuple[float, str]:
    num, of = canary.count(*outcomes), canary.num_judged
    stable_num, stable_of = stable.count(*outcomes), stable.num_judged
    increase = num / of - (stable_num / stable_of if stable_of else 0.0)
    return increase, f"{num} {what} in {of} requests against {stable_num} in {stable_of}"


def _slowness(stable: Tally, canary: Tally, rule: CanaryArgs) -> str | None:
    stable_s = quantile(stable.first_token, FIRST_TOKEN_QUANTILE)
    canary_s = quantile(canary.first_token, FIRST_TOKEN_QUANTILE)
    if stable_s is None or canary_s is None or canary_s <= rule.max_latency_ratio * stable_s:
        return None
    return (
        f"p95 time to first token {1000 * canary_s:.0f} ms against {1000 * stable_s:.0f} ms: "
        f"more than {rule.max_latency_ratio:g} times"
    )

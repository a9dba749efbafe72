"""A canary as an operator sees it: versions, weights, the numbers of its arms and the verdict."""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.canary.split import Split, Wish
from serve_app.canary.trials import Trial
from serve_app.canary.verdict import FIRST_TOKEN_QUANTILE
from serve_app.config import CanaryArgs
from serve_app.tally import OUTCOMES, Arm, ArmCounts, quantile


@dataclass(frozen=True, slots=True)
class ArmStatus:
    arm: Arm
    version: int
    digest: str
    weight: float  # of the requests, as it is used
    outcomes: dict[str, int]  # of the trial
    output_tokens: int
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    latency_p50_ms: float | None
    problem: str | None = None  # why it is not used as the registry wishes


@dataclass(frozen=True, slots=True)
class CanaryStatus:
    name: str
    verdict: str = "no trial"
    arms: tuple[ArmStatus, ...] = ()
    problems: tuple[str, ...] = ()
    rolled_back: str | None = None  # the setting, JSON of version, reason and time
    duration_s: float | None = None  # of the trial that runs


def status_of(
    split: Split, trial: Trial | None, rolled_back: str | None, rule: CanaryArgs, now_s: float
) -> CanaryStatus:
    stable_share = 1 - split.canary.share
    stable = Wish(split.stable, stable_share)
    wishes: tuple[tuple[Arm, Wish], ...] = (
        ("stable", stable),
        ("canary", split.canary),
        ("shadow", split.shadow),
    )
    is_running = trial is not None and trial.is_running
    return CanaryStatus(
        split.name,
        _verdict(split, trial, rule, now_s),
        tuple(_arm(arm, wish, trial) for arm, wish in wishes if wish.version is not None),
        split.problems,
        rolled_back,
        round(now_s - trial.begun_s, 1) if trial is not None and is_running else None,
    )


def _verdict(split: Split, trial: Trial | None, rule: CanaryArgs, now_s: float) -> str:
    if trial is None or not trial.is_running:
        if split.is_active:
            return "begins"  # the manager has not looked at the registry again yet
        return "no trial" if trial is None else "ended"
    if trial.versions[1] is None:
        return "shadow only"
    verdict = trial.verdict(rule, now_s)
    if verdict.reason is not None:
        return f"bad: {verdict.reason}"
    if verdict.has_enough:
        return "good"
    judged = [trial.tally(arm).num_judged for arm in ("stable", "canary")]
    return f"too few requests yet: stable {judged[0]}, canary {judged[1]} of {rule.min_requests}"


def _arm(arm: Arm, wish: Wish, trial: Trial | None) -> ArmStatus:
    version = wish.version
    assert version is not None
    is_of_trial = trial is not None and version.digest in trial.versions
    tally = trial.tally(arm) if trial is not None and is_of_trial else ArmCounts()
    return ArmStatus(
        arm,
        version.version,
        version.digest,
        wish.share,
        dict(zip(OUTCOMES, tally.outcomes, strict=True)),
        tally.output_tokens,
        _ms(quantile(tally.first_token, 0.5)),
        _ms(quantile(tally.first_token, FIRST_TOKEN_QUANTILE)),
        _ms(quantile(tally.latency, 0.5)),
        wish.problem,
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 1)

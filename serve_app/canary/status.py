"""The status of a canary for operators: versions, weights, the numbers of its arms, the verdict."""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.canary.split import DesiredArm, Split
from serve_app.canary.trials import Trial
from serve_app.canary.verdict import FIRST_TOKEN_QUANTILE
from serve_app.config import CanaryArgs
from serve_app.tally import OUTCOMES, Arm, ArmCounts, quantile


@dataclass(frozen=True, slots=True)
class ArmStatus:
    arm: Arm
    version: int
    digest: str
    weight: float  # the share of requests that it gets now
    outcomes: dict[str, int]  # during the trial
    output_tokens: int
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    latency_p50_ms: float | None
    problem: str | None = None  # why it is not used as the registry asks


@dataclass(frozen=True, slots=True)
class CanaryStatus:
    name: str
    verdict: str = "no trial"
    arms: tuple[ArmStatus, ...] = ()
    problems: tuple[str, ...] = ()
    rolled_back: str | None = None  # the registry's setting: JSON of version, reason and time
    duration_s: float | None = None  # of the running trial
    # The version that the bare name means, and the alias by which it does; None if it means none.
    stable_version: int | None = None
    stable_alias: str | None = None


@dataclass(frozen=True, slots=True)
class CanaryLines:
    """The answer of GET /admin/canaries."""

    canaries: tuple[CanaryStatus, ...]


@dataclass(frozen=True, slots=True)
class CanaryAnswer:
    """The answer to a change of a canary."""

    canary: CanaryStatus


def start_command(name: str) -> str:
    """Returns the command line that begins a trial."""
    return f"loraplex canary start {name} --version N --weight 0.1"


def status_of(
    split: Split, trial: Trial | None, rolled_back: str | None, rule: CanaryArgs, now_s: float
) -> CanaryStatus:
    arms: tuple[tuple[Arm, DesiredArm], ...] = (
        ("stable", DesiredArm(split.stable, 1 - split.canary.share)),
        ("canary", split.canary),
        ("shadow", split.shadow),
    )
    is_running = trial is not None and trial.is_running
    return CanaryStatus(
        split.name,
        _verdict(split, trial, rule, now_s),
        tuple(_arm(arm, desired, trial) for arm, desired in arms if desired.version is not None),
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
    judged = [trial.counts(arm).num_judged for arm in ("stable", "canary")]
    return f"too few requests yet: stable {judged[0]}, canary {judged[1]} of {rule.min_requests}"


def _arm(arm: Arm, desired: DesiredArm, trial: Trial | None) -> ArmStatus:
    version = desired.version
    assert version is not None
    is_of_trial = trial is not None and version.digest in trial.versions
    counts = trial.counts(arm) if trial is not None and is_of_trial else ArmCounts()
    return ArmStatus(
        arm,
        version.version,
        version.digest,
        desired.share,
        dict(zip(OUTCOMES, counts.outcomes, strict=True)),
        counts.output_tokens,
        _ms(quantile(counts.first_token, 0.5)),
        _ms(quantile(counts.first_token, FIRST_TOKEN_QUANTILE)),
        _ms(quantile(counts.latency, 0.5)),
        desired.problem,
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 1)

"""The share of good canaries that are rolled back, and the time until a bad one is.

Simulated hours: requests of both arms second by second, judged each second by the product's own
`Trial`, and beside it by the rule before (`before`): fixed thresholds on the measured rates of the
last ten minutes, first tokens of cold requests included. Each hour begins a trial, with one cold
load of the canary's adapter. `equal`: both arms draw from the same error rate and the same times to
first token; `weather`: a minute in twenty both arms are ten times as slow and a fifth fails.
`bad`: the canary is worse, without a cold load; its requests and the seconds until it is rolled
back.

    python -m tests.benchmarks.canary_judge [--hours 3] [--seed 0] [--out FILE]
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from serve_app.canary.trials import Trial
from serve_app.config import CanaryArgs
from serve_app.tally import ARM_SECONDS, ArmCounts, quantile
from tests.benchmarks.report import Report

HOUR_S = 3600
BAD_TRIALS = 15  # of each bad canary
RULE = CanaryArgs()
Counts = npt.NDArray[np.int64]  # [seconds, kinds], since the trial's begin
_EDGES = np.array([*ARM_SECONDS, np.inf])
_SAMPLES = 200_000


@dataclass(frozen=True)
class Arm:
    error_rate: float = 0.0
    left_rate: float = 0.0
    latency: str = "lognormal"  # one of LATENCIES
    slowness: float = 1.0  # a factor


@dataclass(frozen=True)
class World:
    rate: float  # requests a second, of both arms
    weight: float
    stable: Arm
    canary: Arm
    load_s: float = 1.5  # of the canary's adapter, once; 0: it is in memory
    has_weather: bool = False


@dataclass(frozen=True)
class Hour:
    """Both arms' running counts: ok, errors, left; first tokens by ARM_SECONDS."""

    stable: tuple[Counts, Counts]
    canary: tuple[Counts, Counts]
    cold: Counts  # first tokens of the canary that waited for the load, all in the first second


def _samples(name: str, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """Seconds, of 75 ms in the median."""
    match name:
        case "lognormal":
            return 0.075 * rng.lognormal(0.0, 0.35, _SAMPLES)
        case "wide":
            return 0.075 * rng.lognormal(0.0, 1.2, _SAMPLES)
        case "pareto":  # infinite variance
            return 0.047 * (1 + rng.pareto(1.5, _SAMPLES))
        case "cliff":  # p95 lies at the foot of it
            slow = np.where(rng.random(_SAMPLES) < 0.05, 20.0, 1.0)
            return slow * 0.075 * rng.lognormal(0.0, 0.2, _SAMPLES)
    raise AssertionError(name)


LATENCIES = ("lognormal", "wide", "pareto", "cliff")


def simulate(world: World, rng: np.random.Generator, num_s: int = HOUR_S) -> Hour:
    is_bad = np.repeat(rng.random(num_s // 60 + 1) < 0.05, 60)[:num_s] & world.has_weather
    num = rng.poisson(world.rate, num_s)
    num_canary = rng.binomial(num, world.weight)
    num_cold = rng.poisson(world.rate * world.weight * world.load_s)  # beside the first
    waits = np.append(rng.uniform(0, world.load_s, num_cold), world.load_s)
    cold = np.bincount(np.searchsorted(_EDGES, waits + 0.075), minlength=len(_EDGES))
    return Hour(
        _arm(world.stable, num - num_canary, is_bad, rng),
        _arm(world.canary, num_canary, is_bad, rng),
        cold * (world.load_s > 0),
    )


def _arm(
    arm: Arm, num: Counts, is_bad: npt.NDArray[np.bool_], rng: np.random.Generator
) -> tuple[Counts, Counts]:
    errors = rng.binomial(num, np.where(is_bad, max(0.2, arm.error_rate), arm.error_rate))
    left = rng.binomial(num - errors, arm.left_rate)
    seconds = arm.slowness * _samples(arm.latency, rng)
    usual, slow = (_shares(seconds * factor) for factor in (1.0, 10.0))
    firsts = rng.multinomial(num - errors, np.where(is_bad[:, None], slow, usual))
    outcomes = np.stack([num - errors - left, errors, left], axis=1)
    return outcomes.cumsum(axis=0), firsts.cumsum(axis=0)


def _shares(seconds: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    counts = np.bincount(np.searchsorted(_EDGES, seconds), minlength=len(_EDGES))
    shares: npt.NDArray[np.float64] = counts / counts.sum()
    return shares


def judged_after(hour: Hour) -> int | None:
    """The second in which the canary is rolled back."""
    trial = Trial("x", ("s", "c", None), 0.0)
    for second in range(len(hour.stable[0])):
        trial.counts_by_arm = {
            "stable": _tally(hour.stable, second),
            "canary": _tally(hour.canary, second),
        }
        if trial.verdict(RULE, float(second + 1)).reason is not None:
            return second
    return None


def _tally(arm: tuple[Counts, Counts], second: int) -> ArmCounts:
    ok, errors, left = arm[0][second].tolist()
    return ArmCounts(
        (ok, 0, errors, 0, 0, left),
        warm_first_token=tuple(arm[1][second].tolist()),
        num_warm_left=left,
    )


def judged_before(hour: Hour) -> int | None:
    """The same by the rule before: a point estimate beyond the margin is enough."""
    window_s = int(RULE.window_s)
    judged = hour.canary[0][:, :2].sum(axis=1)
    for second in range(len(judged)):
        start = second - window_s
        few = judged[second] - RULE.min_requests
        start = min(start, int(np.searchsorted(judged, few, side="right")) - 1) if few >= 0 else -1
        arms = [_since(arm, start, second) for arm in (hour.stable, hour.canary)]
        if start < 0:
            arms[1][1][:] += hour.cold
        (outcomes, firsts), (canary_outcomes, canary_firsts) = arms
        num, num_canary = int(outcomes[:2].sum()), int(canary_outcomes[:2].sum())
        if num_canary < RULE.min_requests:
            continue
        increase = canary_outcomes[1] / num_canary - (outcomes[1] / num if num else 0.0)
        if increase > RULE.max_error_rate_increase + 1e-9:
            return second
        p95, p95_canary = (quantile(counts.tolist(), 0.95) for counts in (firsts, canary_firsts))
        if num < RULE.min_requests or p95 is None or p95_canary is None:
            continue
        if p95_canary > RULE.max_latency_ratio * p95:
            return second
    return None


def _since(arm: tuple[Counts, Counts], start: int, second: int) -> list[Counts]:
    return [
        counts[second] - counts[start] if start >= 0 else counts[second].copy() for counts in arm
    ]


def equal_worlds() -> Iterator[World]:
    grid = itertools.product((1, 10, 50, 200), (0.01, 0.1, 0.5), (0.0, 0.01, 0.05))
    for (rate, weight, errors), latency in zip(grid, itertools.cycle(LATENCIES), strict=False):
        arm = Arm(errors, 0.1, latency)
        yield World(rate, weight, arm, arm)
    for rate, weight, latency in itertools.product((10, 100), (0.1, 0.5), ("lognormal", "pareto")):
        arm = Arm(0.01, 0.1, latency)
        yield World(rate, weight, arm, arm, has_weather=True)


def bad_worlds() -> Iterator[tuple[str, World]]:
    usual = Arm(0.005, 0.05)
    bad = {
        **{f"{errors:.0%} errors": Arm(errors, 0.05) for errors in (1.0, 0.5, 0.2, 0.1, 0.05)},
        **{f"{left:.0%} left": Arm(0.005, left) for left in (0.9, 0.5)},
        **{f"{times} times as slow": Arm(0.005, 0.05, slowness=times) for times in (10, 5, 3)},
    }
    for (name, arm), weight in itertools.product(bad.items(), (0.1, 0.5)):
        yield name, World(20, weight, usual, arm, load_s=0)


def run_equal(world: World, hours: int, rng: np.random.Generator) -> dict[str, object]:
    found = [simulate(world, rng) for _ in range(hours)]
    return {
        "kind": "weather" if world.has_weather else "equal",
        "rate": world.rate,
        "weight": world.weight,
        "error_rate": world.stable.error_rate,
        "latency": world.stable.latency,
        "hours": hours,
        "false_before": sum(judged_before(hour) is not None for hour in found),
        "false_after": sum(judged_after(hour) is not None for hour in found),
    }


def run_bad(name: str, world: World, trials: int, rng: np.random.Generator) -> dict[str, object]:
    line: dict[str, object] = {"kind": "bad", "canary": name, "weight": world.weight}
    hours = [simulate(world, rng) for _ in range(trials)]
    for rule, judged in (("before", judged_before), ("after", judged_after)):
        ends = [(hour, end) for hour in hours if (end := judged(hour)) is not None]
        line[f"found_{rule}"] = f"{len(ends)} of {trials}"
        if ends:
            seen = [int(hour.canary[0][end].sum()) for hour, end in ends]
            line[f"requests_{rule}"] = statistics.median(seen)
            line[f"seconds_{rule}"] = statistics.median(end + 1 for _, end in ends)
    return line


def run(hours: int, seed: int, report: Report) -> float:
    """The share of hours in which an equal canary was rolled back."""
    rng = np.random.default_rng(seed)
    report.emit_machine("canary_judge", hours=hours, seed=seed)
    for name, bad in bad_worlds():
        report.emit(**run_bad(name, bad, BAD_TRIALS, rng))
    lines = []
    for world in equal_worlds():
        lines.append(run_equal(world, hours, rng))
        report.emit(**lines[-1])
    total = hours * len(lines)
    before, after = (
        sum(int(str(line[f"false_{rule}"])) for line in lines) for rule in ("before", "after")
    )
    report.emit(benchmark="canary_judge", hours=total, false_before=before, false_after=after)
    return after / total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", type=int, default=3, help="of each case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    return int(run(arguments.hours, arguments.seed, Report(arguments.out)) >= 0.01)


if __name__ == "__main__":
    raise SystemExit(main())

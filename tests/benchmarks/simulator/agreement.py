"""A simulation of a run that was, or will be, measured: the same traffic, the same policy, the same
three engines.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.benchmarks.report import Report, print_table
from tests.benchmarks.simulator.calibration import Calibration, from_content
from tests.benchmarks.simulator.calls import Call
from tests.benchmarks.simulator.cluster import Cluster, ClusterArgs
from tests.benchmarks.simulator.records import quantiles_ms
from tests.benchmarks.simulator.setting import FAIR, maker
from tests.benchmarks.simulator.traffic import LogNormal, Traffic, TrafficArgs, name_of

TOLERANCE = 0.2


@dataclass(frozen=True, slots=True)
class Plan:
    """A real run, small enough for clients and server on two cores."""

    rate: float
    num_requests: int
    seed: int = 1
    num_adapters: int = 24

    def traffic(self) -> TrafficArgs:
        return TrafficArgs(
            self.num_requests,
            self.rate,
            seed=self.seed,
            burstiness=1.5,
            num_adapters=self.num_adapters,
            popularity=1.0,
            system=LogNormal(128, 0.5, 32, 512),
            message=LogNormal(60, 0.8, 8, 400),
            output=LogNormal(24, 0.7, 2, 96),
            turns=3.0,
            think=LogNormal(4, 0.8, 1),
            max_context=1200,
        )

    def calls(self) -> Iterator[Call]:
        """The next turn quotes other words than the answer's: only prompts are found again."""
        for call in Traffic(self.traffic()).calls():
            call.prefixes_after = call.prefixes
            yield call


def predict(
    calibration: Calibration, plan: Plan, policy: str, num_replicas: int
) -> dict[str, float]:
    args = ClusterArgs(calibration, num_replicas, maker(policy), gate=FAIR, max_ongoing=256)
    service = Cluster(args)
    service.fill_disks(name_of(number) for number in range(plan.num_adapters))
    service.run(plan.calls())
    return quantiles_ms(service.records.column("ttft_s"))


def compare(
    policy: str,
    load: float,
    plan: Plan,
    measured: dict[str, float],
    predicted: dict[str, float],
) -> dict[str, object]:
    ratios = {name: round(predicted[name] / measured[name], 3) for name in ("p50", "p95")}
    return {
        "part": "run",
        "policy": policy,
        "load": load,
        "plan": asdict(plan),
        "measured_ms": measured,
        "predicted_ms": predicted,
        "predicted_to_measured": ratios,
        "passed": all(abs(ratio - 1) <= TOLERANCE for ratio in ratios.values()),
    }


def agree(measured: Path, report: Report) -> None:
    """Predicts again what `tests.benchmarks.routing` wrote."""
    lines = Report(measured).lines()
    calibration: Calibration | None = None
    num_replicas = 3
    rows = []
    for line in lines:
        if line.get("part") == "calibration":
            calibration = from_content(line["calibration"])
            num_replicas = int(str(line["replicas"]))
        if line.get("part") != "run" or calibration is None:
            continue
        plan = Plan(**line["plan"])  # type: ignore[arg-type]
        policy, load = str(line["policy"]), float(str(line["load"]))
        seen: dict[str, float] = line["measured_ms"]  # type: ignore[assignment]
        found = predict(calibration, plan, policy, num_replicas)
        report.emit(**compare(policy, load, plan, seen, found))
        rows.append((policy, load, seen["p50"], found["p50"], seen["p95"], found["p95"]))
    print_table(("policy", "load", "p50 ms", "simulated", "p95 ms", "simulated"), rows)

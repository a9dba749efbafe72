"""The real router, fair queue and scaling rule over simulated engines: what they do at any size.

Engines are numbers here, measured on an H200 or given in a file; policies, views, score, placement,
queue and scaling decisions are the code that serves.

    python -m tests.benchmarks.simulate SCENARIO [--out FILE] [--picture FILE.png]

    policies  five policies at four loads, 16 replicas, skewed adapters, shared prefixes
    spread    one of 50 adapters becomes five times as hot
    fairness  tenants of unequal appetite at overload, with and without the fair queue
    scale     replicas come and go with a load step and with a day
    fleet     1,000 replicas, 10,000 adapters, 1,000,000 requests
    expect    expected times to first tokens against the times that came
    gaps      gaps between tokens while prompts arrive, with and without max_decode_slowdown
    herd      bursts over 1, 4 and 16 ingresses whose views are late
    agree     what `tests.benchmarks.routing` measured, predicted from its own calibration
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.benchmarks.report import Report
from tests.benchmarks.simulator import comparisons, fleets
from tests.benchmarks.simulator.agreement import agree
from tests.benchmarks.simulator.calibration import from_file, h200
from tests.benchmarks.simulator.expectation import expectation
from tests.benchmarks.simulator.gaps import gaps
from tests.benchmarks.simulator.setting import Setting

Scenario = Callable[[Setting, Report, Path | None], None]

SCENARIOS: Mapping[str, Scenario] = {
    "policies": comparisons.policies,
    "spread": comparisons.spread,
    "fairness": comparisons.fairness,
    "scale": fleets.scale,
    "fleet": fleets.fleet,
    "herd": comparisons.herd,
    "expect": expectation,
    "gaps": gaps,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("scenario", choices=[*SCENARIOS, "agree"])
    parser.add_argument("--out", type=Path, help="file that gets every line, too")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of requests")
    parser.add_argument("--calibration", type=Path, help="a file of `Calibration.write`")
    parser.add_argument("--measured", type=Path, help="for agree: what `routing` wrote")
    args = parser.parse_args()
    if args.scenario == "agree" and args.measured is None:
        parser.error("agree needs --measured")
    if args.scenario == "agree":
        agree(args.measured, Report(args.out))
        return
    calibration = h200() if args.calibration is None else from_file(args.calibration)
    report = Report(args.out)
    report.emit_machine(f"simulate {args.scenario}", arguments=sys.argv[1:])
    pace = calibration.pace
    report.emit(
        part="calibration",
        name=calibration.name,
        step_fixed_ms=round(1000 * pace.fixed_s, 4),
        prompt_token_us=round(1e6 * pace.token_s, 3),
        sequence_us=round(1e6 * pace.sequence_s, 3),
        context_token_ns=round(1e9 * pace.kv_token_s, 2),
        sources=calibration.sources,
    )
    SCENARIOS[args.scenario](Setting(calibration, args.seed, args.scale), report, args.picture)


if __name__ == "__main__":
    main()

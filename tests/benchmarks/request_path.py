"""Random fleets of ingresses and engines on a virtual clock, and what holds of every one of them:
no token is lost, doubled or wrong, every request ends once and leaves nothing, and counts agree.

    python -m tests.benchmarks.request_path [--fleets 500] [--seed 0] [--workers 2] [--out FILE]

`--seed`: of the first fleet, the others follow. A fleet in which something does not hold is printed
with its seed and all that happened in it; `--fleets 1 --seed N` runs that one again, and prints it
in any case. The exit code is 1 where something did not hold.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tests.benchmarks.report import Report
from tests.request_path_machine import Result, run_fleet

_MOST_SHOWN = 5  # failing fleets with all that happened


def run(count: int, seed: int, workers: int, report: Report) -> bool:
    """True: all that is promised held."""
    report.emit_machine("request_path", fleets=count, seed=seed)
    tally: Counter[str] = Counter()
    failed: list[int] = []
    iterations, virtual_s, started_s = 0, 0.0, time.perf_counter()
    # Each with a fresh interpreter: Ray's threads do not survive a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        for result in pool.map(run_fleet, range(seed, seed + count)):
            tally += result.tally
            iterations += result.iterations
            virtual_s += result.virtual_s
            if result.violations:
                failed.append(result.seed)
                report.emit(seed=result.seed, violations=result.violations)
            if count == 1 or (result.violations and len(failed) <= _MOST_SHOWN):
                _show(result)
    report.emit(
        benchmark="request_path",
        fleets=count,
        failed=failed,
        iterations=iterations,
        virtual_s=round(virtual_s),
        seconds=round(time.perf_counter() - started_s, 1),
        tally=dict(sorted(tally.items())),
        **{"pass": not failed},
    )
    return not failed


def _show(result: Result) -> None:
    lines = (f"{seconds:9.3f} s  {words}\n" for seconds, words in result.events)
    sys.stderr.write(f"fleet {result.seed}\n{''.join(lines)}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fleets", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    os.environ.setdefault("PYTHONHASHSEED", "0")  # of the workers: sets of strings have an order
    report = Report(arguments.out)
    return int(not run(arguments.fleets, arguments.seed, arguments.workers, report))


if __name__ == "__main__":
    raise SystemExit(main())

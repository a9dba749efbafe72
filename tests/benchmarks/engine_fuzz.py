"""Random engines with real copy times: each keeps every promise, or the run says which seed did
not.

    python -m tests.benchmarks.engine_fuzz [--engines 1000] [--seed 0] [--device cuda] [--out FILE]

On a CPU, copies of adapters take between 0 and 2 ms by the clock; on a CUDA device they are the
real ones. See tests/engine_fuzz.py for what is random and what is
checked. A broken promise is printed with its seed (`--engines 1 --seed N` runs it again), the run
goes on, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import logging
import time
import traceback
from collections import Counter
from pathlib import Path

import torch

from tests.benchmarks.report import Report
from tests.engine_fuzz import fuzz_one
from tests.fakes import KVViolation

_EVERY_S = 30.0  # a line of progress
_MAX_SEEDS_SHOWN = 20


def run(engines: int, seed: int, device: str, report: Report) -> bool:
    """True: no engine broke a promise."""
    report.emit_machine("engine_fuzz", engines=engines, seed=seed, device=device)
    counts: Counter[str] = Counter()
    broken: dict[int, str] = {}
    started_s = told_s = time.perf_counter()
    for number in range(seed, seed + engines):
        try:
            counts.update(fuzz_one(number, device))
        except (Exception, KVViolation) as error:
            traceback.print_exc()
            broken[number] = f"{type(error).__name__}: {error}"[:200]
            report.emit(seed=number, broken=broken[number])
        counts["engines"] += 1
        if time.perf_counter() - told_s > _EVERY_S:
            told_s = time.perf_counter()
            report.emit(**counts, num_broken=len(broken), seconds=round(told_s - started_s, 1))
    seconds = round(time.perf_counter() - started_s, 1)
    shown = list(broken)[:_MAX_SEEDS_SHOWN]
    result = {"violations": len(broken), "seeds": shown, "pass": not broken}
    report.emit(benchmark="engine_fuzz", **counts, seconds=seconds, **result)
    return not broken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    logging.disable()  # of steps that fail on purpose
    torch.set_num_threads(1)
    report = Report(arguments.out)
    return int(not run(arguments.engines, arguments.seed, arguments.device, report))


if __name__ == "__main__":
    raise SystemExit(main())

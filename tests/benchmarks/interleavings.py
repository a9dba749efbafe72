"""Random interleavings of load, unload, flip, request, cancel and step on the real engine (a tiny
random base, torch on the CPU), against a model that knows what must come of them.

`one thread`: hypothesis drives the engine itself, step by step, and the model is exact after every
command. `callers`: ten concurrent callers of the engine behind its thread, each with a seed. All
end with everything drained: each request ended once with the tokens of its own version, references,
KV blocks, pages and host memory back to zero.

    python -m tests.benchmarks.interleavings [--count 1000] [--seed 0] [--out FILE]

The first violation ends the run: it is printed with the shortest way to it, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from tests.benchmarks.report import Report
from tests.interleaving_clients import run_round
from tests.interleaving_machine import machine_of, run_interleavings
from tests.interleaving_world import Tally, World, make_world


def run_one_thread(world: World, tally: Tally, count: int, seed: int) -> None:
    run_interleavings(machine_of(world, tally), count, seed)


def run_callers(world: World, tally: Tally, count: int, seed: int) -> None:
    for number in range(count):
        asyncio.run(run_round(world, tally, seed * count + number))


LEVELS: dict[str, Callable[[World, Tally, int, int], None]] = {
    "one thread": run_one_thread,
    "callers": run_callers,
}


def run(count: int, seed: int, report: Report) -> bool:
    """Runs `count` orders of each level. Returns True without a violation."""
    report.emit_machine("interleavings", count=count, seed=seed)
    violations = 0
    with tempfile.TemporaryDirectory() as folder:
        world = make_world(Path(folder))
        for level, run_level in LEVELS.items():
            tally = Tally()
            started_s = time.perf_counter()
            try:
                run_level(world, tally, count, seed)
            except Exception:
                violations += 1
                traceback.print_exc()
            counts = dict(sorted(tally.counts.items()))
            seconds = round(time.perf_counter() - started_s, 1)
            report.emit(level=level, **counts, seconds=seconds)
    report.emit(benchmark="interleavings", violations=violations, **{"pass": not violations})
    return not violations


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    logging.disable()  # a thousand engines that start
    return int(not run(arguments.count, arguments.seed, Report(arguments.out)))


if __name__ == "__main__":
    raise SystemExit(main())

"""Random orders of everything that operators, colleagues with rights at MLflow, the registry and
the world can do to the control plane: the real MLflow on SQLite, manager and ingresses in one
process and in virtual time, Serve's controller replaced. After each step, and once every cause of
trouble is gone, the promises of `tests/control_plane/promises.py` and `settled.py` are checked.

    python -m tests.benchmarks.control_plane [--orders 2000] [--seed 0] [--processes N] [--out FILE]

An order that breaks a promise is made shorter and printed as its steps; `--orders 1 --seed N` runs
it again. The exit code is 1 where there was one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from tests.benchmarks.report import Report
from tests.control_plane.draws import draw
from tests.control_plane.orders import Outcome, kind_of, run, shorten, shown
from tests.control_plane.store import Database, quick_sqlite

_PART = 10  # orders that a process is given at a time


def run_part(seeds: range) -> list[Outcome]:
    """Runs the seeds in a process of its own, with a store of its own."""
    return [run(_database(), seed, draw(seed)) for seed in seeds]


def shorten_one(failed: Outcome) -> Outcome:
    return shorten(_database(), failed)


_kept = ExitStack()  # of this process's whole life
_databases: list[Database] = []  # one a process, made with its first order


def _database() -> Database:
    if not _databases:
        _kept.enter_context(quick_sqlite())
        _databases.append(Database(Path(tempfile.mkdtemp(dir=os.environ[_FOLDER]))))
    return _databases[0]


_FOLDER = "LORAPLEX_TEST_CONTROL_PLANE"  # of all processes' stores


def _parts(first: int, orders: int) -> Iterator[range]:
    for begin in range(first, first + orders, _PART):
        yield range(begin, min(begin + _PART, first + orders))


def measure(orders: int, seed: int, processes: int, report: Report) -> bool:
    """True: no order broke a promise."""
    report.emit_machine("control_plane", orders=orders, seed=seed, processes=processes)
    began_s = time.perf_counter()
    counts: Counter[str] = Counter()
    broken: dict[str, list[Outcome]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="loraplex-orders-") as folder,
        multiprocessing.get_context("spawn").Pool(processes, _enter, (folder,)) as pool,
    ):
        for part in pool.imap_unordered(run_part, _parts(seed, orders)):
            for outcome in part:
                counts += outcome.counts
                if outcome.broken is not None:
                    print(f"seed {outcome.seed}: {outcome.broken}"[:300], flush=True)
                    broken.setdefault(str(kind_of(outcome.broken)), []).append(outcome)
        seconds = time.perf_counter() - began_s
        # The shortest order of each kind is the quickest to make shorter still.
        first = [min(found, key=lambda one: len(one.steps)) for found in broken.values()]
        for found, outcome in zip(broken.values(), pool.imap(shorten_one, first), strict=True):
            print(shown(outcome), flush=True)
            seeds = sorted(one.seed for one in found)
            report.emit(broken=outcome.broken, steps=outcome.steps, seeds=seeds[:20])
    num_broken = sum(map(len, broken.values()))
    report.emit(
        benchmark="control_plane",
        orders=orders,
        broken=num_broken,
        kinds=len(broken),
        seconds=round(seconds, 1),
        orders_per_minute=round(60 * orders / seconds),
        came_across=dict(sorted(counts.items())),
        **{"pass": not num_broken},
    )
    return not num_broken


def _enter(folder: str) -> None:
    os.environ[_FOLDER] = folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--orders", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="of the first order")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    processes = min(arguments.processes, -(-arguments.orders // _PART))
    report = Report(arguments.out)
    return int(not measure(arguments.orders, arguments.seed, processes, report))


if __name__ == "__main__":
    raise SystemExit(main())

"""Runs the tests that need CUDA devices, on all devices of this machine at the same time.

Each device has a pytest of its own, with its share of the cores and a process on each of them, for
kernels are compiled on cores. Tests that need all devices follow, alone. The tests that passed are
noted in a file: a later call with the same file runs the others, so that the time of a machine can
be divided. A note belongs to one state of the code: remove the file when that changes.

    python -m tests.gpu [--limit-s 500] [--passed FILE] [--logs FOLDER]

Exits with 1 if a test failed, or was not run for lack of time.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
_TOGETHER = ("test_parallel_on_cuda",)  # files whose tests need all devices
# Files whose tests share an engine, which each device would have to open.
_WHOLE = ("test_engine_", "test_kv_", "test_warm_up_")
_OUTCOMES = ("PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL")
# As pytest-xdist prints it: [gw3] [ 42%] PASSED tests/test_x.py::test_y[z]
_LINE = re.compile(rf"^\[gw\d+\] \[ *\d+%\] ({'|'.join(_OUTCOMES)}) (tests/\S.*?)\s*$")


@dataclass(frozen=True, slots=True)
class Run:
    """A pytest on some devices."""

    process: subprocess.Popen[bytes]
    log: Path


def collect(marker: str, paths: Sequence[Path]) -> list[str]:
    """Returns the node ids of the tests with this marker. Raises RuntimeError if pytest fails."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", marker]
    found = subprocess.run(
        [*command, *map(str, paths)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    ids = [line for line in found.stdout.splitlines() if "::" in line and line[:6] == "tests/"]
    if found.returncode or not ids:
        raise RuntimeError(f"pytest collects no test marked {marker!r}:\n{found.stdout[-2000:]}")
    return ids


def divide(ids: Sequence[str], num_devices: int) -> list[list[str]]:
    """Returns the tests of each device: those of a file that shares an engine on one device, all
    others in turns."""
    shares: list[list[str]] = [[] for _ in range(num_devices)]
    whole: dict[str, list[str]] = {}
    others = []
    for one in ids:
        file = Path(one.partition("::")[0]).stem
        if file.startswith(_WHOLE):
            whole.setdefault(file, []).append(one)
        else:
            others.append(one)
    for tests in sorted(whole.values(), key=len, reverse=True):
        min(shares, key=len).extend(tests)
    for one in others:
        min(shares, key=len).append(one)
    return shares


def start(ids: Sequence[str], devices: Sequence[int], cores: Sequence[int], log: Path) -> Run:
    """Starts a pytest for these tests, which sees these devices only, with a process on each of
    the cores."""
    listed = log.with_suffix(".tests")
    listed.write_text("\n".join(ids))
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, devices)),
        "OMP_NUM_THREADS": "1",
    }
    # A process whose tests are done takes some of another's: few files have most of the tests.
    options = ["-v", "-n", str(len(cores)), "--dist", "worksteal", "-p", "no:cacheprovider"]
    # pytest-benchmark, where a machine has it, warns of several processes: an error in pytest here.
    options += ["-p", "no:benchmark"]
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)  # the process inherits them
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "pytest", *options, f"@{listed}"],
                cwd=ROOT,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
    finally:
        os.sched_setaffinity(0, own)
    return Run(process, log)


def wait(runs: Sequence[Run], until_s: float) -> None:
    """Waits for the ends of these, and kills those that still run at `until_s`, or when this
    process is interrupted: the terminal's Ctrl-C does not reach their sessions."""
    try:
        for run in runs:
            with suppress(subprocess.TimeoutExpired):
                run.process.wait(max(0.0, until_s - time.monotonic()))
    finally:
        for run in runs:
            if run.process.poll() is None:
                os.killpg(run.process.pid, signal.SIGKILL)
                run.process.wait()


def outcomes(log: Path) -> dict[str, str]:
    """Returns the outcome of each test in a log; of two outcomes of a test the second one, which is
    the error of its end."""
    matches = map(_LINE.match, log.read_text(errors="replace").splitlines())
    return {match[2]: match[1] for match in matches if match is not None}


def run_all(ids: Sequence[str], devices: int, logs: Path, until_s: float) -> dict[str, str]:
    """Runs the tests and returns their outcomes. Tests for which there was no time have none."""
    cores = sorted(os.sched_getaffinity(0))
    together = [one for one in ids if Path(one.partition("::")[0]).stem in _TOGETHER]
    shares = divide([one for one in ids if one not in set(together)], devices)
    size = max(1, len(cores) // devices)
    runs = [
        start(share, [number], cores[number * size :][:size] or cores, logs / f"gpu{number}.log")
        for number, share in enumerate(shares)
        if share
    ]
    wait(runs, until_s)
    if together and time.monotonic() < until_s:
        # One process: two groups of ranks at the same time would wait for each other's devices.
        runs.append(start(together, range(devices), cores[:1], logs / "together.log"))
        wait(runs[-1:], until_s)
    return {name: outcome for run in runs for name, outcome in outcomes(run.log).items()}


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--limit-s", type=float, default=3600.0, help="after which tests are ended")
    parser.add_argument("--passed", type=Path, help="file of the tests that passed, read and added")
    parser.add_argument("--logs", type=Path, help="folder of pytest's logs; a new one if missing")
    arguments = parser.parse_args()
    until_s = time.monotonic() + arguments.limit_s
    devices = torch.cuda.device_count()
    if not devices:
        parser.error("this machine has no CUDA device")
    logs = arguments.logs or Path(tempfile.mkdtemp(prefix="gpu-tests-"))
    logs.mkdir(parents=True, exist_ok=True)
    # A whole collection imports Ray and MLflow in each process.
    paths = [path for path in TESTS.glob("test_*.py") if "mark.gpu" in path.read_text()]
    passed: set[str] = set()
    if arguments.passed is not None and arguments.passed.exists():
        passed.update(arguments.passed.read_text().splitlines())
    ids = [one for one in collect("gpu", paths) if one not in passed]
    found = run_all(ids, devices, logs, until_s)
    if arguments.passed is not None:
        passed.update(name for name, outcome in found.items() if outcome == "PASSED")
        arguments.passed.write_text("\n".join(sorted(passed)) + "\n")
    for log in sorted(logs.glob("*.log")):
        if not outcomes(log):
            print(f"pytest began no test, says {log}:\n{log.read_text(errors='replace')[-2000:]}")
    for name, outcome in sorted(found.items()):
        if outcome in ("FAILED", "ERROR"):
            print(outcome, name)
    counts = Counter(found.values())
    counts["not run"] = sum(one not in found for one in ids)
    print(", ".join(f"{count} {words.lower()}" for words, count in counts.items()), "in", logs)
    sys.exit(counts["FAILED"] + counts["ERROR"] + counts["not run"] > 0)


if __name__ == "__main__":
    main()

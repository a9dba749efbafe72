"""A part of a benchmark in a process of its own, its lines among ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.benchmarks.report import Report

# Of every process of vLLM's.
VLLM_ENVIRONMENT = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it would be compiled at the first request
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # Its way of sums that needs multicast in NVLink's switches; it has others.
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
}


def module(name: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", f"tests.benchmarks.{name}", *arguments]


def relay_vllm(
    command: Sequence[str], report: Report, site_packages: str, work: Path, timeout_s: float
) -> list[dict[str, object]]:
    """`relay` of a program that imports vLLM. `work`: where its folder is made."""
    return relay(
        command,
        report,
        timeout_s=timeout_s,
        environment=VLLM_ENVIRONMENT | os.environ | {"PYTHONPATH": site_packages},
        folder=_folder_of_tests(work / "beside-vllm"),
    )


def _folder_of_tests(folder: Path) -> Path:
    """Makes a folder from which `tests` can be imported and none of our packages: a library that
    theirs uses looks for a package called `kernels` and would find ours."""
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "tests"
    if not link.is_symlink():
        link.symlink_to(Path(__file__).parents[1])
    return folder


def relay(
    command: Sequence[str],
    report: Report,
    *,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> list[dict[str, object]]:
    """Repeats the child's JSON lines and returns them; its other output goes to standard error.
    A child that fails, or is ended because it takes too long, is a line with an error."""
    child = subprocess.Popen(
        command, env=environment, cwd=folder, stdout=subprocess.PIPE, text=True
    )
    timer = threading.Timer(timeout_s, child.kill)
    timer.start()
    lines: list[dict[str, object]] = []
    assert child.stdout is not None
    with child.stdout as output:
        for text in output:
            line = _parse(text)
            if line is None:
                sys.stderr.write(text)
            else:
                report.emit(**line)
                lines.append(line)
    timer.cancel()
    if child.wait() != 0:
        report.emit(command=list(command[1:]), error=f"exit code {child.returncode}")
    return lines


def _parse(text: str) -> dict[str, object] | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None

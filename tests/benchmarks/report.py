"""The output of every benchmark: JSON lines, the first of them the machine and the versions."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

LIBRARIES = (
    "loraplex",
    "torch",
    "triton",
    "vllm",
    "ray",
    "mlflow",
    "transformers",
    "llguidance",
    "jsonschema",
    "peft",
    "fastapi",
    "uvloop",
)
_GPU_FIELDS = "name,driver_version,memory.total,clocks.max.sm"


class Report:
    """Lines on standard output and, each as soon as it is known, at the end of a file: a run that
    is cut short leaves what it had measured."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path

    def emit(self, **fields: object) -> None:
        line = json.dumps(fields, allow_nan=False) + "\n"
        sys.stdout.write(line)
        sys.stdout.flush()
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(line)

    def emit_machine(self, benchmark: str, **fields: object) -> None:
        self.emit(**machine(benchmark), **fields)

    def lines(self) -> list[dict[str, object]]:
        """Returns all lines of the file, those of earlier runs too."""
        if self._path is None or not self._path.is_file():
            return []
        return [json.loads(line) for line in self._path.read_text().splitlines()]


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    installed = {}
    for name in LIBRARIES:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return installed


def gpus() -> list[str]:
    """Returns the name, driver, memory and highest clock of each; none without NVIDIA's tool."""
    if shutil.which("nvidia-smi") is None:
        return []
    done = subprocess.run(
        ["nvidia-smi", f"--query-gpu={_GPU_FIELDS}", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.splitlines() if done.returncode == 0 else []


def machine(benchmark: str) -> dict[str, object]:
    return {
        "benchmark": benchmark,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "processor": processor(),
        "cores": os.cpu_count(),
        "gpus": gpus(),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": versions(),
    }


def emit(**fields: object) -> None:
    """Prints one JSON line on standard output."""
    Report().emit(**fields)


def emit_machine(benchmark: str, **fields: object) -> None:
    Report().emit_machine(benchmark, **fields)


def percentile(values: Sequence[float], percent: float) -> float:
    """Returns the value below which `percent` of the values lie (nearest rank)."""
    assert values
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def spread(values: Sequence[float], digits: int = 4) -> dict[str, float]:
    return {
        "p50": round(statistics.median(values), digits),
        "p99": round(percentile(values, 99), digits),
        "max": round(max(values), digits),
    }


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Prints a table for people on standard error: standard output is JSON only."""
    cells = [[*header], *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    for row in cells:
        line = "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True))
        sys.stderr.write(line.rstrip() + "\n")
    sys.stderr.flush()


def _cell(value: object) -> str:
    if isinstance(value, float) and value < 100:
        return f"{value:.3g}"
    if isinstance(value, float | int):
        return f"{value:,.0f}"
    return "-" if value is None else str(value)

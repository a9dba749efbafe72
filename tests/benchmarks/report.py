"""What every benchmark prints: JSON lines, the first of them the machine and the versions."""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

LIBRARIES = ("loraplex", "torch", "ray", "mlflow", "transformers", "peft", "fastapi", "uvloop")


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


def emit(**fields: object) -> None:
    """One JSON line on standard output."""
    sys.stdout.write(json.dumps(fields, allow_nan=False) + "\n")
    sys.stdout.flush()


def emit_machine(benchmark: str) -> None:
    emit(
        benchmark=benchmark,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        processor=processor(),
        cores=os.cpu_count(),
        load_average=os.getloadavg()[0],
        python=platform.python_version(),
        versions=versions(),
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` of the values lie (nearest rank)."""
    assert values
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def spread(values: Sequence[float], digits: int = 4) -> dict[str, float]:
    return {
        "p50": round(statistics.median(values), digits),
        "p99": round(percentile(values, 99), digits),
        "max": round(max(values), digits),
    }

"""Memory of this machine and of this process, as Linux tells it: how much is free, how much a piece
of work took at its peak. Ignorant of tensors; where a file of /proc is missing the answer is None.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_CGROUP = Path("/sys/fs/cgroup")
_PROCESS = Path("/proc/self")


def available_bytes() -> int:
    """Without swapping, and within the limit of a container."""
    machine = _fields(Path("/proc/meminfo"))["MemAvailable"]
    limit, used = _number(_CGROUP / "memory.max"), _number(_CGROUP / "memory.current")
    if limit is None or used is None:
        return machine
    # What the files' cache holds is given up when it is wanted.
    stat = (line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    cache = next((int(value) for name, value in stat if name == "inactive_file"), 0)
    return min(machine, max(0, limit - used + cache))


def total_bytes() -> int:
    """The memory of this machine, or of its container where that has less."""
    machine = _fields(Path("/proc/meminfo"))["MemTotal"]
    limit = _number(_CGROUP / "memory.max")
    return machine if limit is None else min(machine, limit)


def resident_bytes() -> int | None:
    """Of this process, mapped files included."""
    try:
        return _fields(_PROCESS / "status")["VmRSS"]
    except OSError:
        return None


def peak_of(work: Callable[[], T]) -> tuple[T, int | None]:
    """What the work returns, and by how many bytes the process was larger at the peak than before
    (mapped files included). None where the system does not let a process reset its own peak."""
    try:
        (_PROCESS / "clear_refs").write_text("5")  # the peak is what is held now
    except OSError:
        return work(), None
    before = _fields(_PROCESS / "status")["VmRSS"]
    result = work()
    return result, max(0, _fields(_PROCESS / "status")["VmHWM"] - before)


def _fields(path: Path) -> dict[str, int]:
    """Lines `Name:  123 kB`, in bytes."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines if line[-1] == "kB"}


def _number(path: Path) -> int | None:
    """None for no such file, and for a limit that is "max"."""
    if not path.is_file():
        return None
    text = path.read_text().strip()
    return int(text) if text.isdecimal() else None

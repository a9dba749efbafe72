"""Memory of this machine and of this process, as Linux reports it: the free bytes, and the peak of
a piece of work. Free of tensors; the result is None if a file of /proc is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_CGROUP = Path("/sys/fs/cgroup")
_PROCESS = Path("/proc/self")


def available_bytes() -> int:
    """Returns the bytes available without swapping, within the limit of a container."""
    machine = _fields(Path("/proc/meminfo"))["MemAvailable"]
    limit, used = _number(_CGROUP / "memory.max"), _number(_CGROUP / "memory.current")
    if limit is None or used is None:
        return machine
    # The kernel drops cached files when memory is needed.
    stat = (line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    cache = next((int(value) for name, value in stat if name == "inactive_file"), 0)
    return min(machine, max(0, limit - used + cache))


def total_bytes() -> int:
    """Returns the memory of this machine, or of its container if that has less."""
    machine = _fields(Path("/proc/meminfo"))["MemTotal"]
    limit = _number(_CGROUP / "memory.max")
    return machine if limit is None else min(machine, limit)


def resident_bytes() -> int | None:
    """Returns the resident bytes of this process, mapped files included."""
    try:
        return _fields(_PROCESS / "status")["VmRSS"]
    except OSError:
        return None


def peak_of(work: Callable[[], T]) -> tuple[T, int | None]:
    """Returns the result of the work, and by how many bytes the process was larger at the peak
    than before (mapped files included), or None if the system does not let a process reset its
    own peak."""
    try:
        (_PROCESS / "clear_refs").write_text("5")  # sets the peak to the current size
    except OSError:
        return work(), None
    before = _fields(_PROCESS / "status")["VmRSS"]
    result = work()
    return result, max(0, _fields(_PROCESS / "status")["VmHWM"] - before)


def _fields(path: Path) -> dict[str, int]:
    """Reads lines `Name: 123 kB`, in bytes."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines if line[-1] == "kB"}


def _number(path: Path) -> int | None:
    """Returns None if the file is missing, and for a limit that is "max"."""
    if not path.is_file():
        return None
    text = path.read_text().strip()
    return int(text) if text.isdecimal() else None

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
_MEMINFO = Path("/proc/meminfo")


def available_bytes() -> int:
    """Returns the bytes available without swapping, within the limit of a container."""
    machine = _fields(_MEMINFO)["MemAvailable"]
    folder, limit_file, used_file = _cgroup()
    limit, used = _number(folder / limit_file), _number(folder / used_file)
    if limit is None or used is None:
        return machine
    # The kernel drops cached files when memory is needed. Version 1 counts those of the groups
    # below in the total alone.
    stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    cache = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
    return min(machine, max(0, limit - used + cache))


def total_bytes() -> int:
    """Returns the memory of this machine, or of its container if that has less."""
    machine = _fields(_MEMINFO)["MemTotal"]
    folder, limit_file, _ = _cgroup()
    limit = _number(folder / limit_file)
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


def _cgroup() -> tuple[Path, str, str]:
    """Returns the folder of the container's group, and its files of the limit and of the use, in
    version 2 of cgroups or else in version 1, whose limit is a huge number where there is none."""
    if (_CGROUP / "memory.max").is_file():
        return _CGROUP, "memory.max", "memory.current"
    return _CGROUP / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"


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

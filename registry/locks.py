"""Locks between processes and threads: flock on files of a folder, freed by the kernel when their
holder dies. A lock file's modification time is the lock's last use: it costs one system call and
survives every crash.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SHARED = fcntl.LOCK_SH
EXCLUSIVE = fcntl.LOCK_EX
NO_WAIT = fcntl.LOCK_NB


class Locks:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def acquire(self, name: str, how: int) -> int | None:
        """Returns a descriptor that holds the lock until it is closed; None if another holder has
        it and `how` includes NO_WAIT."""
        while True:
            descriptor = os.open(self._folder / name, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(descriptor, how)
                if os.fstat(descriptor).st_nlink:
                    return descriptor
            except BlockingIOError:
                os.close(descriptor)
                return None
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)  # its file was removed meanwhile: try the new file

    @contextmanager
    def held(self, name: str, how: int) -> Iterator[bool]:
        descriptor = self.acquire(name, how)
        try:
            yield descriptor is not None
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def used_ns(self, name: str) -> int:
        """Returns the time of the last use; 0 for a lock that was never held."""
        try:
            return (self._folder / name).stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def remove(self, name: str) -> None:
        """Removes the lock's file. Only for its exclusive holder; waiting processes create a new
        file."""
        (self._folder / name).unlink(missing_ok=True)

"""Whether an embedded SQLite store was written to, asked in microseconds.

A listing of 1,000 adapters of two versions each takes MLflow 1.3 s of a core, and a server looks
every two seconds. Ignorant of MLflow's tables.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from threading import Lock

Marker = tuple[int, int, int]

_BUSY_S = 0.2


class ChangeProbe:
    """Its connection never writes, so SQLite tells it of every commit of all others."""

    def __init__(self, database: Path) -> None:
        self._database = database
        self._lock = Lock()
        self._connection: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None

    def marker(self) -> Marker | None:
        """Another one after any commit, by whomever. None: it cannot be said."""
        with self._lock:
            try:
                return self._read()
            except (OSError, sqlite3.Error):  # away, or locked: a listing will say it in words
                return None

    def _read(self) -> Marker:
        found = self._database.stat()
        file = (found.st_dev, found.st_ino)
        if self._connection is None or file != self._file:  # the first time, or a new database
            self.close()
            self._connection = sqlite3.connect(
                f"{self._database.absolute().as_uri()}?mode=ro",
                uri=True,
                timeout=_BUSY_S,
                check_same_thread=False,  # one at a time: the lock
            )
            self._file = file
        with closing(self._connection.execute("PRAGMA data_version")) as cursor:
            (version,) = cursor.fetchone()
        return (*file, int(version))

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

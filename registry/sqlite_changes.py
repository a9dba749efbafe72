"""Detects writes to an embedded SQLite store, in microseconds.

MLflow needs 1.3 s of a core to list 1,000 adapters of two versions each, and a server looks every
two seconds. Independent of MLflow's tables.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from threading import Lock

Marker = tuple[int, int, int]

_BUSY_S = 0.2


class ChangeProbe:
    """Its connection never writes, so SQLite reports every commit of all other connections."""

    def __init__(self, database: Path) -> None:
        self._database = database
        self._lock = Lock()
        self._connection: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None

    def marker(self) -> Marker | None:
        """Returns a value that changes with every commit of any process; None if unknown."""
        with self._lock:
            try:
                return self._read()
            except (OSError, sqlite3.Error):  # missing or locked: a listing reports the error
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
                check_same_thread=False,  # safe: the lock serializes its use
            )
            self._file = file
        with closing(self._connection.execute("PRAGMA data_version")) as cursor:
            (version,) = cursor.fetchone()
        return (*file, int(version))

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

"""The file of an embedded SQLite store: its creation, and the detection of writes in microseconds.

MLflow needs 1.3 s of a core to list 1,000 adapters of two versions each, and a server looks every
two seconds. The detection is independent of MLflow's tables.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sqlite3
from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock

from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

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


def sqlite_file(tracking_uri: str) -> Path:
    return Path(tracking_uri.removeprefix("sqlite:///").partition("?")[0])


def missing_file(tracking_uri: str) -> Path | None:
    """Returns the file that the first use of a SQLite store would create, otherwise None."""
    file = _own_file(tracking_uri)
    return None if file is None or file.exists() else file


def _own_file(tracking_uri: str) -> Path | None:
    """Returns the file of a SQLite store; None for another store, and for a database in memory or
    with a name of its own."""
    if not tracking_uri.startswith("sqlite:"):
        return None
    try:
        url, file = make_url(tracking_uri), sqlite_file(tracking_uri)
    except ArgumentError:  # MLflow refuses it
        return None
    is_plain_file = url.database == str(file) != ":memory:" and "uri" not in url.query
    return file.resolve() if is_plain_file else None


def create_sqlite(uri: str, artifact_root: str) -> None:
    """Creates a store's database if there is none, whole or not at all: MLflow's migrations take
    seconds, and an interrupt among them, or a second process, would leave a database that no
    process can open again. A database without a file of its own is left to MLflow."""
    file = missing_file(uri)
    if file is None:
        return
    with ExitStack() as stack:
        folder = os.open(file.parent, os.O_RDONLY)
        stack.callback(os.close, folder)
        fcntl.flock(folder, fcntl.LOCK_EX)
        if file.exists():  # another process was quicker
            return
        for stale in file.parent.glob(f".{file.name}-*"):  # of a process that was killed
            shutil.rmtree(stale, ignore_errors=True)
        made = stack.enter_context(TemporaryDirectory(prefix=f".{file.name}-", dir=file.parent))
        new = Path(made, file.name)
        store = SqlAlchemyStore(f"sqlite:///{new}", artifact_root)  # type: ignore[no-untyped-call]
        store.engine.dispose()
        for end in ("-journal", "-wal", "-shm"):  # SQLite would apply the files of a lost database
            Path(f"{file}{end}").unlink(missing_ok=True)
        try:
            os.link(new, file)
        except FileExistsError:  # of another program, which takes no lock
            return
        except OSError:  # a file system without hard links
            new.rename(file)

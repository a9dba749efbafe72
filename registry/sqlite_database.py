"""The file of an embedded SQLite store: its creation, its replacement by another file, and the
detection of writes in microseconds.

MLflow needs 1.3 s of a core to list 1,000 adapters of two versions each, and a server looks every
two seconds. The detection is independent of MLflow's tables.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sqlite3
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from urllib.parse import unquote, urlsplit

from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
from sqlalchemy.engine import Engine, make_url
from sqlalchemy.exc import ArgumentError

from registry.errors import RegistryError, RegistryUnavailableError
from registry.sqlite_uri import sqlite_uri

Marker = tuple[int, int, int]

_BUSY_S = 0.2
_IN_MEMORY = ":memory:"


class OpenedFile:
    """The file that the connections of an open store belong to."""

    def __init__(self, file: Path, engines: Sequence[Engine]) -> None:
        """`file` exists. The engines are closed once: MLflow keeps them for the process, so that
        they may have connections to a former file, from a store that is no longer used."""
        self._file = file
        self._engines = engines
        self._lock = Lock()
        self._opened = _identity(file)
        self._close()

    def follow(self) -> None:
        """Has the next calls open the file anew if another file has its name, such as a restored
        backup: the pooled connections would read the former file for ever. Raises
        RegistryUnavailableError if there is none: SQLite would create an empty file."""
        try:
            found = _identity(self._file)
        except OSError as error:
            raise RegistryUnavailableError(f"{self._file} is gone: {error.strerror}") from None
        with self._lock:
            if found != self._opened:
                self._close()
                self._opened = found

    def _close(self) -> None:
        """Closes the pooled connections; those in use close when their calls end."""
        for engine in self._engines:
            engine.dispose()


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
        file = _identity(self._database)
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


def _identity(file: Path) -> tuple[int, int]:
    found = file.stat()
    return found.st_dev, found.st_ino


def sqlite_file(tracking_uri: str) -> Path:
    """Returns the file of a SQLite store, as SQLAlchemy and SQLite read the URI; `:memory:` for a
    database without one. Raises RegistryError for a URI that they cannot read, and for a folder."""
    try:
        url = make_url(tracking_uri)
    except (ArgumentError, ValueError):
        url = None
    if url is None or url.host is not None:
        raise RegistryError(f"{tracking_uri} is not a URI of SQLite, which is sqlite:///FILE")
    name = url.database or _IN_MEMORY
    if "uri" in url.query and name.startswith("file:"):  # SQLite's own URI
        name = _IN_MEMORY if url.query.get("mode") == "memory" else unquote(urlsplit(name).path)
    file = Path(name)
    if file.is_dir():
        raise RegistryError(f"{tracking_uri} names a folder; the URI of SQLite is sqlite:///FILE")
    return file


def missing_file(tracking_uri: str) -> Path | None:
    """Returns the file that a SQLite store has and that does not exist, otherwise None. Raises
    RegistryError as `sqlite_file` does."""
    if not tracking_uri.startswith("sqlite:"):
        return None
    file = sqlite_file(tracking_uri)
    return None if str(file) == _IN_MEMORY or file.exists() else file.resolve()


def create_sqlite(uri: str, artifact_root: str) -> None:
    """Creates a store's database if there is none, whole or not at all: MLflow's migrations take
    seconds, and an interrupt among them, or a second process, would leave a database that no
    process can open again. A database in memory, or with SQLite's own URI, is left to MLflow."""
    file = missing_file(uri)
    if file is None or "uri" in make_url(uri).query:
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
        store = SqlAlchemyStore(sqlite_uri(new), artifact_root)  # type: ignore[no-untyped-call]
        store.engine.dispose()
        for end in ("-journal", "-wal", "-shm"):  # SQLite would apply the files of a lost database
            Path(f"{file}{end}").unlink(missing_ok=True)
        try:
            os.link(new, file)
        except FileExistsError:  # of another program, which takes no lock
            return
        except OSError:  # a file system without hard links
            new.rename(file)

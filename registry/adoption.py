"""Reads plain MLflow versions one at a time while listings go on: neither a large file nor a
hanging store delays an alias.

A listing asks for each version without a digest, and gets the result so far. The worker is a daemon
thread: it downloads into a scratch folder, hashes, checks, and writes the tags. A version that is
refused for its content, or is no adapter, is read again after a doubling pause, as its files may
come later than the version; so is a version whose store fails. The registered models have turns: a
model with hundreds of slow versions delays another model by a single version at most.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from math import inf, isinf
from pathlib import Path

from mlflow.store.artifact.artifact_repo import ArtifactRepository

from registry import plain_mlflow
from registry.errors import (
    ArtifactError,
    InvalidNameError,
    QuarantinedError,
    RegistrationError,
    RegistryError,
    RegistryUnavailableError,
)
from registry.listing import Row
from registry.quarantine import Quarantine

logger = logging.getLogger(__name__)

REFUSALS = (RegistrationError, InvalidNameError, ArtifactError)  # of a plain version's content
LONGEST_S = 600.0  # to read a version; then it fails and the next version follows
_TAG_AGAIN_S = 60.0
# The pause before a version without an adapter is read again; it doubles up to a day.
LATE_FILES_S = 10.0
_MAX_LATE_FILES_S = 24 * 3600.0
_MAX_LOST = 3  # threads that are blocked by a hanging store
_MIN_FREE_BYTES = 1024**3  # left on the scratch folder's disk

# Name, version, source and creation time: a number that is reused after a deletion is another
# version.
Key = tuple[str, int, str, int]
Found = plain_mlflow.PlainAdapter | RegistryError | None  # None: no adapter
_Job = tuple[Key, Callable[[], None]]


def key_of(row: Row) -> Key:
    return row.name, row.version, row.source, row.created_s


class Adoption:
    """Any thread may call its methods. Its own thread starts with the first version."""

    def __init__(
        self, open_files: Callable[[str, int], ArtifactRepository], scratch: Path | None
    ) -> None:
        """`scratch`: the folder for downloads, created when needed; None: the system's."""
        self._open_files = open_files
        self._scratch = scratch
        self._quarantine = Quarantine()
        self._now_s: Callable[[], float] = time.monotonic  # clock of the pauses between reads
        self._found: dict[Key, Found] = {}
        # When a version without an adapter is read again, and the pause after that; monotonic.
        self._read_again_s: dict[Key, tuple[float, float]] = {}
        self._tag_again_s: dict[Key, float] = {}  # monotonic; infinity once the tags are written
        self._changed = threading.Condition(threading.RLock())
        # By registered model, in the order of their turns; no model is without a job.
        self._jobs: dict[str, deque[_Job]] = {}
        self._job: _Job | None = None
        self._began_s = 0.0  # that job; monotonic
        self._waiting: set[Key] = set()  # of all jobs, including the current job
        self._lost: set[threading.Thread] = set()
        self._worker: threading.Thread | None = None
        self.num_done = 0  # jobs; if it changes, a listing may have another result

    def look(self, row: Row) -> tuple[bool, Found]:
        """Returns whether the version was read, and the result. Queues a version that was not read.
        If its store failed recently, the result is a RegistryUnavailableError."""
        key = key_of(row)
        with self._changed:
            self._replace_a_hung_worker()
            if key in self._found:
                self._read_late_files(key)
                return True, self._found[key]
            if key in self._waiting:
                return False, None
            try:
                self._quarantine.check(_digest(key))
            except QuarantinedError as error:
                return True, RegistryUnavailableError(str(error))
            self._add(key, lambda: self._read(key))
            return False, None

    def is_due(self) -> bool:
        """Returns whether a version must be read again even if the listing is unchanged."""
        now_s = self._now_s()
        with self._changed:
            return any(again_s <= now_s for again_s, _ in self._read_again_s.values())

    def tag_once(self, row: Row, write: Callable[[], None]) -> None:
        """Queues the writing of a version's tags; again after a pause if the store refuses them, as
        a read-only store does."""
        key = key_of(row)
        with self._changed:
            if key not in self._waiting and time.monotonic() >= self._tag_again_s.get(key, 0.0):
                self._tag_again_s[key] = time.monotonic() + _TAG_AGAIN_S
                self._add(key, lambda: self._tag(key, write))

    def keep(self, rows: Collection[Row]) -> bool:
        """Drops every version that is not in the listing any more, with its job. Returns False if a
        failed store is to be asked again, so that an equal listing may have another result."""
        keys = {key_of(row) for row in rows}
        with self._changed:
            self._drop_jobs(self._waiting - keys)
            for key in self._found.keys() - keys:
                del self._found[key]
                self._read_again_s.pop(key, None)
            for key in self._tag_again_s.keys() - keys:
                del self._tag_again_s[key]
            are_tagged = all(isinf(again_s) for again_s in self._tag_again_s.values())
            return are_tagged and not self._quarantine.verdicts()

    def wait(self) -> None:
        """Returns when all jobs are done."""
        with self._changed:
            while self._jobs or self._job is not None:
                self._replace_a_hung_worker()
                self._changed.wait(1.0)

    def _read_late_files(self, key: Key) -> None:
        """Queues a version whose pause is over; the earlier result counts until it has been read
        again. The caller holds the lock."""
        now_s = self._now_s()
        again_s, pause_s = self._read_again_s.get(key, (inf, 0.0))
        if now_s >= again_s and key not in self._waiting:
            pause_s = min(2 * pause_s, _MAX_LATE_FILES_S)
            self._read_again_s[key] = now_s + pause_s, pause_s
            self._add(key, lambda: self._read(key))

    def _add(self, key: Key, work: Callable[[], None]) -> None:
        self._jobs.setdefault(key[0], deque()).append((key, work))
        self._waiting.add(key)
        if self._worker is None and self._job is None:
            self._start()

    def _next(self) -> _Job:
        """Returns the first job of the model whose turn it is, and moves that model to the end."""
        name = next(iter(self._jobs))
        jobs = self._jobs.pop(name)
        job = jobs.popleft()
        if jobs:
            self._jobs[name] = jobs
        return job

    def _drop_jobs(self, keys: set[Key]) -> None:
        """Drops waiting jobs. The current job goes on."""
        if self._job is not None:
            keys.discard(self._job[0])
        self._waiting -= keys
        for name in {key[0] for key in keys}:
            left = deque(job for job in self._jobs[name] if job[0] not in keys)
            if left:
                self._jobs[name] = left
            else:
                del self._jobs[name]

    def _start(self) -> None:
        self._worker = threading.Thread(target=self._run, name="adoption", daemon=True)
        self._worker.start()

    def _run(self) -> None:
        mine = threading.current_thread()
        while True:
            with self._changed:
                if self._worker is not mine or not self._jobs:
                    if self._worker is mine:
                        self._worker = None
                    self._lost.discard(mine)
                    return
                self._job = job = self._next()
                self._began_s = time.monotonic()
            key, work = job
            try:
                work()
            except Exception:  # a bug must not stop the other versions
                logger.exception("%s version %d was not adopted", *key[:2])
                self._fail(key, "it could not be read")
            with self._changed:
                if self._job is job:
                    self._job = None
                    self._waiting.discard(key)
                    self.num_done += 1
                self._changed.notify_all()

    def _replace_a_hung_worker(self) -> None:
        """Starts a new worker if the present worker hangs; the caller holds the lock. A thread
        cannot be ended from outside: it keeps its folder and its memory, so there are _MAX_LOST at
        most."""
        job, worker = self._job, self._worker
        if job is None or worker is None:
            return
        if time.monotonic() - self._began_s <= LONGEST_S or len(self._lost) >= _MAX_LOST:
            return
        self._lost.add(worker)
        self._job, self._worker = None, None
        self._waiting.discard(job[0])
        self._fail(job[0], f"its store did not send it within {LONGEST_S:g} s")
        self.num_done += 1
        if self._jobs:
            self._start()

    def _read(self, key: Key) -> None:
        found: Found
        try:
            found = self._inspect(key)
        except REFUSALS as error:
            found = error
        except RegistryError as error:
            self._fail(key, f"it cannot be read now: {error}")
            return
        with self._changed:
            if self._worker is not threading.current_thread():
                return  # replaced meanwhile: its version is in quarantine
            self._found[key] = found
            if isinstance(found, plain_mlflow.PlainAdapter):
                self._read_again_s.pop(key, None)
            else:
                first = self._now_s() + LATE_FILES_S, LATE_FILES_S
                self._read_again_s.setdefault(key, first)
            self._quarantine.clear(_digest(key))

    def _tag(self, key: Key, write: Callable[[], None]) -> None:
        try:
            write()
        except RegistryError as error:  # this process has the result anyway
            logger.warning("%s version %d stays untagged: %s", *key[:2], error)
        else:
            with self._changed:
                self._tag_again_s[key] = inf

    def _inspect(self, key: Key) -> plain_mlflow.PlainAdapter | None:
        name, version, *_ = key
        if self._scratch is not None:
            self._scratch.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="loraplex-", dir=self._scratch) as folder:
            free = shutil.disk_usage(folder).free
            if free < _MIN_FREE_BYTES:
                raise RegistryUnavailableError(f"only {free} bytes are free in {folder}")
            return plain_mlflow.inspect(self._open_files(name, version), Path(folder))

    def _fail(self, key: Key, words: str) -> None:
        logger.warning("%s version %d: %s", *key[:2], words)
        with self._changed:
            self._quarantine.add(_digest(key), words)


def _digest(key: Key) -> str:
    return hashlib.sha256(repr(key).encode("utf-8", "replace")).hexdigest()

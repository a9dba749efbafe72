"""Plain versions are read and judged beside the listing, one at a time: neither a large file nor a
store that hangs delays an alias.

A listing asks for each version that carries no digest yet, and gets what is known of it. The worker
is a daemon thread: it downloads into a scratch folder, hashes, judges, and writes the tags. A
version that is refused for its content, or is no adapter, is read again after a doubling pause, for
its files may come later than the version; so is one whose store fails. The registered models take
turns: one with hundreds of versions that are slow to read delays another by one version at most.
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
from dataclasses import dataclass
from math import inf, isinf
from pathlib import Path

from mlflow.store.artifact.artifact_repo import ArtifactRepository

from registry import plain
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
LONGEST_S = 600.0  # of one version; then the next one's turn comes
_TAG_AGAIN_S = 60.0
# A version without an adapter is read again then; the pause doubles up to a day.
LATE_FILES_S = 10.0
_MAX_LATE_FILES_S = 24 * 3600.0
_MAX_LOST = 3  # threads that are still in a store that hangs
_MIN_FREE_BYTES = 1024**3  # left on the scratch folder's disk

# A number that is used again, after a deletion, is another version.
Key = tuple[str, int, str, int]
Found = plain.PlainAdapter | RegistryError | None  # None: no adapter
OpenFiles = Callable[[str, int], ArtifactRepository]


def key_of(row: Row) -> Key:
    return row.name, row.version, row.source, row.created_s


@dataclass(slots=True, eq=False)
class _Job:
    key: Key
    work: Callable[[], None]
    began_s: float | None = None  # monotonic


class Adoption:
    """Any thread may call. Starts its thread with the first version."""

    def __init__(self, open_files: OpenFiles, scratch: Path | None) -> None:
        """`scratch`: the folder for what is downloaded, made when needed; None: the system's."""
        self._open_files = open_files
        self._scratch = scratch
        self._quarantine = Quarantine()
        self._now_s: Callable[[], float] = time.monotonic  # of the pauses before a version is read
        self._found: dict[Key, Found] = {}
        # When a version that is no adapter is read again, and the pause after that; monotonic.
        self._read_again_s: dict[Key, tuple[float, float]] = {}
        self._tag_again_s: dict[Key, float] = {}  # monotonic; for ever once they are written
        self._changed = threading.Condition(threading.RLock())
        # By registered model, the one whose turn is next first; no model without a job.
        self._jobs: dict[str, deque[_Job]] = {}
        self._job: _Job | None = None
        self._waiting: set[Key] = set()  # of all jobs, the current one included
        self._lost: set[threading.Thread] = set()
        self._worker: threading.Thread | None = None
        self.num_done = 0  # another number: a listing would find something else

    def look(self, row: Row) -> tuple[bool, Found]:
        """Whether the version was read, and what it is. One that was not is read from now on; a
        store that failed lately is what is found, as its RegistryError."""
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
            self._add(_Job(key, lambda: self._read(key)))
            return False, None

    def is_due(self) -> bool:
        """Whether a version is to be read again though the listing may be the same."""
        now_s = self._now_s()
        with self._changed:
            return any(again_s <= now_s for again_s, _ in self._read_again_s.values())

    def tag_once(self, row: Row, write: Callable[[], None]) -> None:
        """Has the worker write a version's tags; again after a pause where the store takes none,
        which may be one that can only be read."""
        key = key_of(row)
        with self._changed:
            if key not in self._waiting and time.monotonic() >= self._tag_again_s.get(key, 0.0):
                self._tag_again_s[key] = time.monotonic() + _TAG_AGAIN_S
                self._add(_Job(key, lambda: self._tag(key, write)))

    def keep(self, rows: Collection[Row]) -> bool:
        """Forgets every version that the listing does not show any more, with its job. False: a
        store that failed is to be asked again, so that an equal listing may have another outcome.
        """
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
        """Until nothing is left to do."""
        with self._changed:
            while self._jobs or self._job is not None:
                self._replace_a_hung_worker()
                self._changed.wait(1.0)

    def _read_late_files(self, key: Key) -> None:
        """Under the lock. What was found before counts until the version was read again."""
        now_s = self._now_s()
        again_s, pause_s = self._read_again_s.get(key, (inf, 0.0))
        if now_s >= again_s and key not in self._waiting:
            pause_s = min(2 * pause_s, _MAX_LATE_FILES_S)
            self._read_again_s[key] = now_s + pause_s, pause_s
            self._add(_Job(key, lambda: self._read(key)))

    def _add(self, job: _Job) -> None:
        self._jobs.setdefault(job.key[0], deque()).append(job)
        self._waiting.add(job.key)
        if self._worker is None and self._job is None:
            self._start()

    def _next(self) -> _Job:
        """The first job of the model whose turn it is, which is the last in turn from then on."""
        name = next(iter(self._jobs))
        jobs = self._jobs.pop(name)
        job = jobs.popleft()
        if jobs:
            self._jobs[name] = jobs
        return job

    def _drop_jobs(self, keys: set[Key]) -> None:
        """The current job runs on."""
        if self._job is not None:
            keys.discard(self._job.key)
        self._waiting -= keys
        for name in {key[0] for key in keys}:
            left = deque(job for job in self._jobs[name] if job.key not in keys)
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
                job.began_s = time.monotonic()
            try:
                job.work()
            except Exception:  # a fault of ours is this version's alone
                logger.exception("%s version %d was not adopted", *job.key[:2])
                self._fail(job.key, "it could not be read")
            with self._changed:
                if self._job is job:
                    self._job = None
                    self._waiting.discard(job.key)
                    self.num_done += 1
                self._changed.notify_all()

    def _replace_a_hung_worker(self) -> None:
        """Under the lock. No thread can be ended from outside: the hung one keeps its folder and
        its memory, and a few of them are the most."""
        job, worker = self._job, self._worker
        if job is None or job.began_s is None or worker is None:
            return
        if time.monotonic() - job.began_s <= LONGEST_S or len(self._lost) >= _MAX_LOST:
            return
        self._lost.add(worker)
        self._job, self._worker = None, None
        self._waiting.discard(job.key)
        self._fail(job.key, f"its store did not send it within {LONGEST_S:g} s")
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
            if not self._is_current():  # given up: its quarantine counts
                return
            self._found[key] = found
            if isinstance(found, plain.PlainAdapter):
                self._read_again_s.pop(key, None)
            else:
                first = self._now_s() + LATE_FILES_S, LATE_FILES_S
                self._read_again_s.setdefault(key, first)
            self._quarantine.forgive(_digest(key))

    def _tag(self, key: Key, write: Callable[[], None]) -> None:
        try:
            write()
        except RegistryError as error:  # known to this process all the same
            logger.warning("%s version %d stays untagged: %s", *key[:2], error)
        else:
            with self._changed:
                self._tag_again_s[key] = inf

    def _is_current(self) -> bool:
        return self._worker is threading.current_thread()

    def _inspect(self, key: Key) -> plain.PlainAdapter | None:
        name, version, *_ = key
        if self._scratch is not None:
            self._scratch.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="loraplex-", dir=self._scratch) as folder:
            free = shutil.disk_usage(folder).free
            if free < _MIN_FREE_BYTES:
                raise RegistryUnavailableError(f"only {free} bytes are free in {folder}")
            return plain.inspect(self._open_files(name, version), Path(folder))

    def _fail(self, key: Key, words: str) -> None:
        logger.warning("%s version %d: %s", *key[:2], words)
        with self._changed:
            self._quarantine.add(_digest(key), words)


def _digest(key: Key) -> str:
    return hashlib.sha256(repr(key).encode("utf-8", "replace")).hexdigest()

"""Verified local copies: `blobs/<sha256>`, and `trees/<key>/`, folders of hardlinks to them.

A tree appears whole, by one rename, or not at all; a digest is fetched once per node, while the
other processes wait for it. A returned tree is held, by a lock that dies with the process, until it
is released: held trees are never evicted. Bytes are hashed when they arrive; afterwards a tree is
trusted while the sizes and times of its files stay, and hashed again when they change, or on
`verify`. The caller passes `fetch(entry, target)`, which brings a file from anywhere.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from registry.entities import Manifest, content_digest
from registry.errors import ArtifactError, CacheFullError, DigestMismatchError
from registry.files import disk_errors, is_entry, is_untouched, write_note
from registry.fill import Arrived, CacheFill, Fetch, Link
from registry.locks import EXCLUSIVE, SHARED, Locks
from registry.manifest import parse_manifest
from registry.quarantine import Quarantine
from registry.quota import Quota, digest_of, fetch_lock

logger = logging.getLogger(__name__)

# The files that a process without a device needs: configuration, tokenizer, templates.
TEXT_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Bytes are the folder's, for all processes of the node; the other numbers are this
    process's."""

    own_bytes: int  # without bytes that the store shares by hardlink
    max_bytes: int | None
    hits: int
    misses: int
    evictions: int
    fetches_in_flight: int
    num_quarantined: int


class Cache:
    """Threads may share a cache. `max_bytes`: for all trees together, None for the whole disk."""

    def __init__(
        self,
        root: Path,
        *,
        max_bytes: int | None = None,
        quarantine: Quarantine | None = None,
        leaves_room: bool = False,
    ) -> None:
        """`leaves_room`: without `max_bytes` the limit is a share of the disk's present free
        bytes."""
        self.root = root
        self._locks = Locks(root / "locks")
        self._quota = Quota(root, self._locks, max_bytes)
        self._quarantine = quarantine
        self._held: dict[str, tuple[int, int]] = {}  # tree -> descriptor of its lock, holders
        self._counts: Counter[str] = Counter()
        self._mutex = threading.Lock()
        with self._folders():
            if max_bytes is None and leaves_room:
                self._quota.limit_to_disk()
            with self._quota.locked():
                try:
                    self._quota.make_room(0)  # the limit may have changed
                except CacheFullError as error:
                    logger.warning("the cache is larger than its limit: %s", error)

    def tree(
        self,
        digest: str,
        manifest: Manifest,
        fetch: Fetch,
        files: tuple[str, ...] | None = None,
        link: Link | None = None,
        arrived: Arrived = lambda entry: None,
    ) -> Path:
        """Returns the folder of a digest's files, or of the files that match `files` (shell
        patterns). It is held until `release`, or the end of this process."""
        _check_digest(manifest, digest)
        wanted = select(manifest, files)
        name = _tree_name(digest, manifest, wanted)
        path = self.root / "trees" / name
        with self._folders():
            self._hold(name)
            try:
                if is_untouched(self._note(name), path, wanted):
                    self._count("hits")
                else:
                    fill = CacheFill(
                        self.root, self._quota, name, manifest, wanted, fetch, link, arrived
                    )
                    self._find_or_build(path, fill)
            except BaseException:
                self.release(path)
                raise
        return path

    def release(self, path: Path) -> None:
        """Releases a folder that `tree` returned; called once for each such call."""
        with self._mutex:
            descriptor, holders = self._held[path.name]
            if holders > 1:
                self._held[path.name] = (descriptor, holders - 1)
            else:
                del self._held[path.name]
                os.close(descriptor)

    def manifest(self, digest: str) -> Manifest | None:
        """Returns the manifest of a digest that was fetched before, without the network."""
        with disk_errors():
            try:
                text = (self.root / "manifests" / f"{digest}.json").read_text(errors="replace")
                manifest = parse_manifest(text)
            except (FileNotFoundError, ArtifactError):
                return None
        return manifest if content_digest(manifest) == digest else None

    def find_manifest(self, digest: str, read: Callable[[], Manifest]) -> Manifest:
        """Returns the stored manifest, or the result of `read`: in one process at a time, and not
        while the digest is in quarantine."""
        manifest = self.manifest(digest)
        if manifest is not None:
            return manifest
        with self._folders(), self._quarantining(digest):
            manifest = read()
            _check_digest(manifest, digest)
        return manifest

    def verify(self, digest: str) -> bool:
        """Reads every byte of a digest's trees. Returns False if a tree was corrupt: it is removed,
        and fetched again when needed."""
        manifest = self.manifest(digest)
        if manifest is None:
            return True  # there is no tree
        with disk_errors(), self._locks.held(fetch_lock(digest), EXCLUSIVE):
            trees = [p for p in (self.root / "trees").iterdir() if digest_of(p.name) == digest]
            corrupt = [tree for tree in trees if self._discard_if_corrupt(tree, manifest)]
        return not corrupt

    def digests(self) -> frozenset[str]:
        with self._folders():
            return frozenset(digest_of(path.name) for path in (self.root / "trees").iterdir())

    def size_bytes(self) -> int:
        """Returns the bytes of all blobs, each counted once however many trees have it."""
        with self._folders():
            return sum(entry.stat().st_size for entry in os.scandir(self.root / "blobs"))

    def remove(self, digest: str) -> int:
        """Releases all trees of a digest that this process holds, and removes those that no other
        process uses. Returns the bytes freed."""
        with self._mutex:
            for name in [name for name in self._held if digest_of(name) == digest]:
                os.close(self._held.pop(name)[0])
        with self._folders(), self._quota.locked():
            return self._quota.remove(digest)

    def stats(self) -> CacheStats:
        """Walks the folder, so it belongs into a thread."""
        with self._folders():
            own_bytes = self._quota.own_bytes()
            quarantined = 0 if self._quarantine is None else len(self._quarantine.verdicts())
        with self._mutex:
            return CacheStats(
                own_bytes,
                self._quota.max_bytes,
                self._counts["hits"],
                self._counts["misses"],
                self._quota.num_evictions,
                self._counts["fetches"],
                quarantined,
            )

    def _hold(self, name: str) -> None:
        """Locks a tree, and sets its time of last use, which is its lock file's time."""
        with self._mutex:
            descriptor, holders = self._held.get(name, (None, 0))
            # A lock whose file was removed is no lock: others lock another file.
            if descriptor is None or not os.fstat(descriptor).st_nlink:
                stale = descriptor  # closed only after this: a failure leaves it to its holders
                # Waits for an eviction at most: milliseconds.
                descriptor = self._locks.acquire(name, SHARED)
                assert descriptor is not None
                if stale is not None:
                    os.close(stale)
            self._held[name] = (descriptor, holders + 1)
            os.utime(descriptor)

    @contextmanager
    def _folders(self) -> Iterator[None]:
        """Makes missing folders for the block, as a user may remove the cache's folder at any time,
        and names the disk in its errors."""
        with disk_errors():
            _make_folders(self.root)
            yield

    def _find_or_build(self, path: Path, fill: CacheFill) -> None:
        with self._quarantining(fill.digest):
            note = self._note(fill.name)
            if is_untouched(note, path, fill.wanted):  # another process was quicker
                self._count("hits")
                return
            if path.is_dir() and not self._discard_if_corrupt(path, fill.manifest):
                write_note(note, path, fill.wanted)
                self._count("hits")
                return
            self._count("misses")
            self._count("fetches")
            try:
                fill.run()
            finally:
                self._count("fetches", -1)
            if self._quarantine is not None:
                self._quarantine.clear(fill.digest)

    def _discard_if_corrupt(self, tree: Path, manifest: Manifest) -> bool:
        """Removes an incomplete or corrupt tree; the caller holds the digest's lock."""
        present = tuple(entry for entry in manifest if os.path.lexists(tree / entry.path))
        is_complete = _tree_name(digest_of(tree.name), manifest, present) == tree.name
        bad = tuple(entry for entry in present if not is_entry(tree / entry.path, entry))
        if is_complete and not bad:
            return False
        logger.error(
            "the local copy %s is corrupt, it is fetched again: %s",
            tree.name[:12],
            ", ".join(entry.path for entry in bad) or "files are missing",
        )
        with self._quota.locked():
            self._quota.discard(tree.name, tuple(entry.sha256 for entry in bad))
        return True

    @contextmanager
    def _quarantining(self, digest: str) -> Iterator[None]:
        """Holds the digest's fetch lock. Bad files put the digest into quarantine; failures of the
        network or the disk do not."""
        if self._quarantine is not None:
            self._quarantine.check(digest)  # before waiting for the lock
        with self._locks.held(fetch_lock(digest), EXCLUSIVE):
            if self._quarantine is not None:
                self._quarantine.check(digest)
            try:
                yield
            except ArtifactError as error:
                if self._quarantine is not None:
                    self._quarantine.add(digest, str(error))
                raise

    def _note(self, name: str) -> Path:
        return self.root / "notes" / name

    def _count(self, name: str, by: int = 1) -> None:
        with self._mutex:
            self._counts[name] += by


def _make_folders(root: Path) -> None:
    for name in ("blobs", "trees", "notes", "manifests", "locks", "tmp"):
        (root / name).mkdir(parents=True, exist_ok=True)


def select(manifest: Manifest, files: tuple[str, ...] | None) -> Manifest:
    if files is None:
        return manifest
    return tuple(e for e in manifest if any(fnmatchcase(e.path, pattern) for pattern in files))


def _check_digest(manifest: Manifest, digest: str) -> None:
    if (found := content_digest(manifest)) != digest:
        raise DigestMismatchError(f"the manifest has digest {found}, registered is {digest}")


def _tree_name(digest: str, manifest: Manifest, wanted: Manifest) -> str:
    if len(wanted) == len(manifest):
        return digest
    return f"{digest}-{content_digest(wanted)[:16]}"

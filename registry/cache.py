"""Verified local copies: `blobs/<sha256>`, and `trees/<key>/`, folders of hardlinks to them.

A tree appears whole, by one rename, or not at all; all processes of a node fetch a digest once, the
others wait and find it. A tree that was handed out is held, by a lock that dies with the process,
until it is released: what is held is never evicted. Bytes are hashed when they arrive; afterwards a
tree is trusted while the sizes and times of its files stay, and hashed again when they do not, or
on `verify`. Ignorant of where files come from: the caller hands in `fetch(entry, target)`.
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

from registry.building import Build, Fetch, Link, Order
from registry.entities import Manifest, content_digest
from registry.errors import ArtifactError, CacheFullError, DigestMismatchError
from registry.files import bad_entries, disk_errors, is_untouched, write_note
from registry.locks import EXCLUSIVE, SHARED, Locks
from registry.manifest import parse_manifest
from registry.quarantine import Quarantine
from registry.space import Space, fetch_lock

logger = logging.getLogger(__name__)

# What a process without a device needs of a model: configuration, tokenizer, templates.
TEXT_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Bytes are the folder's, for all processes of the node; the rest is this process's own."""

    own_bytes: int  # without those that the store has by hardlink too
    max_bytes: int | None
    hits: int
    misses: int
    evictions: int
    fetches_in_flight: int
    num_quarantined: int


class Cache:
    """Threads may share one. `max_bytes`: for all trees together, None for what the disk holds."""

    def __init__(
        self,
        root: Path,
        *,
        max_bytes: int | None = None,
        quarantine: Quarantine | None = None,
        leaves_room: bool = False,
    ) -> None:
        """`leaves_room`: without `max_bytes` the limit is a share of the disk, as it is now."""
        self.root = root
        for name in ("blobs", "trees", "notes", "manifests", "locks", "tmp"):
            (root / name).mkdir(parents=True, exist_ok=True)
        self._locks = Locks(root / "locks")
        self._space = Space(root, self._locks, max_bytes)
        if max_bytes is None and leaves_room:
            self._space.limit_to_disk()
        self._quarantine = quarantine
        self._held: dict[str, tuple[int, int]] = {}  # tree -> descriptor of its lock, holders
        self._counts: Counter[str] = Counter()
        self._mutex = threading.Lock()
        with self._space.locked():
            try:
                self._space.make_room(0)  # the limit may be a new one
            except CacheFullError as error:
                logger.warning("the cache is larger than its limit: %s", error)

    def tree(
        self,
        digest: str,
        manifest: Manifest,
        fetch: Fetch,
        files: tuple[str, ...] | None = None,
        link: Link | None = None,
    ) -> Path:
        """The folder of a digest's files, or of those that match `files` (shell patterns). Held
        until `release`, or the end of this process."""
        if content_digest(manifest) != digest:
            raise DigestMismatchError(
                f"the manifest has digest {content_digest(manifest)}, registered is {digest}"
            )
        wanted = select(manifest, files)
        order = Order(_tree_name(digest, manifest, wanted), digest, manifest, wanted, fetch, link)
        path = self.root / "trees" / order.name
        with disk_errors():
            self._hold(order.name)
            try:
                if is_untouched(self._note(order.name), path, wanted):
                    self._count("hits")
                else:
                    self._find_or_build(path, order)
            except BaseException:
                self.release(path)
                raise
        return path

    def release(self, path: Path) -> None:
        """Gives back what `tree` handed out, once for each time."""
        with self._mutex:
            descriptor, holders = self._held[path.name]
            if holders > 1:
                self._held[path.name] = (descriptor, holders - 1)
            else:
                del self._held[path.name]
                os.close(descriptor)

    def manifest(self, digest: str) -> Manifest | None:
        """The manifest of a digest that was fetched before: with it no network is needed."""
        try:
            text = (self.root / "manifests" / f"{digest}.json").read_text(errors="replace")
            manifest = parse_manifest(text)
        except (FileNotFoundError, ArtifactError):
            return None
        return manifest if content_digest(manifest) == digest else None

    def find_manifest(self, digest: str, read: Callable[[], Manifest]) -> Manifest:
        """The known one, or what `read` brings; by one process at a time, and not while the digest
        is in quarantine."""
        manifest = self.manifest(digest)
        if manifest is not None:
            return manifest
        with disk_errors(), self._judging(digest):
            manifest = read()
            if content_digest(manifest) != digest:
                raise DigestMismatchError(
                    f"the manifest has digest {content_digest(manifest)}, registered is {digest}"
                )
        return manifest

    def verify(self, digest: str) -> bool:
        """Reads every byte of a digest's trees. False: something was rotten and is thrown away; to
        be fetched again."""
        manifest = self.manifest(digest)
        if manifest is None:
            return True  # there is nothing
        with self._locks.held(fetch_lock(digest), EXCLUSIVE):
            trees = [p for p in (self.root / "trees").iterdir() if _digest_of(p.name) == digest]
            rotten = [tree for tree in trees if self._discard_if_rotten(tree, manifest)]
        return not rotten

    def digests(self) -> frozenset[str]:
        return frozenset(_digest_of(path.name) for path in (self.root / "trees").iterdir())

    def size_bytes(self) -> int:
        """Of all blobs, each counted once however many trees hold it."""
        return sum(entry.stat().st_size for entry in os.scandir(self.root / "blobs"))

    def remove(self, digest: str) -> int:
        """Gives back all that this process holds of a digest, and forgets what no other uses;
        returns the bytes freed."""
        with self._mutex:
            for name in [name for name in self._held if _digest_of(name) == digest]:
                os.close(self._held.pop(name)[0])
        with self._space.locked():
            return self._space.remove(digest)

    def stats(self) -> CacheStats:
        """Walks the folder: for a thread."""
        quarantined = 0 if self._quarantine is None else len(self._quarantine.verdicts())
        own_bytes = self._space.own_bytes()
        with self._mutex:
            return CacheStats(
                own_bytes,
                self._space.max_bytes,
                self._counts["hits"],
                self._counts["misses"],
                self._space.num_evictions,
                self._counts["fetches"],
                quarantined,
            )

    def _hold(self, name: str) -> None:
        """Its lock file's time is the time of last use."""
        with self._mutex:
            descriptor, holders = self._held.get(name, (None, 0))
            if descriptor is None:  # waits for an eviction at most: milliseconds
                descriptor = self._locks.acquire(name, SHARED)
                assert descriptor is not None
            self._held[name] = (descriptor, holders + 1)
            self._locks.touch(descriptor)

    def _find_or_build(self, path: Path, order: Order) -> None:
        with self._judging(order.digest):
            note = self._note(order.name)
            if is_untouched(note, path, order.wanted):  # another was quicker
                self._count("hits")
                return
            if path.is_dir() and not self._discard_if_rotten(path, order.manifest):
                write_note(note, path, order.wanted)
                self._count("hits")
                return
            self._count("misses")
            self._count("fetches")
            try:
                Build(self.root, self._space, order).run()
            finally:
                self._count("fetches", -1)
            if self._quarantine is not None:
                self._quarantine.forgive(order.digest)

    def _discard_if_rotten(self, tree: Path, manifest: Manifest) -> bool:
        """Under the digest's lock."""
        present = tuple(entry for entry in manifest if os.path.lexists(tree / entry.path))
        is_complete = _tree_name(_digest_of(tree.name), manifest, present) == tree.name
        bad = bad_entries(tree, present)
        if is_complete and not bad:
            return False
        logger.error(
            "the local copy %s is rotten, it is fetched again: %s",
            tree.name[:12],
            ", ".join(entry.path for entry in bad) or "files are missing",
        )
        with self._space.locked():
            self._space.discard(tree.name, tuple(entry.sha256 for entry in bad))
        return True

    @contextmanager
    def _judging(self, digest: str) -> Iterator[None]:
        """One process at a time. Bad files put the digest into quarantine; a network or a disk
        that fails says nothing about it."""
        if self._quarantine is not None:
            self._quarantine.check(digest)  # before any waiting
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


def select(manifest: Manifest, files: tuple[str, ...] | None) -> Manifest:
    if files is None:
        return manifest
    return tuple(e for e in manifest if any(fnmatchcase(e.path, pattern) for pattern in files))


def _tree_name(digest: str, manifest: Manifest, wanted: Manifest) -> str:
    if len(wanted) == len(manifest):
        return digest
    return f"{digest}-{content_digest(wanted)[:16]}"


def _digest_of(tree: str) -> str:
    return tree.partition("-")[0]

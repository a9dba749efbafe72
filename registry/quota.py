"""The disk quota of the cache's folder, and the eviction of the least recently used trees. A tree
whose lock is held is never evicted.

Every change of names below `blobs` and `trees` happens under the space lock, so that a count is
exact while the lock is held. Bytes that a file outside shares by hardlink cost and free no space.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from registry.errors import CacheFullError
from registry.locks import EXCLUSIVE, NO_WAIT, Locks

logger = logging.getLogger(__name__)

DISK_SHARE = 0.8  # the rest is for other files of the disk
_EVICTED = "evicted-"  # in tmp; all other names there are digests that are being fetched


@dataclass(slots=True)
class _Usage:
    blobs: dict[int, os.DirEntry[str]]  # by inode
    names: Counter[int]  # number of hardlinks in trees, also in trees being built, by inode
    trees: dict[str, list[int]]

    def own_bytes(self, inode: int) -> int:
        status = self.blobs[inode].stat()
        return status.st_size if status.st_nlink == 1 + self.names[inode] else 0

    def total(self) -> int:
        return sum(self.own_bytes(inode) for inode in self.blobs)


class Quota:
    def __init__(self, root: Path, locks: Locks, max_bytes: int | None) -> None:
        self.max_bytes = max_bytes
        self.num_evictions = 0  # by this process
        self._root = root
        self._locks = locks

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the space lock. For short steps: never while bytes are copied or hashed."""
        with self._locks.held("space", EXCLUSIVE):
            yield

    def own_bytes(self) -> int:
        """Returns the bytes that would be free without the cache; without the lock it may be
        slightly too low."""
        return self._usage().total()

    def limit_to_disk(self) -> None:
        """Sets `max_bytes` to DISK_SHARE of the bytes that the cache can have now: the free bytes
        of its disk and its own bytes."""
        self.max_bytes = int(DISK_SHARE * (self._free_bytes() + self.own_bytes()))

    def make_room(self, wanted: int) -> None:
        """Evicts unused trees until `wanted` bytes fit; the caller holds the lock. Raises
        CacheFullError, and evicts none, if they do not fit even without all unused trees."""
        self.clean_leftovers()
        usage = self._usage()
        reserved = self._reserved()
        held = usage.total()
        over_limit = 0 if self.max_bytes is None else held + reserved + wanted - self.max_bytes
        # Conservative: some of the reserved bytes are on the disk already.
        over_disk = wanted + reserved - self._free_bytes()
        short = max(over_limit, over_disk)
        # Reserved bytes may be on the disk already, so they are no reason to refuse.
        needed = max(over_limit, over_disk - reserved)
        if needed > 0 and (unused := self._unused_bytes(usage, needed)) < needed:
            if over_limit <= unused:
                raise CacheFullError(
                    f"{wanted} bytes are wanted; {self._free_bytes()} are free on the cache's disk "
                    f"and {unused} could be freed"
                )
            raise CacheFullError(
                f"{wanted} bytes are wanted; the cache may hold {self.max_bytes}, {held - unused} "
                f"are in use and {reserved} are being fetched (registry.cache_bytes)"
            )
        self._drop_unused(usage, short)

    def remove(self, digest: str) -> int:
        """Removes the unused trees of a digest; the caller holds the lock. Returns the bytes
        freed."""
        usage = self._usage()
        freed = 0
        for tree in [tree for tree in usage.trees if digest_of(tree) == digest]:
            if self._remove_tree(tree):
                freed += self._drop_blobs(usage, tree)
        return freed

    def discard(self, tree: str, blobs: tuple[str, ...]) -> None:
        """Removes a corrupt tree and its corrupt blobs; the caller holds the lock. A reader keeps
        the files that it has open."""
        self._hide(tree)
        for name in blobs:
            (self._root / "blobs" / name).unlink(missing_ok=True)

    def clean_leftovers(self) -> None:
        """Removes the leftovers of killed processes; the caller holds the lock."""
        for path in (self._root / "tmp").iterdir():
            if path.name.startswith(_EVICTED):
                shutil.rmtree(path, ignore_errors=True)
                continue
            lock = fetch_lock(path.name)
            with self._locks.held(lock, EXCLUSIVE | NO_WAIT) as is_left:
                if is_left:
                    shutil.rmtree(path, ignore_errors=True)
                    self._locks.remove(lock)

    def _unused_bytes(self, usage: _Usage, enough: int) -> int:
        """Returns the bytes that `_drop_unused` would free now; counts no further than `enough`."""
        names = usage.names.copy()
        found = sum(usage.own_bytes(inode) for inode in usage.blobs if not names[inode])
        for tree in sorted(usage.trees, key=self._locks.used_ns):
            if found >= enough:
                break
            with self._locks.held(tree, EXCLUSIVE | NO_WAIT) as is_unused:
                if not is_unused:
                    continue
            for inode in usage.trees[tree]:
                names[inode] -= 1
                if not names[inode] and inode in usage.blobs:
                    found += usage.own_bytes(inode)
        return found

    def _drop_unused(self, usage: _Usage, short: int) -> None:
        freed = 0
        if short > 0:  # blobs without a tree: a fetch of several files ended after some of them
            orphans = [inode for inode in usage.blobs if not usage.names[inode]]
            freed = sum(self._drop_blob(usage, inode) for inode in orphans)
        for tree in sorted(usage.trees, key=self._locks.used_ns):
            if freed >= short:
                break
            if self._remove_tree(tree):
                self.num_evictions += 1
                freed += self._drop_blobs(usage, tree)
                logger.info("evicted %s from the cache", tree[:12])

    def _drop_blobs(self, usage: _Usage, tree: str) -> int:
        """Removes the blobs that only the removed tree had."""
        freed = 0
        for inode in usage.trees.pop(tree):
            usage.names[inode] -= 1
            if not usage.names[inode] and inode in usage.blobs:
                freed += self._drop_blob(usage, inode)
        return freed

    def _drop_blob(self, usage: _Usage, inode: int) -> int:
        entry = usage.blobs.pop(inode)
        status = os.stat(entry.path)
        os.unlink(entry.path)
        return status.st_size if status.st_nlink == 1 else 0

    def _remove_tree(self, tree: str) -> bool:
        """Returns False if the tree is in use, which keeps it."""
        with self._locks.held(tree, EXCLUSIVE | NO_WAIT) as is_unused:
            if is_unused:
                self._hide(tree)
                self._locks.remove(tree)
        if is_unused:
            self._forget(digest_of(tree))
        return is_unused

    def _hide(self, tree: str) -> None:
        """Removes a tree by one rename before its files are deleted: no reader sees half of it."""
        doomed = self._root / "tmp" / f"{_EVICTED}{tree}"
        shutil.rmtree(doomed, ignore_errors=True)
        with suppress(FileNotFoundError):
            (self._root / "trees" / tree).rename(doomed)
        (self._root / "notes" / tree).unlink(missing_ok=True)
        shutil.rmtree(doomed, ignore_errors=True)

    def _forget(self, digest: str) -> None:
        """Removes a digest's manifest after its last tree, unless the digest is being fetched."""
        if digest in map(digest_of, os.listdir(self._root / "trees")):
            return
        name = fetch_lock(digest)
        with self._locks.held(name, EXCLUSIVE | NO_WAIT) as is_idle:
            if is_idle:
                (self._root / "manifests" / f"{digest}.json").unlink(missing_ok=True)
                self._locks.remove(name)

    def _usage(self) -> _Usage:
        # Trees first: without the lock, a tree that moves from tmp to trees is missed, but
        # harmless.
        trees = {e.name: list(_inodes(e.path)) for e in os.scandir(self._root / "trees")}
        names = Counter(inode for inodes in trees.values() for inode in inodes)
        for scratch in (self._root / "tmp").iterdir():
            names.update(_inodes(scratch / "tree"))
        blobs: dict[int, os.DirEntry[str]] = {}
        for entry in os.scandir(self._root / "blobs"):
            with suppress(FileNotFoundError):
                blobs[entry.stat().st_ino] = entry
        return _Usage(blobs, names, trees)

    def _reserved(self) -> int:
        """Returns the bytes that live fetches still need; dead fetches were cleaned up before."""
        total = 0
        for scratch in (self._root / "tmp").iterdir():
            with suppress(FileNotFoundError, NotADirectoryError, ValueError):
                total += int((scratch / "reserved").read_text())
        return total

    def _free_bytes(self) -> int:
        status = os.statvfs(self._root)
        return status.f_bavail * status.f_frsize


def digest_of(tree: str) -> str:
    return tree.partition("-")[0]


def fetch_lock(digest: str) -> str:
    return f"{digest}.fetch"


def _inodes(root: Path | str) -> Iterator[int]:
    """Yields the inode of each file below `root`; none if the folder has just been removed."""
    with suppress(FileNotFoundError, NotADirectoryError):
        for entry in os.scandir(root):
            if entry.is_dir(follow_symlinks=False):
                yield from _inodes(entry.path)
            else:
                yield entry.stat(follow_symlinks=False).st_ino

"""Verified local copies: `blobs/<sha256>`, and `trees/<key>/`, folders of hardlinks to them.

A tree appears whole, by one rename, or not at all. Two processes that want the same digest fetch it
once; what a killed process left is removed by the next one that holds the digest's lock, or that
opens the cache. Ignorant of where files come from: the caller hands in `fetch(entry, target)`.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

from registry.entities import FileEntry, Manifest, content_digest, manifest_json
from registry.errors import CacheFullError, DigestMismatchError
from registry.manifest import check_entry, hash_file, parse_manifest

logger = logging.getLogger(__name__)

Fetch = Callable[[FileEntry, Path], None]
# What a process without a device needs of a model: configuration, tokenizer, templates.
TEXT_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")


class Cache:
    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("blobs", "trees", "manifests", "locks", "tmp"):
            (root / name).mkdir(parents=True, exist_ok=True)
        self._clean_leftovers()

    def tree(
        self, digest: str, manifest: Manifest, fetch: Fetch, files: tuple[str, ...] | None = None
    ) -> Path:
        """The folder of a digest's files, or of those that match `files` (shell patterns)."""
        if content_digest(manifest) != digest:
            raise DigestMismatchError(
                f"the manifest has digest {content_digest(manifest)}, registered is {digest}"
            )
        wanted = select(manifest, files)
        path = self._tree_path(digest, manifest, wanted)
        if path.is_dir():
            return path
        with self._lock("all", fcntl.LOCK_SH), self._lock(digest, fcntl.LOCK_EX), disk_errors():
            if not path.is_dir():
                self._build(path, digest, manifest, wanted, fetch)
        return path

    def manifest(self, digest: str) -> Manifest | None:
        """The manifest of a digest that was fetched before: with it no network is needed."""
        path = self.root / "manifests" / f"{digest}.json"
        if not path.is_file():
            return None
        manifest = parse_manifest(path.read_text())
        return manifest if content_digest(manifest) == digest else None

    def digests(self) -> frozenset[str]:
        return frozenset(path.name.partition("-")[0] for path in (self.root / "trees").iterdir())

    def size_bytes(self) -> int:
        """Of all blobs, each counted once however many trees hold it."""
        return sum(entry.stat().st_size for entry in os.scandir(self.root / "blobs"))

    def remove(self, digest: str) -> int:
        """Forgets a digest and the blobs that no other tree uses; returns the bytes freed."""
        with self._lock("all", fcntl.LOCK_EX):
            for path in (self.root / "trees").iterdir():
                if path.name.partition("-")[0] == digest:
                    shutil.rmtree(path)
            (self.root / "manifests" / f"{digest}.json").unlink(missing_ok=True)
            used: set[int] = set()
            for tree in (self.root / "trees").iterdir():
                used |= {path.stat().st_ino for path in tree.rglob("*") if path.is_file()}
            unused = [
                Path(entry.path)
                for entry in os.scandir(self.root / "blobs")
                if entry.inode() not in used
            ]
            freed = sum(path.stat().st_size for path in unused)
            for path in unused:
                path.unlink()
        return freed

    def _tree_path(self, digest: str, manifest: Manifest, wanted: Manifest) -> Path:
        if len(wanted) == len(manifest):
            return self.root / "trees" / digest
        return self.root / "trees" / f"{digest}-{content_digest(wanted)[:16]}"

    def _build(
        self, path: Path, digest: str, manifest: Manifest, wanted: Manifest, fetch: Fetch
    ) -> None:
        scratch = self.root / "tmp" / digest  # ours alone: we hold the digest's lock
        shutil.rmtree(scratch, ignore_errors=True)
        tree = scratch / "tree"
        tree.mkdir(parents=True)
        try:
            for entry in wanted:
                check_entry(entry)
                blob = self._blob(entry, scratch / "blob", fetch)
                target = tree / entry.path
                target.parent.mkdir(parents=True, exist_ok=True)
                os.link(blob, target)
            _sync_folder(tree)
            note = scratch / "manifest"
            note.write_text(manifest_json(manifest))
            _sync_file(note)
            note.rename(self.root / "manifests" / f"{digest}.json")
            tree.rename(path)
            _sync_folder(path.parent)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _blob(self, entry: FileEntry, scratch: Path, fetch: Fetch) -> Path:
        blob = self.root / "blobs" / entry.sha256
        if blob.is_file() and blob.stat().st_size == entry.size:
            return blob
        scratch.unlink(missing_ok=True)
        fetch(entry, scratch)
        size, digest = hash_file(scratch)
        if (size, digest) != (entry.size, entry.sha256):
            scratch.unlink()
            raise DigestMismatchError(
                f"{entry.path}: got {size} bytes with sha256 {digest}, "
                f"registered are {entry.size} bytes with {entry.sha256}"
            )
        _sync_file(scratch)
        scratch.rename(blob)
        _sync_folder(blob.parent)
        return blob

    def _clean_leftovers(self) -> None:
        for path in (self.root / "tmp").iterdir():
            with self._lock(path.name, fcntl.LOCK_EX | fcntl.LOCK_NB) as held:
                if held:
                    shutil.rmtree(path, ignore_errors=True)

    @contextmanager
    def _lock(self, name: str, how: int) -> Iterator[bool]:
        """Held as long as the block runs; the kernel frees it when the process dies."""
        descriptor = os.open(self.root / "locks" / name, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(descriptor, how)
            except BlockingIOError:
                yield False
                return
            yield True
        finally:
            os.close(descriptor)


def select(manifest: Manifest, files: tuple[str, ...] | None) -> Manifest:
    if files is None:
        return manifest
    return tuple(e for e in manifest if any(fnmatchcase(e.path, pattern) for pattern in files))


@contextmanager
def disk_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CacheFullError(f"no space left for a local copy: {error}") from error
        raise


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

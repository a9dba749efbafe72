"""Steps on local files: make them durable, compare them with a manifest, map a full disk to an
error.

A tree's note has the time of each file when its bytes were last hashed. It is only a hint: without
a note, or when it does not match, the bytes are hashed again.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from registry.entities import FileEntry, Manifest
from registry.errors import CacheFailedError, CacheFullError
from registry.manifest import hash_file

# EFBIG: larger than the file system or the process's limit allows.
NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@contextmanager
def disk_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in NO_SPACE:
            raise CacheFullError(f"no space left for a local copy: {error}") from error
        raise CacheFailedError(f"the disk of the local copies fails: {error}") from error


def sync(path: Path) -> None:
    """Makes a file's bytes, or a folder's names, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(root: Path) -> None:
    """Syncs the folders; the files were synced before they were linked into the tree."""
    for folder, _, _ in os.walk(root, topdown=False):
        sync(Path(folder))


def write_note(note: Path, tree: Path, wanted: Manifest) -> None:
    times = {entry.path: (tree / entry.path).lstat().st_mtime_ns for entry in wanted}
    fresh = note.with_name(f"{note.name}.new")
    fresh.write_text(json.dumps(times))  # not synced: losing it costs one hashing
    fresh.rename(note)


def is_untouched(note: Path, tree: Path, wanted: Manifest) -> bool:
    """Compares each file's size and time with the manifest and the note, and reads none of its
    bytes."""
    try:
        times = json.loads(note.read_bytes())
        return isinstance(times, dict) and all(
            _is_untouched(tree / entry.path, entry, times) for entry in wanted
        )
    except (OSError, ValueError, RecursionError):
        return False


def is_entry(path: Path, entry: FileEntry) -> bool:
    """Reads every byte. Returns False if the file is missing or differs from the entry."""
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_size != entry.size:
            return False
        return hash_file(path) == (entry.size, entry.sha256)
    except OSError:  # also the error of a failing disk
        return False


def _is_untouched(path: Path, entry: FileEntry, times: dict[str, object]) -> bool:
    status = path.lstat()
    is_file = stat.S_ISREG(status.st_mode)
    return is_file and (status.st_size, status.st_mtime_ns) == (entry.size, times.get(entry.path))

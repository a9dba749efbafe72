"""The manifest of a folder: its served files with their sizes and digests.

Only data is served (weights as safetensors, configuration, tokenizer, templates); pickles, code and
subfolders are left out and never opened. Independent of MLflow and of the tensors' meaning.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
from collections.abc import Callable, Collection
from pathlib import Path, PurePosixPath

from registry.entities import FileEntry, Manifest
from registry.errors import ArtifactError, DigestMismatchError, RegistrationError

logger = logging.getLogger(__name__)

SERVED_SUFFIXES = frozenset({".safetensors", ".json", ".jinja", ".model", ".txt", ".tiktoken"})
# Files that are added to a model's own files when it is registered.
BOOKKEEPING = frozenset({"loraplex.json", "requirements.txt"})
MAX_LISTED = 10_000  # names in one folder of a version
MAX_FILES = 512
MAX_CONFIG_BYTES = 1024 * 1024
MAX_TEXT_BYTES = 256 * 1024**2  # of any file that is not weights; tokenizers have tens of MB
MAX_ADAPTER_BYTES = 4 * 1024**3  # of one version
MAX_BASE_BYTES = 2 * 1024**4
_MAX_PATH_CHARS = 512
_MAX_NAME_BYTES = 200  # file systems allow 255; the cache adds a suffix
CHUNK_BYTES = 4 * 1024 * 1024

Progress = Callable[[str, int, int], None]  # stage, bytes done, total bytes


def no_progress(stage: str, done_bytes: int, total_bytes: int) -> None:
    pass


def is_served(name: str) -> bool:
    hidden = name.startswith(".")
    return PurePosixPath(name).suffix in SERVED_SUFFIXES and not hidden and name not in BOOKKEEPING


def scan_folder(
    folder: Path, required: str, max_bytes: int, progress: Progress = no_progress
) -> Manifest:
    """Returns an entry for each served file at the top of the folder. `required`: the file that
    makes it a model.

    Files that could not be fetched again later are refused here, before a byte is read."""
    if not folder.is_dir():
        raise RegistrationError(f"{folder} is not a folder")
    names = _list_files(folder)
    served = served_names(names, required, str(folder))
    for name in served:
        _check_regular(folder / name, folder)
    if ignored := [name for name in names if not is_served(name)]:
        logger.info("left out of %s: %s", folder, _some(ignored))
    found = tuple(FileEntry(name, (folder / name).stat().st_size, "") for name in served)
    try:
        check_sizes(found, max_bytes, str(folder))
    except ArtifactError as error:
        raise RegistrationError(str(error)) from error
    return _hash_all(folder, found, progress)


def served_names(names: Collection[str], required: str, where: str) -> list[str]:
    """Returns the names of the served files. Raises RegistrationError if they make no model."""
    served = sorted(name for name in names if is_served(name))
    ignored = sorted(name for name in names if not is_served(name))
    if len(served) > MAX_FILES:
        raise RegistrationError(f"{where} has {len(served)} files, at most {MAX_FILES} are allowed")
    if required not in served:
        raise RegistrationError(f"{where} has no {required}")
    if not any(name.endswith(".safetensors") for name in served):
        others = f"; {_some(ignored)} cannot be used" if ignored else ""
        raise RegistrationError(f"{where} has no weights in the safetensors format{others}")
    if strange := [name for name in served if not is_plain_path(name)]:
        raise RegistrationError(f"a file in {where} has an illegal name: {strange[0][:600]!r}")
    return served


def hash_file(path: Path, max_bytes: int | None = None) -> tuple[int, str]:
    """Returns size and sha256. Reads at most a chunk beyond `max_bytes`, as another process may
    write to the file meanwhile."""
    digest = hashlib.sha256()
    size = 0
    with path.open("rb") as file:
        while (max_bytes is None or size <= max_bytes) and (chunk := file.read(CHUNK_BYTES)):
            digest.update(chunk)
            size += len(chunk)
    return size, digest.hexdigest()


def parse_manifest(text: str) -> Manifest:
    """Parses the text of `manifest_json`, which is not trusted."""
    try:
        rows = json.loads(text)
        if len(rows) > MAX_FILES:
            raise ArtifactError(f"the manifest names {len(rows)} files, at most {MAX_FILES}")
        manifest = tuple(FileEntry(str(path), int(size), str(sha)) for path, size, sha in rows)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise DigestMismatchError(f"the manifest cannot be read: {error}") from error
    for entry in manifest:
        check_entry(entry)
    _check_distinct(manifest)
    return manifest


def check_entry(entry: FileEntry) -> None:
    """Raises DigestMismatchError for an illegal entry: files are written to a manifest's paths, so
    no path may leave its folder."""
    legal_hash = len(entry.sha256) == 64 and set(entry.sha256) <= set("0123456789abcdef")
    if not is_plain_path(entry.path):
        raise DigestMismatchError(f"the manifest names an illegal path: {entry.path[:600]!r}")
    if not legal_hash or entry.size < 0:
        raise DigestMismatchError(f"the manifest has an illegal size or sha256 for {entry.path!r}")


def is_plain_path(path: str) -> bool:
    """Returns whether a path is relative, has no `.` or `..`, and is safe in a shell and in a
    log."""
    parts = path.split("/")
    return (
        len(path) <= _MAX_PATH_CHARS
        and path.isprintable()  # no NUL, no line feed, no lone surrogate
        and "\\" not in path
        and all(part not in ("", ".", "..") for part in parts)
        and all(len(part.encode()) <= _MAX_NAME_BYTES for part in parts)
    )


def check_sizes(manifest: Manifest, max_bytes: int, owner: str) -> None:
    """Raises ArtifactError if a file or all together are too large. Called before any download,
    which is limited to the manifest's sizes."""
    for entry in manifest:
        is_weights = entry.path.endswith(".safetensors")
        limit = max_bytes if is_weights else min(max_bytes, MAX_TEXT_BYTES)
        if entry.size > limit:
            raise ArtifactError(
                f"{owner}: {entry.path} has {entry.size} bytes, at most {limit} are allowed"
            )
    total = sum(entry.size for entry in manifest)
    if total > max_bytes:
        raise ArtifactError(f"{owner}: {total} bytes in all, at most {max_bytes} are allowed")


def _list_files(folder: Path) -> list[str]:
    """Returns the names of all entries but folders. Raises RegistrationError at MAX_LISTED
    names."""
    names: list[str] = []
    with os.scandir(folder) as entries:
        for count, entry in enumerate(entries, 1):
            if count > MAX_LISTED:
                raise RegistrationError(f"{folder} holds more than {MAX_LISTED} names")
            if not entry.is_dir(follow_symlinks=False):
                names.append(entry.name)
    return sorted(names)


def _hash_all(folder: Path, found: Manifest, progress: Progress) -> Manifest:
    total = sum(entry.size for entry in found)
    entries: list[FileEntry] = []
    done = 0
    for entry in found:
        size, digest = hash_file(folder / entry.path, entry.size)
        if size != entry.size:
            raise RegistrationError(f"{entry.path} in {folder} changed while it was read")
        entries.append(FileEntry(entry.path, size, digest))
        done += size
        progress("hash", done, total)
    return tuple(entries)


def _some(names: list[str]) -> str:
    """Returns the first names, escaped for logs and terminals."""
    shown = [name if is_plain_path(name) else ascii(name) for name in names[:8]]
    return ", ".join(shown) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _check_distinct(manifest: Manifest) -> None:
    paths = {entry.path for entry in manifest}
    if len(paths) != len(manifest):
        raise DigestMismatchError("the manifest names a file twice")
    folders = {str(parent) for path in paths for parent in PurePosixPath(path).parents}
    if both := sorted(paths & folders):
        raise DigestMismatchError(f"the manifest has {both[0]!r} as a file and as a folder")


def _check_regular(path: Path, folder: Path) -> None:
    target = path.resolve()
    roots = [folder.resolve()]
    if folder.resolve().parent.name == "snapshots":  # Hugging Face's cache links to its blobs
        roots.append(folder.resolve().parent.parent / "blobs")
    if not any(target.is_relative_to(root) for root in roots):
        raise RegistrationError(f"{path.name} is a symlink that leaves {folder}; copy the file")
    if not target.exists() or not stat.S_ISREG(target.stat().st_mode):
        raise RegistrationError(f"{path.name} in {folder} is not a regular file")

"""A folder becomes a manifest: which files are served, and the digest of each.

Only data is taken (weights as safetensors, configuration, tokenizer, templates); pickles, code and
subfolders are left out and never opened. Ignorant of MLflow and of what the tensors mean.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from registry.entities import FileEntry, Manifest
from registry.errors import ArtifactError, DigestMismatchError, RegistrationError

logger = logging.getLogger(__name__)

SERVED_SUFFIXES = frozenset({".safetensors", ".json", ".jinja", ".model", ".txt", ".tiktoken"})
# MLflow puts these beside the files of a model.
BOOKKEEPING = frozenset({"loraplex.json", "requirements.txt"})
MAX_LISTED = 10_000  # names in one folder of a version
MAX_FILES = 512
MAX_CONFIG_BYTES = 1024 * 1024
MAX_TEXT_BYTES = 256 * 1024**2  # of any file that is not weights; tokenizers have tens of MB
MAX_ADAPTER_BYTES = 4 * 1024**3  # of one version
MAX_BASE_BYTES = 2 * 1024**4
_MAX_PATH_CHARS = 512
_MAX_NAME_BYTES = 200  # file systems allow 255; the cache adds to it
CHUNK_BYTES = 4 * 1024 * 1024

Progress = Callable[[str, int, int], None]  # what is going on, bytes done, bytes in all


def no_progress(stage: str, done_bytes: int, total_bytes: int) -> None:
    pass


def is_served(name: str) -> bool:
    hidden = name.startswith(".")
    return PurePosixPath(name).suffix in SERVED_SUFFIXES and not hidden and name not in BOOKKEEPING


def scan_folder(
    folder: Path, required: str, max_bytes: int, progress: Progress = no_progress
) -> Manifest:
    """Every served file at the top of the folder. `required` is the file that makes it a model.

    What could not be fetched again later is refused here, before a byte is read."""
    if not folder.is_dir():
        raise RegistrationError(f"{folder} is not a folder")
    names = _list_files(folder)
    served = [name for name in names if is_served(name)]
    ignored = [name for name in names if not is_served(name)]
    check_contents(served, ignored, required, str(folder))
    if strange := [name for name in served if not is_plain_path(name)]:
        raise RegistrationError(f"a file in {folder} has an illegal name: {strange[0]!r}")
    for name in served:
        _check_regular(folder / name, folder)
    if ignored:
        logger.info("left out of %s: %s", folder, _some(ignored))
    found = tuple(FileEntry(name, (folder / name).stat().st_size, "") for name in served)
    try:
        check_sizes(found, max_bytes, str(folder))
    except ArtifactError as error:
        raise RegistrationError(str(error)) from error
    return _hash_all(folder, found, progress)


def check_contents(served: list[str], ignored: list[str], required: str, where: str) -> None:
    if len(served) > MAX_FILES:
        raise RegistrationError(f"{where} holds {len(served)} files, at most {MAX_FILES} are taken")
    if required not in served:
        raise RegistrationError(f"{where} has no {required}")
    if not any(name.endswith(".safetensors") for name in served):
        others = f"; {_some(ignored)} cannot be used" if ignored else ""
        raise RegistrationError(f"{where} has no weights in the safetensors format{others}")


def hash_file(path: Path, max_bytes: int | None = None) -> tuple[int, str]:
    """Of no more than a chunk beyond `max_bytes`: another may write while it is read."""
    digest = hashlib.sha256()
    size = 0
    with path.open("rb") as file:
        while (max_bytes is None or size <= max_bytes) and (chunk := file.read(CHUNK_BYTES)):
            digest.update(chunk)
            size += len(chunk)
    return size, digest.hexdigest()


def parse_manifest(text: str) -> Manifest:
    """The reverse of `manifest_json`, of text that may come from anywhere."""
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
    """A manifest decides where files are written: no path of it may leave its folder."""
    legal_hash = len(entry.sha256) == 64 and set(entry.sha256) <= set("0123456789abcdef")
    if not is_plain_path(entry.path):
        raise DigestMismatchError(f"the manifest names an illegal path: {entry.path[:600]!r}")
    if not legal_hash or entry.size < 0:
        raise DigestMismatchError(f"the manifest has an illegal size or sha256 for {entry.path!r}")


def is_plain_path(path: str) -> bool:
    """Relative, each part a name that is just that; nothing that a shell or a log could misread."""
    parts = path.split("/")
    return (
        len(path) <= _MAX_PATH_CHARS
        and path.isprintable()  # no NUL, no line feed, no lone surrogate
        and "\\" not in path
        and all(part not in ("", ".", "..") for part in parts)
        and all(len(part.encode()) <= _MAX_NAME_BYTES for part in parts)
    )


def check_sizes(manifest: Manifest, max_bytes: int, what: str) -> None:
    """Before anything is fetched: the manifest is a promise that the download is held to."""
    for entry in manifest:
        is_weights = entry.path.endswith(".safetensors")
        limit = max_bytes if is_weights else min(max_bytes, MAX_TEXT_BYTES)
        if entry.size > limit:
            raise ArtifactError(
                f"{what}: {entry.path} has {entry.size} bytes, at most {limit} are taken"
            )
    total = sum(entry.size for entry in manifest)
    if total > max_bytes:
        raise ArtifactError(f"{what}: {total} bytes in all, at most {max_bytes} are taken")


def _list_files(folder: Path) -> list[str]:
    """Whatever is no folder. The listing ends at the limit, not when the folder does."""
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
    """Of names that may be anything and any number: what a log and a terminal can show."""
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

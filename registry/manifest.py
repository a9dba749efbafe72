"""A folder becomes a manifest: which files are served, and the digest of each.

Only data is taken (weights as safetensors, configuration, tokenizer, templates); pickles, code and
subfolders are left out and never opened. Ignorant of MLflow and of what the tensors mean.
"""

from __future__ import annotations

import hashlib
import json
import logging
import stat
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from registry.entities import FileEntry, Manifest
from registry.errors import DigestMismatchError, RegistrationError

logger = logging.getLogger(__name__)

SERVED_SUFFIXES = frozenset({".safetensors", ".json", ".jinja", ".model", ".txt", ".tiktoken"})
# MLflow puts these beside the files of a model.
BOOKKEEPING = frozenset({"loraplex.json", "requirements.txt"})
MAX_FILES = 512
MAX_CONFIG_BYTES = 1024 * 1024
CHUNK_BYTES = 4 * 1024 * 1024

Progress = Callable[[str, int, int], None]  # what is going on, bytes done, bytes in all


def no_progress(stage: str, done_bytes: int, total_bytes: int) -> None:
    pass


def is_served(name: str) -> bool:
    hidden = name.startswith(".")
    return PurePosixPath(name).suffix in SERVED_SUFFIXES and not hidden and name not in BOOKKEEPING


def scan_folder(folder: Path, required: str, progress: Progress = no_progress) -> Manifest:
    """Every served file at the top of the folder. `required` is the file that makes it a model."""
    if not folder.is_dir():
        raise RegistrationError(f"{folder} is not a folder")
    paths = sorted(path for path in folder.iterdir() if not path.is_dir() or path.is_symlink())
    served = [path for path in paths if is_served(path.name)]
    ignored = [path.name for path in paths if path not in served]
    for path in served:
        _check_regular(path, folder)
    check_contents([path.name for path in served], ignored, required, str(folder))
    if ignored:
        logger.info("left out of %s: %s", folder, ", ".join(ignored))
    total = sum(path.stat().st_size for path in served)
    entries: list[FileEntry] = []
    done = 0
    for path in served:
        size, digest = hash_file(path)
        entries.append(FileEntry(path.name, size, digest))
        done += size
        progress("hash", done, total)
    return tuple(entries)


def check_contents(served: list[str], ignored: list[str], required: str, where: str) -> None:
    if len(served) > MAX_FILES:
        raise RegistrationError(f"{where} holds {len(served)} files, at most {MAX_FILES} are taken")
    if required not in served:
        raise RegistrationError(f"{where} has no {required}")
    if not any(name.endswith(".safetensors") for name in served):
        others = f"; {', '.join(ignored[:8])} cannot be used" if ignored else ""
        raise RegistrationError(f"{where} has no weights in the safetensors format{others}")


def hash_file(path: Path) -> tuple[int, str]:
    digest = hashlib.sha256()
    size = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return size, digest.hexdigest()


def parse_manifest(text: str) -> Manifest:
    """The reverse of `manifest_json`, of text that may come from anywhere."""
    try:
        rows = json.loads(text)
        manifest = tuple(FileEntry(str(path), int(size), str(sha)) for path, size, sha in rows)
    except (ValueError, TypeError) as error:
        raise DigestMismatchError(f"the manifest cannot be read: {error}") from error
    for entry in manifest:
        check_entry(entry)
    return manifest


def check_entry(entry: FileEntry) -> None:
    """A manifest decides where files are written: no path of it may leave its folder."""
    path = PurePosixPath(entry.path)
    plain = str(path) == entry.path and not path.is_absolute() and ".." not in path.parts
    legal_hash = len(entry.sha256) == 64 and set(entry.sha256) <= set("0123456789abcdef")
    if not plain or entry.path == "." or "\\" in entry.path or "\0" in entry.path:
        raise DigestMismatchError(f"the manifest names an illegal path: {entry.path!r}")
    if not legal_hash or entry.size < 0:
        raise DigestMismatchError(f"the manifest has an illegal size or sha256 for {entry.path!r}")


def _check_regular(path: Path, folder: Path) -> None:
    target = path.resolve()
    roots = [folder.resolve()]
    if folder.resolve().parent.name == "snapshots":  # Hugging Face's cache links to its blobs
        roots.append(folder.resolve().parent.parent / "blobs")
    if not any(target.is_relative_to(root) for root in roots):
        raise RegistrationError(f"{path.name} is a symlink that leaves {folder}; copy the file")
    if not target.exists() or not stat.S_ISREG(target.stat().st_mode):
        raise RegistrationError(f"{path.name} in {folder} is not a regular file")

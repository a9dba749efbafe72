"""One tree is built: what the cache has is linked, the rest comes from the far side and is hashed.

The builder holds the digest's fetch lock, so the scratch folder is its own; it appears as a tree by
one rename at the end. Ignorant of quarantine and of who waits.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from registry.entities import FileEntry, Manifest, manifest_json
from registry.errors import DigestMismatchError
from registry.files import is_entry, sync_file, sync_folder, sync_tree, write_note
from registry.manifest import check_entry, hash_file
from registry.space import Space

Fetch = Callable[[FileEntry, Path], None]
Link = Callable[[FileEntry, Path], bool]  # False: it cannot be linked, it must be fetched


@dataclass(frozen=True, slots=True)
class Order:
    name: str  # of the tree
    digest: str
    manifest: Manifest
    wanted: Manifest
    fetch: Fetch
    link: Link | None = None


class Build:
    def __init__(self, root: Path, space: Space, order: Order) -> None:
        self._root = root
        self._space = space
        self._order = order
        self._scratch = root / "tmp" / order.digest
        self._tree = self._scratch / "tree"
        self._missing: list[FileEntry] = []

    def run(self) -> None:
        for entry in self._order.wanted:
            check_entry(entry)
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._tree.mkdir(parents=True)
        try:
            self._take_what_is_there()
            for entry in tuple(self._missing):
                self._link(entry)
            with self._space.locked():
                self._space.make_room(sum(entry.size for entry in self._missing))
                self._reserve()
            for entry in tuple(self._missing):
                self._fetch(entry)
            self._publish()
        finally:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def _take_what_is_there(self) -> None:
        """Linked first, under the lock: then no eviction takes them. Hashed after."""
        found: list[FileEntry] = []
        with self._space.locked():
            for entry in self._order.wanted:
                try:
                    os.link(self._blob(entry), self._target(entry))
                    found.append(entry)
                except FileNotFoundError:
                    self._missing.append(entry)
        for entry in found:
            if not is_entry(self._target(entry), entry):
                with self._space.locked():
                    self._target(entry).unlink()
                    self._blob(entry).unlink(missing_ok=True)
                self._missing.append(entry)

    def _link(self, entry: FileEntry) -> None:
        """Costs no bytes, so it asks for no room."""
        arrived = self._scratch / "blob"
        if self._order.link is not None and self._order.link(entry, arrived):
            self._adopt(entry, arrived)

    def _fetch(self, entry: FileEntry) -> None:
        arrived = self._scratch / "blob"
        self._order.fetch(entry, arrived)
        self._adopt(entry, arrived)

    def _adopt(self, entry: FileEntry, arrived: Path) -> None:
        size, digest = hash_file(arrived)
        if (size, digest) != (entry.size, entry.sha256):
            raise DigestMismatchError(
                f"{entry.path}: got {size} bytes with sha256 {digest}, "
                f"registered are {entry.size} bytes with {entry.sha256}"
            )
        sync_file(arrived)
        blob = self._blob(entry)
        with self._space.locked():
            if not blob.exists():  # else another digest with the same file was quicker
                os.link(arrived, blob)
            os.link(blob, self._target(entry))
            arrived.unlink()
            self._missing.remove(entry)
            self._reserve()
        sync_folder(blob.parent)

    def _reserve(self) -> None:
        """Under the lock. Says how much is still to come, so that others leave that room."""
        wanted = sum(entry.size for entry in self._missing)
        (self._scratch / "reserved").write_text(str(wanted))

    def _publish(self) -> None:
        order = self._order
        sync_tree(self._tree)
        note = self._scratch / "manifest"
        note.write_text(manifest_json(order.manifest))
        sync_file(note)
        write_note(self._root / "notes" / order.name, self._tree, order.wanted)
        trees = self._root / "trees"
        with self._space.locked():
            note.rename(self._root / "manifests" / f"{order.digest}.json")
            self._tree.rename(trees / order.name)
        sync_folder(trees)

    def _blob(self, entry: FileEntry) -> Path:
        return self._root / "blobs" / entry.sha256

    def _target(self, entry: FileEntry) -> Path:
        target = self._tree / entry.path
        target.parent.mkdir(parents=True, exist_ok=True)
        return target

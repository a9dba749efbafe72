"""The filling of the cache with a tree: present files are linked, missing files are fetched and
hashed.

The caller holds the digest's fetch lock, so the scratch folder belongs to it; it becomes a tree by
one rename at the end.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from registry.entities import FileEntry, Manifest, manifest_json
from registry.errors import DigestMismatchError
from registry.files import is_entry, sync, sync_tree, write_note
from registry.manifest import check_entry, hash_file
from registry.quota import Quota, digest_of

Fetch = Callable[[FileEntry, Path], None]
Link = Callable[[FileEntry, Path], bool]  # returns False if the file must be fetched
Arrived = Callable[[FileEntry], None]


class CacheFill:
    def __init__(
        self,
        root: Path,
        quota: Quota,
        name: str,  # of the tree
        manifest: Manifest,
        wanted: Manifest,
        fetch: Fetch,
        link: Link | None,
        arrived: Arrived,
    ) -> None:
        self.name, self.digest = name, digest_of(name)
        self.manifest, self.wanted = manifest, wanted
        self._root, self._quota = root, quota
        self._fetch, self._try_link, self._note_arrival = fetch, link, arrived
        self._scratch = root / "tmp" / self.digest
        self._tree = self._scratch / "tree"
        self._arrived = self._scratch / "blob"
        self._missing: list[FileEntry] = []

    def run(self) -> None:
        for entry in self.wanted:
            check_entry(entry)
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._tree.mkdir(parents=True)
        try:
            self._link_present_blobs()
            # Out of the store if possible: a link costs no bytes, so it needs no room.
            for entry in tuple(self._missing):
                if self._try_link is not None and self._try_link(entry, self._arrived):
                    self._add(entry)
            with self._quota.locked():
                self._quota.make_room(sum(entry.size for entry in self._missing))
                self._reserve()
            for entry in tuple(self._missing):
                self._fetch(entry, self._arrived)
                self._add(entry)
            self._publish()
        finally:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def _link_present_blobs(self) -> None:
        """Links present blobs under the lock, so that no eviction removes them, and hashes them
        afterwards."""
        found: list[FileEntry] = []
        with self._quota.locked():
            for entry in self.wanted:
                try:
                    os.link(self._blob(entry), self._target(entry))
                    found.append(entry)
                except FileNotFoundError:
                    self._missing.append(entry)
        for entry in found:
            if not is_entry(self._target(entry), entry):
                with self._quota.locked():
                    self._target(entry).unlink()
                    self._blob(entry).unlink(missing_ok=True)
                self._missing.append(entry)

    def _add(self, entry: FileEntry) -> None:
        """Adds the file that has arrived."""
        arrived = self._arrived
        size, digest = hash_file(arrived)
        if (size, digest) != (entry.size, entry.sha256):
            raise DigestMismatchError(
                f"{entry.path}: got {size} bytes with sha256 {digest}, "
                f"registered are {entry.size} bytes with {entry.sha256}"
            )
        sync(arrived)
        blob = self._blob(entry)
        with self._quota.locked():
            if not blob.exists():  # otherwise another digest with the same file was quicker
                os.link(arrived, blob)
            os.link(blob, self._target(entry))
            arrived.unlink()
            self._missing.remove(entry)
            self._reserve()
        sync(blob.parent)
        self._note_arrival(entry)

    def _reserve(self) -> None:
        """Writes the number of bytes still to come, so that other fetches leave room for them; the
        caller holds the lock."""
        wanted = sum(entry.size for entry in self._missing)
        (self._scratch / "reserved").write_text(str(wanted))

    def _publish(self) -> None:
        sync_tree(self._tree)
        note = self._scratch / "manifest"
        note.write_text(manifest_json(self.manifest))
        sync(note)
        write_note(self._root / "notes" / self.name, self._tree, self.wanted)
        trees = self._root / "trees"
        with self._quota.locked():
            note.rename(self._root / "manifests" / f"{self.digest}.json")
            self._tree.rename(trees / self.name)
        sync(trees)

    def _blob(self, entry: FileEntry) -> Path:
        return self._root / "blobs" / entry.sha256

    def _target(self, entry: FileEntry) -> Path:
        target = self._tree / entry.path
        target.parent.mkdir(parents=True, exist_ok=True)
        return target

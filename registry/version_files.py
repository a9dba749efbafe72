"""The remote side of a version: its tags, its manifest, its files. All of them are untrusted until
they have been hashed: paths and sizes are checked before the first byte of a file is read.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from mlflow.store.artifact.artifact_repo import ArtifactRepository

from registry import listing, plain_mlflow
from registry.artifacts import download, try_link
from registry.entities import AdapterVersion, BaseVersion, FileEntry, Manifest
from registry.errors import ArtifactError, NotFoundError, RegistrationError
from registry.flavor import DATA
from registry.manifest import (
    MAX_ADAPTER_BYTES,
    MAX_BASE_BYTES,
    MAX_CONFIG_BYTES,
    check_sizes,
    parse_manifest,
)
from registry.publish import MANIFEST_FILE
from registry.store import MlflowStore


@dataclass(frozen=True)  # no slots: for cached properties
class VersionFiles:
    store: MlflowStore
    version: BaseVersion | AdapterVersion

    @cached_property
    def repository(self) -> ArtifactRepository:
        return self.store.version_files(self.version.name, self.version.version)

    @cached_property
    def tags(self) -> dict[str, str]:
        """Raises NotFoundError if the model was deleted and created again: then another version has
        the number. Its files are not this digest's, which is not bad for that."""
        tags = dict(self.store.version(self.version.name, self.version.version).tags)
        if tags.get(listing.DIGEST, self.version.digest) != self.version.digest:
            raise NotFoundError(f"{self} was deleted and created again with other files")
        return tags

    @cached_property
    def untagged(self) -> plain_mlflow.PlainAdapter | None:
        """The result of reading a plain adapter again: without tags, as in a read-only store or
        before they are written, it has no manifest and no folder of its files."""
        if listing.DIGEST in self.tags or not isinstance(self.version, AdapterVersion):
            return None
        with tempfile.TemporaryDirectory(prefix="loraplex-") as scratch:
            try:
                found = plain_mlflow.inspect(self.repository, Path(scratch))
            except RegistrationError as error:
                raise ArtifactError(f"{self} is no adapter any more: {error}") from error
        if found is None:
            raise ArtifactError(f"{self} is no adapter any more")
        return found

    def manifest(self) -> Manifest:
        if self.untagged is not None:
            return self.untagged.manifest
        manifest = parse_manifest(self._manifest_text())
        is_adapter = isinstance(self.version, AdapterVersion)
        check_sizes(manifest, MAX_ADAPTER_BYTES if is_adapter else MAX_BASE_BYTES, str(self))
        return manifest

    def fetch(self, entry: FileEntry, target: Path) -> None:
        download(self.repository, self._path(entry), target, max_bytes=entry.size)

    def link(self, entry: FileEntry, target: Path) -> bool:
        is_linked = self.tags.get(listing.LINKED) == "true"
        return is_linked and try_link(self.repository, self._path(entry), target)

    def __str__(self) -> str:
        return f"{self.version.name!r} version {self.version.version}"

    def _manifest_text(self) -> str:
        if listing.MANIFEST in self.tags:
            return self.tags[listing.MANIFEST]
        with tempfile.TemporaryDirectory(prefix="loraplex-") as scratch:
            path = Path(scratch) / MANIFEST_FILE
            download(self.repository, MANIFEST_FILE, path, max_bytes=MAX_CONFIG_BYTES)
            return path.read_text(errors="replace")

    def _path(self, entry: FileEntry) -> str:
        root = self.tags.get(listing.ROOT, DATA) if self.untagged is None else self.untagged.root
        return f"{root}/{entry.path}" if root else entry.path

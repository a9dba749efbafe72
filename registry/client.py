"""The registry as the rest of loraplex sees it: register, take a snapshot, fetch verified files.

MLflow is the record. A catalog, once taken, resolves names without it, and a tree, once in the
cache, is served without it. Knows nothing of tensors: what validation found comes in as facts.
"""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

from registry import listing, plain, webhooks
from registry.cache import Cache
from registry.catalog import DEFAULT_ALIAS, Catalog, in_sight
from registry.entities import (
    AdapterFacts,
    AdapterVersion,
    BaseFacts,
    BaseVersion,
    EffectRecord,
    FileEntry,
    Rejected,
    content_digest,
    manifest_json,
)
from registry.errors import (
    ArtifactError,
    InvalidNameError,
    NotFoundError,
    RegistrationError,
    RegistryError,
)
from registry.flavor import ADAPTER_CONFIG
from registry.manifest import (
    MAX_ADAPTER_BYTES,
    MAX_BASE_BYTES,
    Progress,
    no_progress,
    scan_folder,
)
from registry.names import check_alias, check_name
from registry.publish import Publication, attach_effect, publish
from registry.sqlite_changes import Marker
from registry.store import MlflowStore
from registry.version_files import VersionFiles

logger = logging.getLogger(__name__)

_REFUSALS = (RegistrationError, InvalidNameError, ArtifactError)  # of a plain version's content


class Registry:
    """`sqlite:///HOME/mlflow.db` keeps its files in HOME/artifacts, another database in
    `artifact_root`; a server keeps its own."""

    def __init__(
        self,
        tracking_uri: str,
        *,
        artifact_root: Path | None = None,
        timeout_s: int = 10,
        max_retries: int = 2,
    ) -> None:
        self._store = MlflowStore(tracking_uri, artifact_root, timeout_s, max_retries)
        # What plain versions hold, None for what is no adapter: files of a version never change.
        self._inspected: dict[tuple[str, int], plain.PlainAdapter | RegistryError | None] = {}
        # The last snapshot, and the store's marker before it was taken.
        self._seen: tuple[Marker, Catalog] | None = None

    def register_base(
        self,
        folder: Path,
        name: str,
        *,
        facts: BaseFacts,
        alias: str | None = DEFAULT_ALIAS,
        tags: tuple[tuple[str, str], ...] = (),
        link: bool = False,
        progress: Progress = no_progress,
    ) -> BaseVersion:
        """`link`: a local store takes the files by hardlink, so that a large base is held once."""
        _check(name, alias)
        manifest = scan_folder(folder, "config.json", MAX_BASE_BYTES, progress)
        publication = Publication(
            folder, name, "base", manifest, listing.base_tags(facts), tags, alias, link, None
        )
        row = publish(self._store, publication, progress)
        return listing.base_version(row)

    def register_adapter(
        self,
        folder: Path,
        name: str,
        *,
        base: str,
        facts: AdapterFacts,
        alias: str | None = DEFAULT_ALIAS,
        tags: tuple[tuple[str, str], ...] = (),
        effect: EffectRecord | None = None,
        progress: Progress = no_progress,
    ) -> AdapterVersion:
        """`base`: `name`, `name@alias` or `name@version` of a registered base."""
        _check(name, alias)
        manifest = scan_folder(folder, ADAPTER_CONFIG, MAX_ADAPTER_BYTES, progress)
        try:
            found = self._read_catalog()[0].resolve_base(base)
        except NotFoundError as error:
            raise RegistrationError(f"adapter {name!r}: {error}") from error
        facts_tags = listing.adapter_tags(facts, found)
        publication = Publication(
            folder, name, "adapter", manifest, facts_tags, tags, alias, False, found.name, effect
        )
        row = publish(self._store, publication, progress)
        return listing.adapter_version(row)

    def attach_effect(self, version: AdapterVersion, record: EffectRecord) -> None:
        """To a version that is there already, whoever registered it; an earlier record goes."""
        attach_effect(self._store, version.name, version.version, record)

    def ensure_webhook(self, url: str, secret: str) -> None:
        """That the server tells `url` of changes, signed with `secret`; once for each URL."""
        if not self._store.is_remote:
            raise RegistryError("the registry is no MLflow server: it calls no webhooks")
        self._store.ensure_webhook(webhooks.hook_name(url), url, webhooks.EVENTS, secret)

    def set_alias(self, name: str, alias: str, version: int | None) -> None:
        """None removes it; one that is not there may be removed."""
        check_alias(alias)
        if version is not None:
            self._store.set_alias(name, alias, version)
        else:
            self._store.delete_alias(name, alias)

    def set_setting(self, name: str, key: str, value: str | None) -> None:
        """`key`: one of `listing.SETTINGS`. None removes it, also one that is not there."""
        if key not in listing.SETTINGS:
            raise ValueError(
                f"no setting is named {key!r}; there are {', '.join(listing.SETTINGS)}"
            )
        model = self._store.model(name)
        if model is None:
            raise NotFoundError(f"no model is named {name!r}")
        tag = listing.PREFIX + key
        if value is not None:
            self._store.tag_model(name, tag, value)
        elif tag in model.tags:
            self._store.untag_model(name, tag)

    def snapshot(self) -> Catalog:
        """All that can be served now. A plain version is read and tagged when first seen.

        The same object as before where an embedded store says that nobody wrote to it."""
        marker = self._store.marker()
        if marker is not None and self._seen is not None and self._seen[0] == marker:
            return self._seen[1]
        catalog, is_whole = self._read_catalog(adopt_plain=True)
        self._seen = (marker, catalog) if marker is not None and is_whole else None
        return catalog

    def fetch(
        self,
        version: BaseVersion | AdapterVersion,
        cache: Cache,
        files: tuple[str, ...] | None = None,
        progress: Progress = no_progress,
    ) -> Path:
        """A verified local folder, held in the cache until it is released; no network where the
        cache has all. `files`: shell patterns."""
        remote = VersionFiles(self._store, version)
        manifest = cache.find_manifest(version.digest, remote.manifest)
        total = sum(entry.size for entry in manifest)
        done = 0

        def arrived(entry: FileEntry) -> None:
            nonlocal done
            done += entry.size
            progress("download", done, total)

        def fetch_one(entry: FileEntry, target: Path) -> None:
            remote.fetch(entry, target)
            arrived(entry)

        def link_one(entry: FileEntry, target: Path) -> bool:
            if not remote.link(entry, target):
                return False
            arrived(entry)
            return True

        return cache.tree(version.digest, manifest, fetch_one, files, link_one)

    def _read_catalog(self, *, adopt_plain: bool = False) -> tuple[Catalog, bool]:
        """And whether all could be read that is there."""
        is_whole = True
        models = list(self._store.models())
        every = listing.rows(models, self._store.versions())
        found = [row for row in every if row.rejected is None]
        bases = tuple(
            listing.base_version(row)
            for row in found
            if row.is_complete and row.tags[listing.KIND] == "base"
        )
        adapters = [
            listing.adapter_version(row)
            for row in found
            if row.is_complete and row.tags[listing.KIND] == "adapter"
        ]
        # Those of other kinds of models are nobody's concern here.
        rejected = [row.rejected for row in every if row.rejected is not None and row.is_complete]
        defaults = Catalog(bases).default_bases() if adopt_plain else {}
        for row in (row for row in found if adopt_plain and not row.is_complete):
            try:
                adopted = self._adopt(row, defaults)
            except _REFUSALS as error:
                rejected.append(Rejected(row.name, row.version, str(error)))
            except RegistryError as error:  # one version must not hide all the others
                is_whole = False
                logger.warning("%s version %d cannot be read now: %s", row.name, row.version, error)
            else:
                adapters += [adopted] if adopted is not None else []
        adapters.sort(key=lambda adapter: (adapter.name, adapter.version))
        settings = listing.settings(models)
        catalog = Catalog(bases, in_sight(adapters, settings), tuple(rejected), settings)
        return catalog, is_whole

    def _adopt(self, row: listing.Row, bases: dict[str, BaseVersion]) -> AdapterVersion | None:
        adapter = self._inspect(row)
        if adapter is None:
            return None
        check_name(row.name)
        base = plain.match_base(adapter, row.tags.get(listing.BASE), bases)
        tags = {
            listing.KIND: "adapter",
            listing.ROOT: adapter.root,
            listing.MANIFEST: manifest_json(adapter.manifest),
            **listing.adapter_tags(adapter.facts, base),
            # Last: a version that has its digest has all the others.
            listing.DIGEST: content_digest(adapter.manifest),
        }
        try:
            for key, value in tags.items():
                self._store.tag_version(row.name, row.version, key, value)
        except RegistryError as error:  # a store that we may only read: known to this process
            logger.warning("%s version %d stays untagged: %s", row.name, row.version, error)
        completed = listing.Row(
            row.name, row.version, row.source, {**row.tags, **tags}, row.aliases, row.created_s
        )
        return listing.adapter_version(completed)

    def _inspect(self, row: listing.Row) -> plain.PlainAdapter | None:
        key = (row.name, row.version)
        if key not in self._inspected:
            repository = self._store.version_files(row.name, row.version)
            with tempfile.TemporaryDirectory(prefix="loraplex-") as scratch:
                try:
                    self._inspected[key] = plain.inspect(repository, Path(scratch))
                except _REFUSALS as error:
                    self._inspected[key] = error
        found = self._inspected[key]
        if isinstance(found, RegistryError):
            raise found
        if found is None and row.tags.get(listing.KIND) == "adapter":
            raise RegistrationError(f"tagged as an adapter, but holds no {ADAPTER_CONFIG}")
        return found


def _check(name: str, alias: str | None) -> None:
    check_name(name)
    if alias is not None:
        check_alias(alias)

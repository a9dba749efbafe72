"""The registry's interface for the rest of loraplex: register, take a snapshot, fetch verified
files.

MLflow is the record. A catalog resolves names without MLflow, and a tree in the cache is served
without MLflow. Independent of tensors: the results of validation are arguments, as facts.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

from registry import listing, plain_mlflow, webhooks
from registry.adoption import Adoption
from registry.cache import Cache
from registry.catalog import DEFAULT_ALIAS, Catalog, visible
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
from registry.errors import InvalidNameError, NotFoundError, RegistrationError, RegistryError
from registry.flavor import ADAPTER_CONFIG
from registry.manifest import MAX_ADAPTER_BYTES, MAX_BASE_BYTES, Progress, no_progress, scan_folder
from registry.names import check_alias, check_model_id, check_name
from registry.publish import Publication, attach_effect, publish
from registry.sqlite_database import Marker
from registry.store import MlflowStore
from registry.version_files import VersionFiles

# Plain versions are read - now: before the call returns; beside: for a later call; no: not at all.
Adopt = Literal["now", "beside", "no"]


class Registry:
    """`sqlite:///HOME/mlflow.db` keeps its files in HOME/artifacts, another database in
    `artifact_root`; a server keeps its files itself."""

    def __init__(
        self,
        tracking_uri: str,
        *,
        artifact_root: Path | None = None,
        timeout_s: int = 10,
        max_retries: int = 2,
        artifact_schemes: tuple[str, ...] = (),
        scratch: Path | None = None,
    ) -> None:
        """`artifact_schemes`: allowed stores besides the server's own, see `sources.check_listed`.
        `scratch`: the folder where plain versions are read."""
        self._store = MlflowStore(
            tracking_uri, artifact_root, timeout_s, max_retries, artifact_schemes
        )
        self._adoption = Adoption(
            lambda name, version: self._store.version_files(name, version), scratch
        )
        # The last snapshot, with the store's marker and the adoption's count before it was taken.
        self._seen: tuple[tuple[Marker, int], Catalog] | None = None

    def register_base(
        self,
        folder: Path,
        name: str,
        *,
        facts: BaseFacts,
        alias: str | None = DEFAULT_ALIAS,
        tags: tuple[tuple[str, str], ...] = (),
        link: bool = False,
        model_id: str = "",
        progress: Progress = no_progress,
    ) -> BaseVersion:
        """`link`: a local store gets the files by hardlink, so that a large base is stored once.
        `model_id`: ORGANISATION/NAME, a second name of the base for clients."""
        _check(name, alias)
        if model_id:
            check_model_id(model_id)
        manifest = scan_folder(folder, "config.json", MAX_BASE_BYTES, progress)
        publication = Publication(
            folder, name, "base", manifest, listing.base_tags(facts), tags, alias, link, None
        )
        row = publish(self._store, publication, progress)
        if model_id and row.tags.get(listing.MODEL_ID) != model_id:
            self._store.tag_version(name, row.version, listing.MODEL_ID, model_id)
            row = replace(row, tags={**row.tags, listing.MODEL_ID: model_id})
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
        facts_tags = listing.adapter_tags(facts, found) | listing.text_tags(manifest)
        publication = Publication(
            folder, name, "adapter", manifest, facts_tags, tags, alias, False, found.name, effect
        )
        row = publish(self._store, publication, progress)
        model = self._store.model(name)
        if model is not None and model.tags.get(listing.RUNTIME) == "unloaded":
            # Hidden since a script unloaded it; a newly registered version makes it visible.
            self._store.tag_model(name, listing.RUNTIME, None)
        return listing.adapter_version(row)

    def attach_effect(self, version: AdapterVersion, record: EffectRecord) -> None:
        """Stores a check's result with a registered version, in place of an earlier result."""
        attach_effect(self._store, version.name, version.version, record)

    def ensure_webhook(self, url: str, secret: str) -> None:
        """Makes the server send changes to `url`, signed with `secret`; once for each URL."""
        if not self._store.is_remote:
            raise RegistryError("webhooks need an MLflow server: the registry is a database")
        self._store.ensure_webhook(webhooks.hook_name(url), url, webhooks.EVENTS, secret)

    def set_alias(self, name: str, alias: str, version: int | None) -> None:
        """Moves an alias; None removes it, whether or not it exists."""
        check_alias(alias)
        self._store.set_alias(name, alias, version)

    def set_setting(self, name: str, key: str, value: str | None) -> None:
        """Writes a setting; `key` is in `listing.SETTINGS`. None removes it, whether or not it
        exists."""
        if key not in listing.SETTINGS:
            raise ValueError(
                f"no setting is named {key!r}; there are {', '.join(listing.SETTINGS)}"
            )
        model = self._store.model(name)
        if model is None:
            raise NotFoundError(f"no model is named {name!r}")
        tag = listing.PREFIX + key
        if value is not None or tag in model.tags:
            self._store.tag_model(name, tag, value)

    def snapshot(self, *, adopt: Adopt = "now") -> Catalog:
        """Returns everything that can be served now. A plain version is read and tagged when first
        listed. The result is the previous object if an embedded store reports no write since."""
        if adopt == "no":
            return self._read_catalog()[0]
        marker, num_done = self._store.marker(), self._adoption.num_done
        before = None if marker is None else (marker, num_done)
        seen = self._seen
        if seen is not None and seen[0] == before and not self._adoption.is_due():
            return seen[1]
        catalog, is_whole = self._read_catalog(adopt_plain=True)
        if adopt == "now":
            self._adoption.wait()
            if self._adoption.num_done != num_done:
                catalog, is_whole = self._read_catalog(adopt_plain=True)
                self._adoption.wait()  # for the writing of tags
        self._seen = (before, catalog) if before is not None and is_whole else None
        return catalog

    def fetch(
        self,
        version: BaseVersion | AdapterVersion,
        cache: Cache,
        files: tuple[str, ...] | None = None,
        progress: Progress = no_progress,
    ) -> Path:
        """Returns a verified local folder, held in the cache until it is released; without the
        network if the cache has all files. `files`: shell patterns."""
        remote = VersionFiles(self._store, version)
        manifest = cache.find_manifest(version.digest, remote.manifest)
        total = sum(entry.size for entry in manifest)
        done = 0

        def arrived(entry: FileEntry) -> None:
            nonlocal done
            done += entry.size
            progress("download", done, total)

        return cache.tree(version.digest, manifest, remote.fetch, files, remote.link, arrived)

    def _read_catalog(self, *, adopt_plain: bool = False) -> tuple[Catalog, bool]:
        """Returns the catalog, and whether every version could be read."""
        models, versions = self._store.listing()
        every = listing.rows(models, versions)
        # Rejected versions of other kinds of models are left out.
        rejected = [row.rejected for row in every if row.rejected is not None and row.is_complete]
        found = [row for row in every if row.rejected is None]
        complete = [row for row in found if row.is_complete]
        bases = tuple(
            listing.base_version(row) for row in complete if row.tags[listing.KIND] == "base"
        )
        adapters = [
            listing.adapter_version(row) for row in complete if row.tags[listing.KIND] == "adapter"
        ]
        is_whole = True
        if adopt_plain:
            plain, of_bases = [row for row in found if not row.is_complete], Catalog(bases)
            for row in plain:
                adopted = self._adopted(row, of_bases)
                if isinstance(adopted, Rejected):
                    rejected.append(adopted)
                elif adopted is not None:
                    adapters.append(adopted)
            is_whole = self._adoption.keep(plain)
        adapters.sort(key=lambda adapter: (adapter.name, adapter.version))
        settings = listing.settings(models)
        dangling = listing.dangling(models, (*bases, *adapters), rejected)
        shown = visible(adapters, settings)
        catalog = Catalog(bases, shown, tuple(rejected), settings, dangling=dangling)
        return catalog, is_whole

    def _adopted(self, row: listing.Row, bases: Catalog) -> AdapterVersion | Rejected | None:
        """Returns the result for a plain version; None if it is no adapter, or was not read yet."""
        is_read, found = self._adoption.look(row)
        try:
            if isinstance(found, RegistryError):
                raise found
            if found is None:
                if is_read:
                    plain_mlflow.check_untagged(row.tags)
                return None
            forced = row.tags.get(listing.FORCED) == "true"
            base = plain_mlflow.match_base(found, row.tags.get(listing.BASE), bases, forced=forced)
        except RegistryError as error:
            is_public = isinstance(error, RegistrationError | InvalidNameError)
            return Rejected(row.name, row.version, str(error), is_public)
        tags = {
            listing.KIND: "adapter",
            listing.ROOT: found.root,
            listing.MANIFEST: manifest_json(found.manifest),
            **listing.adapter_tags(found.facts, base),
            **listing.text_tags(found.manifest),
            # Last: a version with a digest has all other tags.
            listing.DIGEST: content_digest(found.manifest),
        }
        self._adoption.tag_once(row, lambda: self._write_tags(row, tags))
        return listing.adapter_version(replace(row, tags={**row.tags, **tags}))

    def _write_tags(self, row: listing.Row, tags: dict[str, str]) -> None:
        """Writes tags, in the adoption's thread. Raises NotFoundError if the model was deleted and
        created again meanwhile: then another version has the number, with other files."""
        found = self._store.version(row.name, row.version)
        if not listing.is_row_of(row, found):
            raise NotFoundError(f"{row.name!r} version {row.version} was deleted and created again")
        for key, value in tags.items():
            self._store.tag_version(row.name, row.version, key, value)


def _check(name: str, alias: str | None) -> None:
    check_name(name)
    if alias is not None:
        check_alias(alias)

"""Registers a folder as a version in MLflow, completely or not at all, and equal content only once.

The files are an MLflow LoggedModel (MLmodel with loraplex's flavour, manifest, files): no run is
needed, and unlike with `Model.log` there is no intermediate copy, which matters for bases of 16 GB.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from mlflow.entities import LoggedModel
from mlflow.models import Model
from mlflow.store.artifact.artifact_repo import ArtifactRepository

from registry import listing
from registry.entities import EffectRecord, Manifest, content_digest, manifest_json
from registry.errors import RegistrationError, RegistryError
from registry.flavor import DATA, describe
from registry.manifest import Progress
from registry.store import MlflowStore, upload

logger = logging.getLogger(__name__)

MANIFEST_FILE = "loraplex.json"
_NOT_SERVED = "loraplex does not serve this version:"
EFFECT_FOLDER = "effect"  # below the artifacts of a version; its files are not served


@dataclass(frozen=True, slots=True)
class Publication:
    folder: Path
    name: str
    kind: str
    manifest: Manifest
    facts: dict[str, str]  # as tags
    own_tags: tuple[tuple[str, str], ...]
    alias: str | None
    link: bool
    base: str | None
    effect: EffectRecord | None = None

    @property
    def digest(self) -> str:
        return content_digest(self.manifest)


def publish(store: MlflowStore, publication: Publication, progress: Progress) -> listing.Row:
    name = publication.name
    rows = _rows(store, name)
    for known in rows:
        kind = known.tags.get(listing.KIND)
        if kind is not None and kind != publication.kind:
            words = {"base": "a base model", "adapter": "an adapter"}.get(kind, kind)
            raise RegistrationError(f"{name!r} is the name of {words} already")
    row = _find(rows, publication)
    if row is None:
        row = _create(store, publication, progress)
    else:
        if publication.effect is not None:
            _replace_effect(store, row, publication.effect)
        if publication.alias not in row.aliases:
            _move_alias(store, publication, row.version, ExitStack())
    for found in _rows(store, name):
        if found.version == row.version:
            return found
    raise _deleted(name, row.version)


def attach_effect(store: MlflowStore, name: str, version: int, record: EffectRecord) -> None:
    """Stores a check's result in place of an earlier result. The files first, so that the tags
    never describe missing files."""
    _upload_effect(store.version_files(name, version), record)
    tags = listing.effect_tags(record.facts)
    known = store.version(name, version).tags
    for key in (*listing.EFFECT_TAGS.values(), listing.REFUSED, listing.TEXT, listing.VARIANT):
        if key in known and key not in tags:
            store.untag_version(name, version, key)
    if record.facts.reason or listing.REFUSED in known:
        reason = record.facts.reason
        text = f"{_NOT_SERVED} {reason}" if reason else ""
        store.describe_version(name, version, text, _NOT_SERVED)
    for key, value in tags.items():
        store.tag_version(name, version, key, value)


def _replace_effect(store: MlflowStore, row: listing.Row, record: EffectRecord) -> None:
    """Stores the check of files that are registered already. A check that did not run the base
    never replaces another; its comparison with PEFT is kept all the same."""
    if record.facts.verdict != "unprobed" or listing.EFFECT not in row.tags:
        attach_effect(store, row.name, row.version, record)
    elif record.facts.parity:
        store.tag_version(row.name, row.version, listing.PARITY, record.facts.parity)


def _create(store: MlflowStore, publication: Publication, progress: Progress) -> listing.Row:
    """Creates files, name, version and alias. Each step pushes its undo onto the stack; only
    success clears the stack."""
    name = publication.name
    tags = _tags(publication)
    with ExitStack() as undo:
        model = store.create_logged_model(name, publication.kind)
        undo.callback(_quietly, "removing files", lambda: _discard(store, name, model))
        _upload(store.repository(model.artifact_location), model, publication, progress)
        store.finalize(model)
        if store.create_model(name, {listing.KIND: publication.kind}):
            undo.callback(_quietly, "removing the name", lambda: _delete_if_empty(store, name))
        # Before the call: if only its response is lost, the version exists anyway.
        undo.callback(_quietly, "removing the version", lambda: _delete_made(store, name, model))
        store.create_version(name, model, tags)
        version = _only_made(store, name, model)
        # The lowest version with this content: an earlier one if another process was quicker.
        row = _find(_rows(store, name), publication)
        if row is None:
            raise _deleted(name, version)
        _move_alias(store, publication, row.version, undo)
        if row.version == version:
            undo.pop_all()
    return row


def _move_alias(
    store: MlflowStore, publication: Publication, version: int, undo: ExitStack
) -> None:
    """Moves the alias, if any. If the write fails, it may have arrived without its response: then
    the alias is restored before any other undo. If that fails too, the undo is cancelled: MLflow
    drops the aliases of a deleted version, and the name would resolve to another version."""
    name, alias = publication.name, publication.alias
    if alias is None:
        return
    before = store.alias_version(name, alias)
    try:
        store.set_alias(name, alias, version)
    except BaseException:
        if before is not None:
            try:
                store.set_alias(name, alias, before)
            except RegistryError as error:
                logger.warning("alias %r of %r was not restored: %s", alias, name, error)
                undo.pop_all()
        raise


def _upload(
    repository: ArtifactRepository,
    model: LoggedModel,
    publication: Publication,
    progress: Progress,
) -> None:
    total = sum(entry.size for entry in publication.manifest)
    done = 0
    for entry in publication.manifest:
        upload(repository, publication.folder / entry.path, DATA, publication.link)
        done += entry.size
        progress("upload", done, total)
    with tempfile.TemporaryDirectory(prefix="loraplex-") as scratch:
        note = Path(scratch) / MANIFEST_FILE
        note.write_text(manifest_json(publication.manifest))
        upload(repository, note, None, link=False)
        described = describe(Model(model_id=model.model_id), publication.kind, publication.base)
        described.save(str(Path(scratch) / "MLmodel"))
        upload(repository, Path(scratch) / "MLmodel", None, link=False)
    if publication.effect is not None:
        _upload_effect(repository, publication.effect)


def _upload_effect(repository: ArtifactRepository, record: EffectRecord) -> None:
    with tempfile.TemporaryDirectory(prefix="loraplex-") as scratch:
        for name, content in record.files:
            path = Path(scratch) / name
            path.write_bytes(content)
            upload(repository, path, EFFECT_FOLDER, link=False)


def _tags(publication: Publication) -> dict[str, str]:
    reserved = [key for key, _ in publication.own_tags if key.startswith(listing.PREFIX)]
    if reserved:
        raise RegistrationError(f"tags: the prefix {listing.PREFIX} is reserved, got {reserved}")
    return {
        **dict(publication.own_tags),
        **publication.facts,
        **({} if publication.effect is None else listing.effect_tags(publication.effect.facts)),
        listing.KIND: publication.kind,
        listing.DIGEST: publication.digest,
        listing.ROOT: DATA,
        listing.LINKED: "true" if publication.link else "false",
    }


def _find(rows: list[listing.Row], publication: Publication) -> listing.Row | None:
    """Returns the version with this content, or None. The same adapter on another base is another
    version."""
    wanted = {
        listing.DIGEST: publication.digest,
        listing.BASE: publication.base,
        listing.BASE_DIGEST: publication.facts.get(listing.BASE_DIGEST),
    }
    for row in rows:
        if row.is_complete and all(row.tags.get(key) == value for key, value in wanted.items()):
            return row
    return None


def _rows(store: MlflowStore, name: str) -> list[listing.Row]:
    model = store.model(name)
    return [] if model is None else listing.rows([model], store.versions(name))


def _delete_made(store: MlflowStore, name: str, model: LoggedModel) -> None:
    for version in _made(store, name, model):
        store.delete_version(name, version)


def _discard(store: MlflowStore, name: str, model: LoggedModel) -> None:
    """Deletes the files, unless their version could not be removed: without files it would be
    listed, but could not be fetched."""
    if _made(store, name, model):
        logger.warning("%r has a version whose registration failed; delete it by hand", name)
        return
    store.discard(model)


def _only_made(store: MlflowStore, name: str, model: LoggedModel) -> int:
    """Returns the version with the files of this logged model. MLflow's client repeats a call whose
    response was lost, so that there may be several: all but the first are deleted."""
    made = sorted(_made(store, name, model))
    if not made:
        raise _deleted(name)
    for version in made[1:]:
        store.delete_version(name, version)
    return made[0]


def _deleted(name: str, version: int | None = None) -> RegistrationError:
    which = "a version" if version is None else f"version {version}"
    return RegistrationError(f"{name!r}: {which} was deleted while it was registered")


def _made(store: MlflowStore, name: str, model: LoggedModel) -> list[int]:
    """Returns the versions that have the files of this logged model."""
    location = model.artifact_location
    return [int(one.version) for one in store.versions(name) if one.source == location]


def _delete_if_empty(store: MlflowStore, name: str) -> None:
    if not store.versions(name):
        store.delete_model(name)


def _quietly(action: str, undo: Callable[[], None]) -> None:
    """Runs an undo step and logs its error: a second failure must not hide the first."""
    try:
        undo()
    except RegistryError as error:
        logger.warning("%s failed: %s", action, error)

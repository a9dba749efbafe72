"""All MLflow calls of loraplex: search, tags, aliases, logged models, files, webhooks.

It handles MLflow's types and quirks; bases and adapters are the callers' concern.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from mlflow import MlflowClient
from mlflow.entities import LoggedModel
from mlflow.entities.model_registry import ModelVersion, RegisteredModel
from mlflow.entities.webhook import WebhookEvent, WebhookEventStr
from mlflow.store.artifact.artifact_repo import ArtifactRepository
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository
from mlflow.store.artifact.runs_artifact_repo import RunsArtifactRepository
from mlflow.store.entities.paged_list import PagedList
from mlflow.store.model_registry.sqlalchemy_store import SqlAlchemyStore as SqlAlchemyModelStore
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

from registry.errors import NotFoundError, RegistryError, RegistryUnavailableError
from registry.late_answers import AnswerLimit
from registry.mlflow_errors import call, configure, with_time_limits
from registry.sources import ArtifactSources
from registry.sqlite_database import ChangeProbe, Marker, OpenedFile, create_sqlite, sqlite_file

T = TypeVar("T")

EXPERIMENT = "loraplex"
_MODELS_PER_PAGE = 500
_VERSIONS_PER_PAGE = 5000
_HOOKS_PER_PAGE = 100
_NO_MODEL = "loraplex-is-this-a-registry"  # a name that is never registered


class MlflowStore:
    def __init__(
        self,
        tracking_uri: str,
        artifact_root: Path | None,
        timeout_s: int,
        max_retries: int,
        artifact_schemes: Sequence[str] = (),
    ) -> None:
        """`artifact_schemes`: see `sources.check_listed`."""
        configure(timeout_s, max_retries)
        self.tracking_uri = tracking_uri
        self._database_uri = with_time_limits(tracking_uri, timeout_s)
        self.is_remote = urlsplit(tracking_uri).scheme in ("http", "https")
        # Each of MLflow's tries may be silent for `timeout_s`; as long again for what it sends.
        limit = AnswerLimit(2 * timeout_s * (max_retries + 1))
        self._answers = limit if self.is_remote else None
        self._artifact_root = artifact_root or default_artifact_root(tracking_uri)
        self._sources = ArtifactSources(
            tracking_uri,
            None if self.is_remote else self._artifact_root,
            artifact_schemes,
            self._default_root,
        )
        self._known_models: Collection[Hashable] = ()  # names, as last listed
        self._known_versions: Collection[Hashable] = ()
        self._probe: ChangeProbe | None = None
        self._opened: OpenedFile | None = None  # the file of an SQLite store that is open
        if tracking_uri.startswith("sqlite:"):
            sqlite_file(tracking_uri).parent.mkdir(parents=True, exist_ok=True)
            self._probe = ChangeProbe(sqlite_file(tracking_uri))

    def marker(self) -> Marker | None:
        """Returns a value that changes with every write to an embedded store; None if unknown, as
        with a remote store."""
        return None if self._probe is None else self._probe.marker()

    def listing(self) -> tuple[list[RegisteredModel], list[ModelVersion]]:
        """Returns every model, with aliases and tags, and every version, read after the models. (A
        search of versions returns no aliases.)"""
        models = self._whole(self._models, lambda model: model.name, self._known_models)
        if not models and self.is_remote:
            self._check_answers()
        versions = self._whole(
            self._versions, lambda one: (one.name, one.version), self._known_versions
        )
        self._known_models, self._known_versions = models.keys(), versions.keys()
        return list(models.values()), list(versions.values())

    def versions(self, name: str) -> list[ModelVersion]:
        return [version for page in self._versions(name) for version in page]

    def _models(self) -> Iterator[PagedList[RegisteredModel]]:
        return self._pages(
            "listing models",
            lambda token: self._client.search_registered_models(
                max_results=_MODELS_PER_PAGE, page_token=token
            ),
        )

    def _versions(self, name: str | None = None) -> Iterator[PagedList[ModelVersion]]:
        condition = None if name is None else f"name = '{name}'"
        return self._pages(
            "listing versions",
            lambda token: self._client.search_model_versions(
                condition, max_results=_VERSIONS_PER_PAGE, page_token=token
            ),
        )

    def _whole(
        self,
        read: Callable[[], Iterator[PagedList[T]]],
        key: Callable[[T], Hashable],
        known: Collection[Hashable],
    ) -> dict[Hashable, T]:
        """Returns all entries by key. MLflow's page tokens are offsets: an entry that is deleted,
        or moves to the front, between two pages hides another entry. So an entry missing from a
        listing of several pages is gone only if a second listing lacks it, too; the first listing
        of a process is always repeated."""
        pages = list(read())
        found = {key(one): one for page in pages for one in page}
        if len(pages) > 1 and (not known or any(one not in found for one in known)):
            found |= {key(one): one for page in read() for one in page}
        return found

    def _check_answers(self) -> None:
        """Raises RegistryUnavailableError if the endpoint is not a registry. An endpoint that
        returns an empty object for every call looks like an empty registry; but a registry reports
        that it has no model of this name."""
        if self.model(_NO_MODEL) is not None:
            raise RegistryUnavailableError(
                f"MLflow at {shown_uri(self.tracking_uri)} lists no model, but returns a "
                f"model named {_NO_MODEL!r}: it is not an MLflow server, or a proxy answers for it"
            )

    def model(self, name: str) -> RegisteredModel | None:
        try:
            return self._call(f"reading {name!r}", lambda: self._client.get_registered_model(name))
        except NotFoundError:
            return None

    def create_model(self, name: str, tags: dict[str, str]) -> bool:
        """Returns True if the model is new."""
        if self.model(name) is not None:
            return False
        try:
            self._call(
                f"creating {name!r}", lambda: self._client.create_registered_model(name, tags)
            )
        except RegistryError:
            if self.model(name) is None:
                raise
            return False  # another process was quicker
        return True

    def tag_model(self, name: str, key: str, value: str | None) -> None:
        """Sets a tag; None removes it, which must exist."""
        if value is not None:
            self._call("tagging", lambda: self._client.set_registered_model_tag(name, key, value))
        else:
            self._call(
                "removing a tag", lambda: self._client.delete_registered_model_tag(name, key)
            )

    def tag_version(self, name: str, version: int, key: str, value: str) -> None:
        self._call(
            "tagging", lambda: self._client.set_model_version_tag(name, str(version), key, value)
        )

    def describe_version(self, name: str, version: int, text: str, prefix: str) -> None:
        """Writes a description if there is none, or if the present one begins with `prefix`: a
        user's own description stays."""
        known = self.version(name, version).description
        if not known or known.startswith(prefix):
            self._call(
                "describing", lambda: self._client.update_model_version(name, str(version), text)
            )

    def untag_version(self, name: str, version: int, key: str) -> None:
        self._call(
            "removing a tag",
            lambda: self._client.delete_model_version_tag(name, str(version), key),
        )

    def set_alias(self, name: str, alias: str, version: int | None) -> None:
        """Moves an alias; None removes it, whether or not it exists."""
        if version is not None:
            self._call(
                f"setting alias {alias!r} of {name!r}",
                lambda: self._client.set_registered_model_alias(name, alias, str(version)),
            )
        else:
            self._call(
                f"deleting alias {alias!r} of {name!r}",
                lambda: self._client.delete_registered_model_alias(name, alias),
            )

    def alias_version(self, name: str, alias: str) -> int | None:
        """Returns None if the name has no such alias."""
        model = self.model(name)
        version = None if model is None else model.aliases.get(alias)
        return None if version is None else int(version)

    def delete_model(self, name: str) -> None:
        self._call("deleting", lambda: self._client.delete_registered_model(name))

    def delete_version(self, name: str, version: int) -> None:
        self._call("deleting", lambda: self._client.delete_model_version(name, str(version)))

    def create_logged_model(self, name: str, kind: str) -> LoggedModel:
        experiment = self._experiment_id()
        return self._call(
            "creating a logged model",
            lambda: self._client.create_logged_model(
                # MLflow refuses '.', ':' and others in this name; it is only shown.
                experiment,
                name=name.replace(".", "-"),
                model_type=kind,
            ),
        )

    def finalize(self, model: LoggedModel) -> None:
        self._call(
            "finalizing", lambda: self._client.finalize_logged_model(model.model_id, "READY")
        )

    def discard(self, model: LoggedModel) -> None:
        """Deletes the record and the files: MLflow itself would keep the files until `mlflow
        gc`."""
        self._call("deleting", lambda: self._client.delete_logged_model(model.model_id))
        repository = self.repository(model.artifact_location)
        call("deleting files", lambda: repository.delete_artifacts())  # type: ignore[no-untyped-call]

    def create_version(self, name: str, model: LoggedModel, tags: dict[str, str]) -> ModelVersion:
        # The server needs the id to allow the source; the embedded store would look up the id
        # through MLflow's process-wide tracking URI, which may be another store.
        model_id = model.model_id if self.is_remote else None
        return self._call(
            f"creating a version of {name!r}",
            lambda: self._client.create_model_version(
                name, model.artifact_location, tags=tags, model_id=model_id, await_creation_for=0
            ),
        )

    def version(self, name: str, version: int) -> ModelVersion:
        return self._call(
            f"reading {name!r} version {version}",
            lambda: self._client.get_model_version(name, str(version)),
        )

    def version_files(self, name: str, version: int) -> ArtifactRepository:
        uri = self._call(
            f"looking up {name!r} version {version}",
            lambda: self._client.get_model_version_download_uri(name, str(version)),
        )
        if RunsArtifactRepository.is_runs_uri(uri):  # type: ignore[no-untyped-call]
            find = partial(RunsArtifactRepository.get_underlying_uri, uri, self._database_uri)
            uri = self._call(f"looking up {uri}", find)
        self._sources.check(uri)
        return self.repository(uri)

    def repository(self, uri: str) -> ArtifactRepository:
        return self._call(
            f"opening {uri}",
            lambda: get_artifact_repository(uri, self.tracking_uri, self.tracking_uri),
        )

    def ensure_webhook(self, name: str, url: str, events: Sequence[str], secret: str) -> None:
        """Creates the webhook of this name, or updates it with all arguments, including the secret,
        which cannot be read back."""
        known = self._pages(
            "listing webhooks", lambda token: self._client.list_webhooks(_HOOKS_PER_PAGE, token)
        )
        mine = next((hook for page in known for hook in page if hook.name == name), None)
        wanted: list[WebhookEventStr | WebhookEvent] = [
            WebhookEvent(*event.split(".", 1)) for event in events
        ]
        if mine is None:
            self._call(
                "creating a webhook",
                lambda: self._client.create_webhook(name, url, wanted, secret=secret),
            )
        else:
            self._call(
                "updating a webhook",
                lambda: self._client.update_webhook(
                    mine.webhook_id, url=url, events=wanted, secret=secret, status="ACTIVE"
                ),
            )

    @cached_property
    def _client(self) -> MlflowClient:
        """The client, opened at its first use: a replica starts from its cache even if the database
        is down."""
        uri = self._database_uri
        if not self.is_remote:
            # The first opening of a new database sets the artifact root of plain MLflow runs; a
            # client would set ./mlruns, below the process's present working folder.
            root = self._artifact_root.absolute().as_uri()
            if self._probe is not None:
                create_sqlite(self.tracking_uri, root)
            store = SqlAlchemyStore(uri, root)  # type: ignore[no-untyped-call]
            if self._probe is not None and (file := sqlite_file(self.tracking_uri)).exists():
                # MLflow has an engine for all stores of a kind and URI.
                models = SqlAlchemyModelStore(uri)  # type: ignore[no-untyped-call]
                self._opened = OpenedFile(file, (store.engine, models.engine))
        return MlflowClient(uri, uri)

    def _experiment_id(self) -> str:
        if (known := self._find_experiment()) is not None:
            return known
        location = None if self.is_remote else self._artifact_root.absolute().as_uri()
        try:
            return self._call(
                "creating the experiment",
                lambda: str(self._client.create_experiment(EXPERIMENT, artifact_location=location)),
            )
        except RegistryError:
            if (known := self._find_experiment()) is None:
                raise
            return known  # another process was quicker

    def _default_root(self) -> str | None:
        """Returns the artifact root of the server or database: the parent of its first experiment's
        folder."""
        try:
            first = self._call(
                "looking up the default experiment", lambda: self._client.get_experiment("0")
            )
        except NotFoundError:
            return None
        return str(first.artifact_location).rpartition("/")[0]

    def _find_experiment(self) -> str | None:
        found = self._call(
            "looking up the experiment", lambda: self._client.get_experiment_by_name(EXPERIMENT)
        )
        return None if found is None else str(found.experiment_id)

    def _pages(
        self, action: str, search: Callable[[str | None], PagedList[T]]
    ) -> Iterator[PagedList[T]]:
        page = self._call(action, lambda: search(None))
        yield page
        while token := page.token:
            page = self._call(action, partial(search, token))
            yield page

    def _call(self, action: str, function: Callable[[], T]) -> T:
        if self._opened is not None:
            self._opened.follow()
        limited = function if self._answers is None else partial(self._answers.call, function)
        return call(f"MLflow at {shown_uri(self.tracking_uri)}, {action}", limited)


def upload(repository: ArtifactRepository, path: Path, folder: str | None, link: bool) -> None:
    """Uploads a file. `link`: by hardlink into a local store, if the file system allows it."""
    if link and isinstance(repository, LocalArtifactRepository):
        target = Path(repository.artifact_dir, folder or "", path.name)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path.resolve(), target)
            return
        except OSError:  # another file system: the file must be copied
            target.unlink(missing_ok=True)
    call(f"storing {path.name}", lambda: repository.log_artifact(str(path), folder))  # type: ignore[no-untyped-call]


def shown_uri(uri: str) -> str:
    """Returns the URI of a database or server without its password."""
    head, separator, tail = uri.rpartition("@")
    if not separator or "://" not in head:
        return uri
    scheme, _, user = head.partition("://")
    return f"{scheme}://{user.partition(':')[0]}@{tail}"


def default_artifact_root(tracking_uri: str) -> Path:
    if tracking_uri.startswith("sqlite:"):
        return sqlite_file(tracking_uri).parent / "artifacts"
    if urlsplit(tracking_uri).scheme in ("http", "https"):
        return Path()  # the server decides; never used
    raise RegistryError(
        f"{shown_uri(tracking_uri)} needs an artifact root, registry.artifact_root or "
        "LORAPLEX_ARTIFACT_ROOT: a database cannot store files"
    )

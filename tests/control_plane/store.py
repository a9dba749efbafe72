"""A real MLflow store on SQLite for all orders of a process, reset between them; its content is
also read directly, without MLflow and without the code under test.

After a reset it contains the bases alpha and beta, adapters that no order changes (`a-calm`,
`calm`, `z-calm`), and adapters that orders change (`pirate`, `sql`).
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

from mlflow import MlflowClient
from sqlalchemy import event
from sqlalchemy.engine import Engine

from registry.client import Registry
from registry.entities import content_digest
from registry.errors import RegistryError
from registry.flavor import DATA
from registry.manifest import MAX_BASE_BYTES, scan_folder
from registry.sqlite_database import ChangeProbe, Marker
from tests.registry_helpers import (
    adapter_folder,
    base_folder,
    embedded_uri,
    register_adapter,
    register_base,
)

PREFIX = "loraplex."
BASES = ("alpha", "beta", "gamma")
CALM = ("a-calm", "calm", "z-calm")  # adapters of alpha that no step changes
_TABLES = (
    "registered_models",
    "registered_model_tags",
    "registered_model_aliases",
    "model_versions",
    "model_version_tags",
    "logged_models",
    "logged_model_params",
    "logged_model_tags",
)


@dataclass(slots=True)
class TrueVersion:
    source: str
    tags: dict[str, str] = field(default_factory=dict)
    created_ms: int = 0


@dataclass(slots=True)
class TrueModel:
    tags: dict[str, str] = field(default_factory=dict)
    aliases: dict[str, int] = field(default_factory=dict)
    versions: dict[int, TrueVersion] = field(default_factory=dict)


Truth = dict[str, TrueModel]


class Database:
    """The store of a process. `folder` stays; each order resets it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.uri = embedded_uri(folder)
        self.client = MlflowClient(self.uri, self.uri)
        registry = Registry(self.uri)
        for base in ("alpha", "beta"):
            register_base(registry, folder / "made", base, base.encode())
        for name, base in (*((calm, "alpha") for calm in CALM), ("sql", "beta")):
            register_adapter(registry, folder / "made", name, name.encode(), base)
        register_adapter(registry, folder / "made", "pirate", b"one", "alpha")
        register_adapter(registry, folder / "made", "pirate", b"two", "alpha", alias=None)
        catalog = registry.snapshot()
        # (name, digest, source) of all versions.
        self.begun_with = {
            (one.name, one.digest, one.source) for one in (*catalog.bases, *catalog.adapters)
        }
        self._file = folder / "mlflow.db"
        self._begin = folder / "begin.db"
        shutil.copy(self._file, self._begin)
        self._probe = ChangeProbe(self._file)
        self._stored = set((folder / "artifacts").glob("models/*"))
        assert self._stored
        self.digest_at = cache(_digest_at)

    def reset(self) -> None:
        with contextlib.closing(sqlite3.connect(self._file)) as connection:
            connection.execute("PRAGMA synchronous=OFF")
            connection.execute("ATTACH ? AS begin", (str(self._begin),))
            for table in _TABLES:
                connection.execute(f"DELETE FROM main.{table}")
                connection.execute(f"INSERT INTO main.{table} SELECT * FROM begin.{table}")
            connection.commit()
        shutil.rmtree(self.folder / "plain", ignore_errors=True)
        for stored in set((self.folder / "artifacts").glob("models/*")) - self._stored:
            shutil.rmtree(stored)
        self.digest_at.cache_clear()

    def marker(self) -> Marker | None:
        """A marker that changes with any write."""
        return self._probe.marker()

    def truth(self) -> Truth:
        """The models in MLflow's tables now, without deleted versions."""
        found: Truth = {}
        with contextlib.closing(sqlite3.connect(self._file)) as connection:
            for (name,) in connection.execute("SELECT name FROM registered_models"):
                found[name] = TrueModel()
            query = "SELECT name, key, value FROM registered_model_tags"
            for name, key, value in connection.execute(query):
                found[name].tags[key] = value
            query = "SELECT name, alias, version FROM registered_model_aliases"
            for name, alias, version in connection.execute(query):
                found[name].aliases[alias] = int(version)
            query = (
                "SELECT name, version, source, creation_time FROM model_versions "
                "WHERE current_stage != 'Deleted_Internal'"
            )
            for name, version, source, created_ms in connection.execute(query):
                found[name].versions[int(version)] = TrueVersion(source, {}, created_ms)
            query = "SELECT name, version, key, value FROM model_version_tags"
            for name, version, key, value in connection.execute(query):
                if name in found and int(version) in found[name].versions:
                    found[name].versions[int(version)].tags[key] = value
        return found

    def plain_folder(self, content: str, base: str) -> str:
        """The URI of an adapter's files as MLflow's own calls store it; equal content has an equal
        URI."""
        folder = self.folder / "plain" / f"{content}-{base}"
        if not folder.exists():
            adapter_folder(folder, content.encode(), base=f"organisation/{base}")
        return folder.as_uri()

    def made_folder(self, kind: str, content: str, base: str = "alpha") -> Path:
        """The arguments of `loraplex register`."""
        folder = self.folder / "made" / f"{kind}-order-{content}-{base}"
        if not folder.exists() and kind == "base":
            base_folder(folder, content.encode())
        elif not folder.exists():
            adapter_folder(folder, content.encode(), base=f"organisation/{base}")
        return folder


def _digest_at(source: str) -> str | None:
    """The digest of the files at a place; None: no files that can be served."""
    folder = Path(unquote(urlsplit(source).path))
    for root in (folder / DATA, folder):
        for required in ("adapter_config.json", "config.json"):
            if (root / required).is_file():
                try:
                    return content_digest(scan_folder(root, required, MAX_BASE_BYTES))
                except RegistryError:
                    return None
    return None


@contextlib.contextmanager
def quick_sqlite() -> Iterator[None]:
    """Turns off waiting for the disk: the store need not survive a crash."""

    def forget_disk(connection: sqlite3.Connection, _: object) -> None:
        connection.execute("PRAGMA synchronous=OFF")

    event.listen(Engine, "connect", forget_disk)
    try:
        yield
    finally:
        event.remove(Engine, "connect", forget_disk)

"""The values that travel between the manager, the ingresses and the engine replicas, and where
files and engines come from. Frozen; ignorant of HTTP. `Sources` is the seam for tests.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from registry.cache import CacheStats
from registry.catalog import Catalog
from registry.entities import AdapterVersion, BaseVersion
from serve_app.config import MigrationArgs, ModelArgs

DEFAULT_MIGRATION = MigrationArgs()


class RegistryReader(Protocol):
    """What serving asks of a registry. All but `release` block: call them in a thread."""

    def snapshot(self) -> Catalog: ...

    def set_alias(self, name: str, alias: str, version: int | None) -> None:
        """None removes it."""
        ...

    def set_setting(self, name: str, key: str, value: str | None) -> None:
        """Of a registered model; `key`: one of `registry.listing.SETTINGS`; None removes it."""
        ...

    def ensure_webhook(self, url: str, secret: str) -> None:
        """That the registry calls `url` when something changes; RegistryError where it cannot."""
        ...

    def register_adapter(self, folder: Path, name: str, base: str, alias: str) -> None:
        """Checked as `loraplex register adapter` does, its default alias set. RegistrationError."""
        ...

    def check_adapter(self, version: AdapterVersion) -> None:
        """Finds out what a version changes, or why it cannot be served, and keeps it with the
        version. RegistryError: no verdict."""
        ...

    def fetch(self, version: BaseVersion | AdapterVersion) -> Path:
        """A verified local folder with the version's files, kept until `release` or the end of
        this process."""
        ...

    def release(self, folder: Path) -> None:
        """Gives back what `fetch` returned, once for each time."""
        ...

    def verify(self, version: BaseVersion | AdapterVersion) -> bool:
        """Reads the local copy again. False: it was rotten and is gone, fetch it anew."""
        ...

    def local_digests(self) -> frozenset[str]:
        """Whose files lie in this node's cache."""
        ...

    def cache_stats(self) -> CacheStats: ...

    def stored_catalog(self) -> Catalog | None:
        """The last good one that this node stored, of this registry; None where there is none."""
        ...

    def store_catalog(self, catalog: Catalog) -> None:
        """For the next start while the registry is away. Raises OSError."""
        ...


def open_named(path: str, *arguments: object) -> RegistryReader:
    """`path`: "module:class", imported here and not where this is handed on: MLflow takes 2.5 s."""
    registry: RegistryReader = pkgutil.resolve_name(path)(*arguments)
    return registry


@dataclass(frozen=True, slots=True)
class Sources:
    """Where a process gets its registry and its engine. Each opens its own."""

    open_registry: Callable[[], RegistryReader]
    # "module:function", EngineConfig -> EngineInterface. A path, so that only the engine's process
    # imports torch: 220 MB and 0.8 s for each of the others.
    engine_factory: str
    home: Path | None = None  # for keys that outlive processes; None: they end with theirs


BaseSource = Literal["file", "registry"]  # of the wish to serve it; the file's goes first
BaseState = Literal["starting", "running", "asleep", "draining", "failed"]


@dataclass(frozen=True, slots=True)
class BaseSpec:
    """One base application: what an engine replica is told at its start."""

    base: BaseVersion
    model: ModelArgs
    device: str  # "cpu" or "cuda", decided by the manager, which sees the cluster
    app_name: str
    source: BaseSource = "file"


@dataclass(frozen=True, slots=True)
class ColdStart:
    """What a request for a base that sleeps gets."""

    is_refused: bool = False  # at once; else it waits
    timeout_s: float = 300.0
    max_waiting: int = 256  # an ingress replica


@dataclass(frozen=True, slots=True)
class ServedBase:
    """A base that is to be served as the manager sees it now, or the version before it."""

    base: BaseVersion
    app_name: str
    is_running: bool  # at least one replica answers, and it is to get requests
    message: str = ""  # why not
    state: BaseState = "starting"
    is_waking: bool = False  # it slept, and a request waits for its start
    rest_id: float = 0.0  # which falling asleep; ingresses say it back
    is_awaited: bool = True  # the server is not ready without it
    replaced_by: str = ""  # digest of its next version: this one stands in until that one answers
    deployed_s: float = 0.0  # tells two deployments of one application apart
    start_s: float | None = None  # what its last start took
    cold_start: ColdStart = ColdStart()
    migration: MigrationArgs = DEFAULT_MIGRATION


@dataclass(frozen=True, slots=True)
class BaseLine:
    """A base as an operator is told of it."""

    name: str
    version: int | None  # None: its setting is wrong, so that no version is served
    state: BaseState
    message: str
    source: BaseSource
    replicas: int  # that run
    idle_s: float | None  # None: not running
    start_s: float | None
    idle_timeout_s: float | None
    cold_start: str
    application: str
    digest: str
    wanted_replicas: int = 0  # with those that start or wait for room
    draining_replicas: int = 0
    min_replicas: int = 0
    max_replicas: int = 0


@dataclass(frozen=True, slots=True)
class CanaryState:
    """What the manager decided about canaries, beyond what the registry says."""

    # (name, digest, reason) of those rolled back; the registry may not have taken it yet.
    vetoes: tuple[tuple[str, str, str], ...] = ()
    num_rollbacks: tuple[tuple[str, int], ...] = ()  # by adapter, since the manager's start


@dataclass(frozen=True, slots=True)
class PlatformView:
    """Everything an ingress resolves names with. A new revision replaces the whole."""

    revision: str
    catalog: Catalog
    bases: tuple[ServedBase, ...]
    missing: tuple[str, ...]  # configured names that the registry does not have
    is_one_node: bool  # then the side stream stays on loopback
    registry_error: str | None  # set while the registry is down; the catalog is the last good one
    canary: CanaryState = CanaryState()
    cache_salt_key: bytes = field(default=b"", repr=False)  # secret; see `cache_salt`
    is_draining: bool = False  # the server is being stopped: nothing new is taken

    @property
    def is_ready(self) -> bool:
        if self.is_draining:
            return False
        return not self.missing and all(base.is_running for base in self.bases if base.is_awaited)

"""The values that ingresses and engine replicas receive from the manager: the view of the
platform, the specification of each base, and `Sources`, from which a process opens its registry and
its engine (tests put their own there). Frozen; ignorant of HTTP.
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
from serve_app.config import ModelArgs


class RegistryReader(Protocol):
    """The part of a registry that serving uses. All methods but `release` block: call them in a
    thread."""

    def snapshot(self) -> Catalog: ...

    def set_alias(self, name: str, alias: str, version: int | None) -> None:
        """Sets an alias; `version` None removes it."""

    def set_setting(self, name: str, key: str, value: str | None) -> None:
        """Sets a setting of a registered model; `key` is one of `registry.listing.SETTINGS`, a
        value None removes it."""

    def ensure_webhook(self, url: str, secret: str) -> None:
        """Has the registry call `url` after each change. Raises RegistryError if it cannot."""

    def register_adapter(self, folder: Path, name: str, base: str, alias: str) -> None:
        """Checks and registers as `loraplex register adapter` does, and sets the default alias.
        Raises RegistrationError."""

    def check_adapter(self, version: AdapterVersion) -> None:
        """Determines the effect of a version, or the reason to refuse it, and stores the verdict in
        its tags. The base is run only if that lasts seconds, on the CPU, at the lowest priority.
        Raises RegistryError if the check reached no verdict."""

    def fetch(self, version: BaseVersion | AdapterVersion) -> Path:
        """Returns a verified local folder with the version's files, kept until `release` or the end
        of this process."""

    def release(self, folder: Path) -> None:
        """Gives back a folder, once per `fetch`."""

    def verify(self, version: BaseVersion | AdapterVersion) -> bool:
        """Reads the local copy again. Returns False if it was corrupt: it is deleted, and `fetch`
        downloads it again."""

    def local_digests(self) -> frozenset[str]:
        """The versions whose files are in this node's cache."""

    def cache_stats(self) -> CacheStats: ...

    def stored_catalog(self) -> Catalog | None:
        """The last good catalog of this registry that this node stored, if any."""

    def store_catalog(self, catalog: Catalog) -> None:
        """Stores a catalog for the next start while the registry is down. Raises OSError."""


def open_named(path: str, *arguments: object) -> RegistryReader:
    """Calls the class at `path`, "module:class". It is imported here, in the process that uses it:
    importing MLflow lasts 2.5 s."""
    registry: RegistryReader = pkgutil.resolve_name(path)(*arguments)
    return registry


@dataclass(frozen=True, slots=True)
class Sources:
    """The sources of a process's registry and engine; each process opens its own."""

    open_registry: Callable[[], RegistryReader]
    # "module:function", EngineConfig -> EngineInterface. A path, so that only the engine's process
    # imports torch: 220 MB and 0.8 s for each of the others.
    engine_factory: str
    home: Path | None = None  # of keys that outlive processes; None: keys last as long as a process
    metrics_to_ray: bool = False  # engine replicas export their metrics through Ray, too


BaseSource = Literal["file", "registry"]  # of its configuration; the file takes precedence
BaseState = Literal["starting", "running", "asleep", "draining", "failed"]


@dataclass(frozen=True, slots=True)
class BaseSpec:
    """A base application: the argument of its engine replicas."""

    base: BaseVersion
    model: ModelArgs
    device: str  # "cpu" or "cuda", chosen by the manager, which sees the cluster
    app_name: str
    source: BaseSource = "file"


@dataclass(frozen=True, slots=True)
class ServedBase:
    """A base as the manager publishes it to ingresses: a wanted version, or the version that stands
    in for it until it runs."""

    base: BaseVersion
    app_name: str
    state: BaseState
    model: ModelArgs  # as configured; of a version that stands in: the wanted version's
    message: str = ""  # why it does not run
    is_waking: bool = False  # it slept, and a request waits for its start
    sleep_epoch: float = 0.0  # identifies this falling asleep; ingresses report it back
    is_awaited: bool = True  # the server is not ready without it
    replaced_by: str = ""  # digest of the version that it stands in for
    deployed_s: float = 0.0  # distinguishes two deployments of an application
    start_s: float | None = None  # duration of the last start
    is_refused: bool = False  # the engine refuses it: another start does not help

    @property
    def is_running(self) -> bool:
        """True if at least one replica answers and the base receives requests."""
        return self.state == "running"


@dataclass(frozen=True, slots=True)
class BaseLine:
    """A base as operators see it: an entry of GET /admin/bases."""

    name: str
    version: int | None  # None: its setting is refused, so that it means no version
    state: BaseState
    message: str
    source: BaseSource
    replicas: int = 0  # running
    idle_s: float | None = None  # None: not running
    start_s: float | None = None  # duration of the last start
    idle_timeout_s: float | None = None
    cold_start: str = ""
    application: str = ""
    digest: str = ""
    wanted_replicas: int = 0  # includes replicas that start or wait for a node
    draining_replicas: int = 0
    min_replicas: int = 0
    max_replicas: int = 0
    # As configured; empty and 0 where the setting is refused.
    kv_cache_dtype: str = ""
    quantization: str = ""
    lora_dtype: str = ""
    tensor_parallel_size: int = 0


@dataclass(frozen=True, slots=True)
class BaseLines:
    """The answer of GET /admin/bases."""

    bases: tuple[BaseLine, ...]


@dataclass(frozen=True, slots=True)
class CanaryState:
    """The manager's decisions about canaries that the registry does not show."""

    # (name, digest, reason) of canaries rolled back; the registry may not have stored it yet.
    vetoes: tuple[tuple[str, str, str], ...] = ()
    num_rollbacks: tuple[tuple[str, int], ...] = ()  # by adapter, since the manager's start


@dataclass(frozen=True, slots=True)
class PlatformView:
    """Everything that an ingress resolves names with. A new revision replaces all of it."""

    revision: str
    catalog: Catalog
    bases: tuple[ServedBase, ...]
    missing: tuple[str, ...]  # configured names that the registry does not have
    is_one_node: bool  # then the side stream uses loopback
    registry_error: str | None  # set while the registry is down; then the catalog is the last good
    canary: CanaryState = CanaryState()
    cache_salt_key: bytes = field(default=b"", repr=False)  # secret; see `cache_salt`
    is_draining: bool = False  # the server is stopping: new requests are refused

    @property
    def is_ready(self) -> bool:
        if self.is_draining:
            return False
        return not self.missing and all(base.is_running for base in self.bases if base.is_awaited)

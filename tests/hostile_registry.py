"""A manager in this process over a registry in which any client may write every tag, and hostile
values for the tags.

MLflow's entities come from memory, the code after the listing is real; of Serve, only the
controller is replaced, by one that processes each application up to its wire format.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
from mlflow.entities.model_registry import ModelVersion, RegisteredModel
from mlflow.entities.model_registry.registered_model_alias import RegisteredModelAlias
from mlflow.entities.model_registry.registered_model_tag import RegisteredModelTag
from mlflow.store.artifact.artifact_repo import ArtifactRepository

from registry import listing
from registry.cache import CacheStats
from registry.catalog import Catalog
from registry.catalog_file import CatalogFile
from registry.client import Registry
from registry.entities import AdapterVersion, BaseVersion
from registry.errors import RegistryError, RegistryUnavailableError
from serve_app.config import (
    AutoscalingArgs,
    EngineArgs,
    MigrationArgs,
    ModelArgs,
    PlatformArgs,
    RegistryArgs,
    RouterArgs,
)
from serve_app.control import fleet, manager
from serve_app.control.manager import Manager
from serve_app.platform_view import Sources

BASE_DIGEST = "b" * 64

TEXTS = (
    *("", " ", "\0", "\n\r\t\x1b[31m", "x", "true", "null", "None", "-1", "0", "1", "0.5", "nan"),
    *("inf", "-inf", "1e400", "9" * 400, "9" * 5000, "-" + "9" * 400, "0x10", "1_0", "٣", "²"),
    *("\ud800", "a\udfffb", "\U0010ffff" * 50, "é" * 3000, "x" * 100_000, "../../etc/passwd"),
    *("champion", "good", "good@1", "a:b@c", "@", ":", "unittest.__main__:x", "os:system"),
    *("a" * 64, "b" * 64, "A" * 64, "b" * 63 + "\n", "b" * 65, ",".join("x" * 9999)),
    *("[" * 100_000, '{"a":' * 50_000, "{", "[]", "{}", '"x"', "[" * 900 + "]" * 900),
    *('{"version": 1, "reason": [[[]]]}', '{"version": NaN}', '{"version": ' + "9" * 5000 + "}"),
)
JSON_VALUES = (
    *("null", "true", "-1", "0", "1", "0.5", "NaN", "Infinity", "-Infinity", "1e400", "1e308"),
    *("9" * 19, "9" * 400, "-" + "9" * 400, '""', '"x"', '"' + "9" * 400 + '"', '"1e999GiB"'),
    *('"٣GB"', '"\\ud800"', "[]", "{}", '[[[["x"]]]]', '{"\\ud800": 1}', '{"": {}}', '"cuda"'),
    *('"unittest.__main__:x"', '"no_such_module_at_all:X"', '"os:system"', '"expected_ttft"'),
)


def hostile_tags() -> Iterator[tuple[str, str]]:
    """Every setting and every tag that the listing reads, with every text; every field of the
    setting that adds a base, with every JSON value."""
    keys = [listing.PREFIX + key for key in listing.SETTINGS]
    keys += [value for name, value in vars(listing).items() if _is_tag(name, value)]
    keys += listing.EFFECT_TAGS.values()
    yield from itertools.product(dict.fromkeys(keys), TEXTS)
    for path, value in itertools.product(_paths(), JSON_VALUES):
        *outer, name = path
        text = f"{json.dumps(name)}: {value}"
        for key in reversed(outer):
            text = f"{json.dumps(key)}: {{{text}}}"
        yield listing.PREFIX + "serve", f"{{{text}}}"


def _is_tag(name: str, value: object) -> bool:
    return name.isupper() and isinstance(value, str) and value.startswith(listing.PREFIX)


def _paths() -> Iterator[tuple[str, ...]]:
    yield from ((name,) for name in (*ModelArgs.model_fields, "unknown", "\n"))
    inner = {
        "engine": EngineArgs,
        "router": RouterArgs,
        "autoscaling": AutoscalingArgs,
        "migration": MigrationArgs,
    }
    for key, kind in inner.items():
        yield from ((key, name) for name in kind.model_fields)
    yield from (("router", "options", name) for name in ("seed", "num_random", "tie_s", "", "x"))


@dataclass
class Store:
    """The results of `MlflowStore`, from memory. `tags`: model -> its tags; each model has a
    version with the same tags."""

    champion: int = 1
    tags: dict[str, dict[str, str]] = field(default_factory=dict)
    is_away: bool = False

    def marker(self) -> None:
        return None

    def listing(self) -> tuple[list[RegisteredModel], list[ModelVersion]]:
        if self.is_away:
            raise RegistryUnavailableError("the store is away")
        return list(self._models()), list(self._versions())

    def version(self, name: str, version: int) -> ModelVersion:
        raise RegistryUnavailableError("no version is read alone here")

    def _models(self) -> Iterator[RegisteredModel]:
        alias = RegisteredModelAlias("champion", str(self.champion))  # type: ignore[no-untyped-call]
        yield _model("good-base", {})
        yield _model("good", {}, [alias])
        for name, tags in self.tags.items():
            yield _model(name, tags)

    def _versions(self) -> Iterator[ModelVersion]:
        base = {listing.KIND: "base", listing.DIGEST: BASE_DIGEST}
        yield _version("good-base", 1, base)
        for number in (1, 2):
            mine = {listing.KIND: "adapter", listing.DIGEST: str(number) * 64}
            mine |= {listing.BASE: "good-base", listing.BASE_DIGEST: BASE_DIGEST}
            yield _version("good", number, mine)
        for number, (model, tags) in enumerate(self.tags.items()):
            kind = "base" if number % 2 else "adapter"
            whole = {listing.KIND: kind, listing.DIGEST: f"{number:064x}"}
            whole |= {listing.BASE: "good-base", listing.BASE_DIGEST: BASE_DIGEST}
            yield _version(model, 1, whole | tags)

    def version_files(self, name: str, version: int) -> ArtifactRepository:
        raise RegistryUnavailableError("no files are here")


def _model(
    name: str, tags: dict[str, str], aliases: list[RegisteredModelAlias] | None = None
) -> RegisteredModel:
    pairs = [RegisteredModelTag(key, value) for key, value in tags.items()]  # type: ignore[no-untyped-call]
    return RegisteredModel(name, tags=pairs, aliases=aliases or [])  # type: ignore[no-untyped-call]


def _version(name: str, number: int, tags: dict[str, str]) -> ModelVersion:
    made = ModelVersion(name, str(number), 0, source="nowhere")  # type: ignore[no-untyped-call]
    made._tags = dict(tags)
    return made


class Reader:
    """Implements `platform_view.RegistryReader` over a `Store`."""

    def __init__(self, store: Store, folder: Path) -> None:
        self._folder = folder
        self._registry = Registry(f"sqlite:///{folder}/unused.db")
        self._registry._store = store  # type: ignore[assignment]

    def snapshot(self) -> Catalog:
        return self._registry.snapshot()

    def set_alias(self, name: str, alias: str, version: int | None) -> None:
        raise RegistryError("read only")

    def set_setting(self, name: str, key: str, value: str | None) -> None:
        raise RegistryError("read only")

    def ensure_webhook(self, url: str, secret: str) -> None:
        raise RegistryError("read only")

    def register_adapter(self, folder: Path, name: str, base: str, alias: str) -> None:
        raise RegistryError("read only")

    def fetch(self, version: BaseVersion | AdapterVersion) -> Path:
        raise RegistryUnavailableError("no files are here")

    def release(self, folder: Path) -> None:
        pass

    def verify(self, version: BaseVersion | AdapterVersion) -> bool:
        return True

    def local_digests(self) -> frozenset[str]:
        return frozenset()

    def stored_catalog(self) -> Catalog | None:
        return CatalogFile(self._folder / "last.json", "here").read()

    def check_adapter(self, version: AdapterVersion) -> None:
        pass

    def store_catalog(self, catalog: Catalog) -> None:
        CatalogFile(self._folder / "last.json", "here").write(catalog)

    def cache_stats(self) -> CacheStats:
        return CacheStats(0, None, 0, 0, 0, 0, 0)


class Controller:
    """Serve's controller: accepts applications that Serve's wire format accepts; they run at
    once."""

    RunTarget = staticmethod(lambda **fields: SimpleNamespace(**fields))

    def __init__(self) -> None:
        self.apps: dict[str, SimpleNamespace] = {}

    def status(self) -> SimpleNamespace:
        return SimpleNamespace(applications=dict(self.apps))

    def run_many(self, targets: list[SimpleNamespace], wait_for_applications_running: bool) -> None:
        for target in targets:
            deployment = target.target._bound_deployment
            deployment._deployment_config.to_proto_bytes()
            num_replicas = deployment._deployment_config.num_replicas
            engine = SimpleNamespace(replica_states={"RUNNING": num_replicas}, message="")
            self.apps[target.name] = SimpleNamespace(
                status="RUNNING",
                message="",
                last_deployed_time_s=1.0,
                deployments={"engine": engine},
            )

    def delete(self, name: str, _blocking: bool) -> None:
        self.apps.pop(name)

    def scale(self, name: str, num_replicas: int) -> None:
        self.apps[name].deployments["engine"].replica_states = {"RUNNING": num_replicas}


@dataclass
class World:
    store: Store
    folder: Path
    controller: Controller

    async def start(self, models: tuple[str, ...] = ("good-base",)) -> Manager:
        made = Manager.__new__(Manager)
        sources = Sources(lambda: Reader(self.store, self.folder), "no:engine")
        args = PlatformArgs(registry=RegistryArgs(poll_interval_s=0.01))
        await made.__init__(args, sources)  # type: ignore[misc]
        made._plans._send = _accept  # type: ignore[assignment]
        await made.reconfigure({"models": [{"name": name} for name in models]})
        return made


async def _accept(*_: object) -> int:
    return 0


def fake_controller(patch: pytest.MonkeyPatch) -> Controller:
    """Returns the controller that fleets call from now on."""
    controller = Controller()
    patch.setattr(fleet, "serve", controller)
    patch.setattr(fleet, "read_status", lambda: controller.status())
    patch.setattr(fleet, "scale", controller.scale)
    return controller


def make_world(folder: Path, patch: pytest.MonkeyPatch) -> World:
    controller = fake_controller(patch)
    patch.setattr(fleet, "_FIRST_REPORT_S", 0.05)
    patch.setattr(manager, "_STATUS_POLL_S", 0.02)
    patch.setattr(manager, "_SETTLED_POLL_S", 0.02)
    patch.setattr("serve_app.control.watcher.MIN_PAUSE_S", 0.01)
    nodes = SimpleNamespace(cluster_resources=dict, nodes=lambda: [{"Alive": True}])
    patch.setattr(manager, "ray", nodes)
    return World(Store(), folder, controller)


def stop(made: Manager) -> None:
    for task in (made._reconciling, made._watching):
        if task is not None:
            task.cancel()


async def follows(made: Manager, world: World, timeout_s: float = 120.0) -> None:
    """Moves the good adapter's alias and returns when a published view has it."""
    world.store.champion = 3 - world.store.champion
    revision = ""
    async with asyncio.timeout(timeout_s):
        while True:
            view = await made.view(revision, timeout_s)
            assert view is not None
            revision = view.revision
            found = view.catalog.resolve("good").adapter
            if found is not None and found.version == world.store.champion:
                return

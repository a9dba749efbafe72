"""Changes of bases and adapters: which are reverted, read again, or carried out."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from registry.catalog import Catalog, DefaultAliases
from registry.entities import AdapterVersion, DanglingAlias
from registry.errors import (
    NameTakenError,
    NotFoundError,
    RegistrationError,
    RegistryError,
    RegistryUnavailableError,
)
from serve_app.api import lora
from serve_app.control.adapter_admin import AdapterAdmin
from serve_app.control.base_admin import change_base
from serve_app.control.base_sleep import ScaleToZero
from serve_app.control.fleet import Fleet
from serve_app.control.manager import Manager
from serve_app.errors import ApiError, ConflictError, ServiceUnavailableError
from serve_app.messages import AdapterChange, BaseActivity, BaseChange, EngineOutcome, IngressReport
from serve_app.platform_view import BaseLine
from tests.fakes_registry import FolderRegistry
from tests.hostile_registry import Reader, World, follows, make_world, stop

# -- loads that the engines cannot carry out -------------------------------------------------------


class Loads:
    """The routes' own functions over a manager's `AdapterAdmin`; `outcomes` stands for the engines'
    results of a preload."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, alias: str = "champion") -> None:
        self.folder = folder
        self.aliases = DefaultAliases(alias)
        self.registry = FolderRegistry(folder)
        self.registry.write(Catalog((self.registry.add_base("b"),)))
        self.admin = AdapterAdmin(lambda: self.registry, self.look)
        self.outcomes: list[EngineOutcome] | Exception = [EngineOutcome("e1", True, "disk")]
        patch.setattr(lora, "change_adapter", self._change)
        patch.setattr(lora, "call_engines", self._preload)
        patch.setattr(lora, "find_adapter", lambda *_: (None, self.meaning("x")))
        patch.setattr(lora, "wait_for_view", self._nothing)

    def look(self) -> Catalog:
        return replace(self.registry.snapshot(), default_aliases=self.aliases)

    def meaning(self, name: str) -> AdapterVersion:
        found = self.look().resolve(name).adapter
        assert found is not None
        return found

    async def load(self, folder: str, *, in_place: bool = False) -> None:
        path = self.folder / folder
        path.mkdir(exist_ok=True)
        (path / "adapter_config.json").write_text("{}")
        gateway: Any = SimpleNamespace()
        wanted = AdapterChange("load", "x", str(path), "b@1", in_place)
        loaded = await self._change(None, wanted)
        assert loaded is not None
        undo = AdapterChange("undo_load", "x", may_replace=in_place, version=loaded.version)
        await lora._preload(gateway, "x", undo)

    async def _change(self, _: object, wanted: AdapterChange) -> AdapterVersion | None:
        return await self.admin.change(wanted)

    async def _preload(self, *_: object) -> list[EngineOutcome]:
        if isinstance(self.outcomes, Exception):
            raise self.outcomes
        return self.outcomes

    async def _nothing(self, *_: object) -> None:
        pass


FAILURES = pytest.mark.parametrize(
    "failure",
    [
        [EngineOutcome("e1", True, "disk"), EngineOutcome("e2", False, "no room")],
        ServiceUnavailableError("The engines of 'b' do not respond.", 5),
    ],
)


@FAILURES
@pytest.mark.parametrize("alias", ["champion", "prod"])
async def test_a_load_in_place_that_fails_leaves_the_name_as_it_was(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failure: list[EngineOutcome] | Exception,
    alias: str,
) -> None:
    loads = Loads(tmp_path, monkeypatch, alias)
    await loads.load("one")
    before = loads.meaning("x")
    good, loads.outcomes = loads.outcomes, failure
    with pytest.raises((ApiError, ServiceUnavailableError)):
        await loads.load("two", in_place=True)
    assert loads.meaning("x").digest == before.digest
    assert loads.look().setting("x", "runtime") == "loaded"
    loads.outcomes = good
    await loads.load("three", in_place=True)
    assert loads.meaning("x").version == 3


@FAILURES
async def test_a_first_load_that_fails_leaves_no_name_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: list[EngineOutcome] | Exception
) -> None:
    loads = Loads(tmp_path, monkeypatch)
    loads.outcomes = failure
    with pytest.raises((ApiError, ServiceUnavailableError)):
        await loads.load("one")
    with pytest.raises(NotFoundError):
        loads.meaning("x")


async def test_an_undone_load_takes_nothing_back_from_who_moved_the_name_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = Loads(tmp_path, monkeypatch)
    await loads.load("one")
    await loads.load("two", in_place=True)
    await loads.load("three", in_place=True)
    loads.registry.set_alias("x", "champion", 2)
    undo = AdapterChange("undo_load", "x", may_replace=True, version=3)
    await loads.admin.change(undo)
    assert loads.meaning("x").version == 2
    # Another manager, which has no record of the earlier version of the name.
    await AdapterAdmin(lambda: loads.registry, loads.look).change(undo)
    assert loads.meaning("x").version == 2


@pytest.mark.parametrize("then", ["load", "unload"])
async def test_a_load_that_could_not_be_marked_can_be_given_again_or_unloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """The registry went away after the registration; the name is served all the same."""

    def away(*_: object) -> None:
        raise RegistryUnavailableError("away")

    loads = Loads(tmp_path, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(FolderRegistry, "set_setting", away)
        with pytest.raises(RegistryUnavailableError):
            await loads.load("one")
    if then == "load":
        await loads.load("one")
        assert loads.look().setting("x", "runtime") == "loaded"
    await loads.admin.change(AdapterChange("unload", "x"))
    assert loads.look().setting("x", "runtime") == "unloaded"


@pytest.mark.parametrize("can_look", [False, True])
async def test_a_load_whose_command_lost_the_registry_can_be_given_again_or_unloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_look: bool
) -> None:
    """The command that registers fails with its last line, whatever the reason; what it made may
    be left."""
    loads = Loads(tmp_path, monkeypatch)
    register, look = FolderRegistry.register_adapter, loads.look
    is_away = False

    def losing(registry: FolderRegistry, *arguments: Any) -> None:
        nonlocal is_away
        register(registry, *arguments)
        is_away = not can_look
        raise RegistrationError("MLflow, creating a version: no answer (timed out)")

    def read() -> Catalog:
        if is_away:
            raise RegistryUnavailableError("away")
        return look()

    loads.admin = AdapterAdmin(lambda: loads.registry, read)
    with monkeypatch.context() as patch:
        patch.setattr(FolderRegistry, "register_adapter", losing)
        # A client may try again where the registry is away, and not where it refuses.
        with pytest.raises(RegistrationError if can_look else RegistryUnavailableError):
            await loads.load("one")
    is_away = False
    await loads.admin.change(AdapterChange("unload", "x"))
    assert look().setting("x", "runtime") == "unloaded"


async def test_a_name_of_a_load_that_was_refused_is_not_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays visible for who registers it later."""
    loads = Loads(tmp_path, monkeypatch)
    with pytest.raises(RegistrationError):
        await loads.load("refused")
    loads.registry.register_adapter(tmp_path / "one", "x", "b", "champion")
    await loads.admin.change(AdapterChange("unload", "x"))
    assert loads.meaning("x").version == 1
    assert loads.look().setting("x", "runtime") is None


async def test_a_name_of_a_load_whose_command_did_not_start_is_not_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There was no memory for its process, so nothing was registered."""

    def no_process(*_: object) -> None:
        raise RegistryError("loraplex register cannot be started: no memory")

    loads = Loads(tmp_path, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(FolderRegistry, "register_adapter", no_process)
        with pytest.raises(RegistryError, match="cannot be started"):
            await loads.load("one")
    loads.registry.register_adapter(tmp_path / "one", "x", "b", "champion")
    with pytest.raises(NameTakenError, match="already been loaded"):
        await loads.load("two")
    await loads.admin.change(AdapterChange("unload", "x"))
    assert loads.meaning("x").version == 1
    assert loads.look().setting("x", "runtime") is None


async def test_an_undone_load_leaves_a_name_broken_that_was_broken_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = Loads(tmp_path, monkeypatch)
    await loads.load("one")
    await loads.load("two", in_place=True)
    look = loads.look

    def without_the_second() -> Catalog:
        found = look()
        served = tuple(one for one in found.adapters if one.version != 2)
        lost = [one for one in found.adapters if one.version == 2 and "champion" in one.aliases]
        dangling = tuple(DanglingAlias("x", "champion", one.version, "no files") for one in lost)
        return replace(found, adapters=served, dangling=dangling)

    monkeypatch.setattr(loads, "look", without_the_second)
    loads.outcomes = ServiceUnavailableError("The engines of 'b' do not answer.", 5)
    with pytest.raises(ServiceUnavailableError):
        await loads.load("three", in_place=True)
    with pytest.raises(NotFoundError):
        loads.meaning("x")
    (broken,) = loads.look().dangling
    assert broken.version == 2
    assert loads.look().setting("x", "runtime") == "loaded"


async def test_a_load_that_is_undone_late_takes_nothing_back_from_the_load_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = Loads(tmp_path, monkeypatch)
    await loads.load("one")
    await loads.load("two", in_place=True)
    late = AdapterChange("undo_load", "x", may_replace=False, version=1)
    await loads.admin.change(late)
    assert loads.meaning("x").version == 2
    assert loads.look().setting("x", "runtime") == "loaded"


# -- bases -----------------------------------------------------------------------------------------


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return make_world(tmp_path, monkeypatch)


async def test_a_base_that_was_registered_a_moment_ago_is_added_and_removed_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def set_setting(_: Reader, name: str, key: str, value: str | None) -> None:
        tags = {} if value is None else {f"loraplex.{key}": value}
        world.store.tags = {**world.store.tags, name: tags}

    monkeypatch.setattr(Reader, "set_setting", set_setting)
    monkeypatch.setattr("serve_app.control.fleet._HANDOVER_MAX_S", 0.05)
    made = await world.start()
    await follows(made, world)
    made._watcher._interval_s = 3600.0  # from now on it reads the registry only when it is woken
    await asyncio.sleep(0.05)
    world.store.tags = {"pad": {}, "fresh": {}}
    async with asyncio.timeout(120):
        await made.change_base(BaseChange("add", "fresh"))
        # The next caller sees that the change was carried out.
        (fresh,) = [one for one in await made.bases() if one.name == "fresh"]
        assert (fresh.state, fresh.source) == ("starting", "registry")
        assert fresh.application in world.controller.apps
        assert await made.change_base(BaseChange("remove", "fresh")) is None
        left = {one.state for one in await made.bases() if one.name == "fresh"}
        assert left <= {"draining"}
    stop(made)


def line(version: int, state: Any = "running") -> BaseLine:
    digest = str(version) * 64
    return BaseLine("b", version, state, "", "file", 1, None, None, None, "wait", "", digest)


def fleet_of(*lines: BaseLine) -> tuple[Fleet, ScaleToZero]:
    made, keeper = Fleet.__new__(Fleet), ScaleToZero()
    made.sleep, made.lines = keeper, lines
    for one in lines:
        keeper.step(one.digest, True, None, 0.0)
    return made, keeper


async def order(kind: Any, name: str, fleet: Fleet, folder: Path) -> None:
    registry = FolderRegistry(folder)
    await change_base(BaseChange(kind, name), [], Catalog(), registry, fleet)


async def test_sleep_and_wake_act_on_every_served_version_of_a_base(tmp_path: Path) -> None:
    first, second = line(1), line(2)
    fleet, keeper = fleet_of(first, second, replace(line(3), state="draining"))
    await order("sleep", "b", fleet, tmp_path)
    assert [keeper.phase(one.digest) for one in (first, second)] == ["draining", "draining"]
    await order("wake", "b", fleet, tmp_path)
    assert [keeper.phase(one.digest) for one in (first, second)] == ["awake", "awake"]
    await order("sleep", "b@2", fleet, tmp_path)
    assert [keeper.phase(one.digest) for one in (first, second)] == ["awake", "draining"]
    with pytest.raises(NotFoundError, match="b@9"):
        await order("sleep", "b@9", fleet, tmp_path)


async def test_no_version_of_a_base_sleeps_where_one_has_open_requests(tmp_path: Path) -> None:
    first, second = line(1), line(2)
    fleet, keeper = fleet_of(first, second)
    now_s = asyncio.get_running_loop().time()
    keeper.add_report(IngressReport("one", (BaseActivity(second.digest, 1, 0.0),)), now_s)
    with pytest.raises(ConflictError, match="1 open requests"):
        await order("sleep", "b", fleet, tmp_path)
    assert keeper.phase(first.digest) == "awake"


# -- names -----------------------------------------------------------------------------------------


async def test_a_name_whose_alias_goes_to_a_broken_version_is_served_on_but_not_after_a_restart(
    world: World,
) -> None:
    made = await world.start()
    await follows(made, world)
    before = world.store.champion
    world.store.champion = 9  # the listing shows no version of it that can be served
    for model in ("good", "good-base:good"):
        assert await meaning(made, model) == before
    found = made._read_now().resolve("good").adapter
    assert found is not None
    assert found.version == before
    stop(made)
    restarted = await world.start()
    with pytest.raises(NotFoundError, match="good@champion is version 9"):
        await meaning(restarted, "good")
    stop(restarted)


async def meaning(made: Manager, model: str) -> int:
    """Returns the version of the first view that shows the alias on the broken version."""
    revision = ""
    async with asyncio.timeout(120):
        while (view := await made.view(revision, 30.0)) is None or not view.catalog.dangling:
            revision = "" if view is None else view.revision
    found = view.catalog.resolve(model).adapter
    assert found is not None
    return found.version

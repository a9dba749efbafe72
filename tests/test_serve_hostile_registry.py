"""No tag that a client writes into the registry ends or stalls the manager, or hides a model."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from sqlalchemy.exc import SQLAlchemyError

from registry.catalog import Catalog
from registry.catalog_file import CatalogFile
from registry.entities import BaseVersion, Setting
from registry.listing import PREFIX
from serve_app.canary.split import read_traffic
from serve_app.config import ModelArgs
from serve_app.control import base_plan, manager, watcher
from serve_app.control.manager import Manager
from serve_app.messages import IngressCounts
from serve_app.platform_view import PlatformView
from tests.hostile_registry import TEXTS, Reader, World, follows, hostile_tags, make_world, stop
from tests.registry_helpers import embedded, register_adapter, register_base

_BATCH = 250
SIZE_OF_400_DIGITS = '{"engine": {"kv_cache_bytes": "' + "9" * 400 + '"}}'


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return make_world(tmp_path, monkeypatch)


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not is_true():
            await asyncio.sleep(0.01)


def view_of(made: Manager) -> PlatformView:
    assert made._view is not None
    return made._view


def has_lines(made: Manager) -> bool:
    return bool(made._fleet.lines)


def tracebacks(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.exc_info]


async def test_good_models_are_followed_beside_every_hostile_tag(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base_plan, "MISSING_S", 0.0)
    made = await world.start()
    await follows(made, world)
    every = list(hostile_tags())
    assert len(every) > 2000
    names = ("bad-{}", "bad ({})", "{}\n", "\ud800{}", "x" * 200 + "{}")
    for begin in range(0, len(every), _BATCH):
        batch = every[begin : begin + _BATCH]
        world.store.tags = {
            names[i % 20 if i % 20 < len(names) else 0].format(i): {key: value}
            for i, (key, value) in enumerate(batch)
        }
        await follows(made, world)
        await made.check_health()
        view = view_of(made)
        assert view.missing == ()
        assert view.bases[0].base.name == "good-base"
        assert view.bases[0].is_running
        read_traffic(view.catalog, ("b" * 64,), {})
        assert all(view.catalog.resolve(one.name) for one in view.catalog.entries()[:1])
    assert tracebacks(caplog) == []
    world.store.tags = {}
    await follows(made, world)
    await until(lambda: len(world.controller.apps) == 1)
    stop(made)


async def test_a_manager_that_starts_while_a_hostile_tag_is_there_works(world: World) -> None:
    world.store.tags["own"] = {PREFIX + "serve": SIZE_OF_400_DIGITS}
    for _ in range(2):
        made = await world.start()
        await follows(made, world)
        await until(partial(has_lines, made))
        failed = {line.name: line.message for line in await made.bases() if line.state == "failed"}
        assert "kv_cache_bytes" in failed["own"]
        stop(made)


async def test_a_tag_imports_nothing(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hostile_policy.py").write_text("from pathlib import Path\nPath('ran').touch()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    world.store.tags["own"] = {PREFIX + "serve": '{"router": {"policy": "hostile_policy:X"}}'}
    made = await world.start()
    await follows(made, world)
    await until(lambda: bool(made._fleet._refused))
    assert "only the configuration file" in made._fleet._refused["own"]
    assert not (tmp_path / "ran").exists()
    stop(made)


async def test_a_base_that_serve_refuses_fails_alone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any fault of this kind affects its own base only."""
    from serve_app.control import fleet

    whole = fleet.base_application

    def refuse(spec: object, sources: object) -> object:
        if spec.base.name == "own":  # type: ignore[attr-defined]
            raise ValueError("a number that no wire takes")
        return whole(spec, sources)  # type: ignore[arg-type]

    monkeypatch.setattr(fleet, "base_application", refuse)
    world.store.tags = {"other": {}, "own": {PREFIX + "serve": "{}"}}
    made = await world.start()
    await follows(made, world)
    await until(lambda: any(base.base.name == "own" for base in view_of(made).bases))
    (own,) = (base for base in view_of(made).bases if base.base.name == "own")
    assert (own.state, own.message) == ("failed", "ValueError: a number that no wire takes")
    await follows(made, world)
    stop(made)


async def test_a_failure_to_publish_changes_does_not_end_the_watch(world: World) -> None:
    made = await world.start()

    def fail(_: object) -> None:
        raise OverflowError("while it publishes")

    made._watcher._on_changes = fail
    await follows(made, world)
    await follows(made, world)
    stop(made)


async def test_a_manager_whose_loop_ended_or_lags_is_unhealthy(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await world.start()
    await follows(made, world)
    await made.check_health()
    text = await made.metrics("i0", IngressCounts(1, b"", was_taken=False), {})
    assert b"loraplex_reconcile_age_seconds" in text
    monkeypatch.setattr(manager, "MAX_RECONCILE_AGE_S", -1.0)
    with pytest.raises(RuntimeError, match="no round of the manager has ended"):
        await made.check_health()
    monkeypatch.undo()
    assert made._watching is not None
    made._watching.cancel()
    await until(made._watching.done)
    with pytest.raises(RuntimeError, match="'watcher' ended"):
        await made.check_health()
    stop(made)


async def test_a_manager_without_a_registry_or_with_a_failing_controller_stays_healthy(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart would repair neither, and would lose the last good catalog."""
    monkeypatch.setattr(manager, "MAX_RECONCILE_AGE_S", 5.0)
    world.store.is_away = True
    made = await world.start()
    made._round_s = -1e9
    await until(lambda: made._reconcile_age_s() < 5)
    world.store.is_away = False
    await follows(made, world)

    def fail() -> object:
        raise RuntimeError("the controller is restarting")

    monkeypatch.setattr(world.controller, "status", fail)
    made._round_s = made._fleet.progress_s = -1e9
    await until(lambda: made._reconcile_age_s() < 5)
    await made.check_health()
    stop(made)


async def test_a_base_that_one_look_misses_keeps_its_engines(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await world.start(())
    world.store.tags = {"pad": {}, "own": {PREFIX + "serve": "{}"}}
    await follows(made, world)
    await until(lambda: len(world.controller.apps) == 1)
    (app,) = world.controller.apps
    whole = dict(world.store.tags)
    for bad in ({}, {"pad": {}}, {"pad": {}, "own": {PREFIX + "serve": "{oops"}}):
        world.store.tags = bad
        await follows(made, world)
        view = view_of(made)
        assert [base.app_name for base in view.bases if base.is_running] == [app]
        world.store.tags = whole
        await follows(made, world)
        assert list(world.controller.apps) == [app]
    monkeypatch.setattr("serve_app.control.fleet._HANDOVER_MAX_S", 0.05)
    world.store.tags = {"pad": {}, "own": {}}  # the setting is removed: the base leaves at once
    await until(lambda: not world.controller.apps)
    world.store.tags = whole
    await until(lambda: bool(world.controller.apps))
    monkeypatch.setattr(base_plan, "MISSING_S", 0.0)
    world.store.tags = {}
    await until(lambda: not world.controller.apps)
    stop(made)


def test_what_only_the_file_may_ask_is_refused_by_name() -> None:
    for text, words in (
        ('{"router": {"policy": "os:system"}}', "router.policy: 'os:system' is none of"),
        ('{"replicas": 65}', "replicas: 65 are more"),
        ('{"autoscaling": {"max_replicas": 65}}', "replicas: 65 are more"),
        ('{"max_queued_requests": 0}', "max_queued_requests"),
        ('{"replicas": 2000000000}', "replicas"),
        ('{"health_check_period_s": Infinity}', "health_check_period_s"),
    ):
        with pytest.raises(ValueError, match=words):
            base_plan.parse_setting("own", text)


# -- a start without the registry ------------------------------------------------------------------


def is_stored(made: Manager) -> bool:
    return made._stored._stored is made._watcher.catalog and made._stored._writing is None


async def test_a_manager_starts_from_its_disk_while_the_registry_is_away_and_catches_up(
    world: World,
) -> None:
    made = await world.start()
    await follows(made, world)
    await until(lambda: is_stored(made))
    stop(made)
    world.controller.apps.clear()
    world.store.is_away = True
    made = await world.start()
    await until(lambda: made._view is not None and any(b.is_running for b in made._view.bases))
    view = view_of(made)
    assert view.registry_error is not None
    assert view.catalog.resolve("good").adapter.version == world.store.champion  # type: ignore[union-attr]
    assert b"loraplex_registry_up 0.0" in made._watcher.metrics(0.0)
    await made.check_health()
    world.store.is_away = False
    await follows(made, world)
    await until(lambda: view_of(made).registry_error is None)
    assert b"loraplex_registry_up 1.0" in made._watcher.metrics(0.0)
    stop(made)


async def test_a_registry_that_stays_silent_is_waited_for_a_few_seconds_only(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await world.start()
    await follows(made, world)
    await until(lambda: is_stored(made))
    stop(made)
    monkeypatch.setattr(watcher, "REGISTRY_WAIT_S", 0.2)
    answers = threading.Event()
    monkeypatch.setattr(Reader, "snapshot", lambda _: answers.wait(60) and whole())
    whole = Reader(world.store, world.folder)._registry.snapshot
    made = await world.start()
    await until(lambda: made._view is not None)
    assert view_of(made).registry_error is not None
    answers.set()
    await follows(made, world)
    await until(lambda: view_of(made).registry_error is None)
    stop(made)


async def test_without_registry_and_stored_catalog_the_manager_waits_and_says_so(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.store.is_away = True
    made = await world.start()
    await until(lambda: "stored no catalog of it" in caplog.text)
    assert made._view is None
    await made.check_health()
    world.store.is_away = False
    await follows(made, world)
    stop(made)


@pytest.mark.parametrize("spoil", ["cut", "changed", "emptied", "of another registry", "a pipe"])
def test_a_stored_catalog_that_is_not_whole_or_not_ours_is_ignored_with_a_log_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, spoil: str
) -> None:
    path = tmp_path / "cache" / "catalog.json"
    base = BaseVersion("good-base", 1, "b" * 64, "somewhere", tags=(("team", "blü\ud800"),))
    catalog = Catalog((base,), settings=(Setting("good-base", "serve", "{}"),))
    own = CatalogFile(path, "http://mine")
    assert own.read() is None
    assert caplog.text == ""
    own.write(catalog)
    assert own.read() == catalog
    assert path.stat().st_mode & 0o777 == 0o600
    assert [one.name for one in path.parent.iterdir()] == ["catalog.json"]
    content = path.read_bytes()
    match spoil:
        case "cut":
            path.write_bytes(content[:-20])
        case "changed":
            path.write_bytes(content.replace(b"good-base", b"evil-base"))
        case "emptied":
            path.write_bytes(b"")
        case "a pipe":
            path.unlink()
            os.mkfifo(path)
        case _:
            own = CatalogFile(path, "http://theirs")
    assert own.read() is None
    assert "is not used" in caplog.text


# -- the real registry -----------------------------------------------------------------------------


def test_tags_of_a_real_mlflow_registry_hide_no_other_model(tmp_path: Path) -> None:
    """Each kind of value once, if MLflow itself accepts it."""
    registry = embedded(tmp_path / "home")
    register_base(registry, tmp_path)
    register_adapter(registry, tmp_path, "good", b"one")
    second = register_adapter(registry, tmp_path, "good", b"two", alias=None)
    client = MlflowClient(registry._store.tracking_uri)
    client.create_registered_model("pirate (old)", {PREFIX + "canary_weight": "0.1"})
    taken = 0
    keys = [PREFIX + key for key in ("serve", "canary_weight", "digest", "rank", "kind")]
    for number, text in enumerate(TEXTS[::3]):
        try:
            client.create_registered_model(f"bad-{number}", dict.fromkeys(keys, text))
            client.create_model_version(
                f"bad-{number}", "s3://nowhere", tags=dict.fromkeys(keys, text)
            )
        except (MlflowException, SQLAlchemyError, UnicodeEncodeError):
            continue
        taken += 1
    assert taken > 5
    registry.set_alias("good", "champion", second.version)
    catalog = registry.snapshot()
    assert catalog.resolve("tiny:good").adapter is not None
    assert catalog.resolve("good").adapter.version == second.version  # type: ignore[union-attr]
    made = base_plan.plan([ModelArgs(name="tiny")], catalog, cluster_has_gpu=False)
    assert [spec.base.name for spec in made.specs] == ["tiny"]
    read_traffic(catalog, (), {})
    stored = CatalogFile(tmp_path / "catalog.json", "here")
    stored.write(catalog)
    assert stored.read() == catalog

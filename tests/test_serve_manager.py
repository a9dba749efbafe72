"""The manager's decisions, without Serve: the applications that a list of models means."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.exceptions import RayTaskError
from ray.serve._private.exceptions import ExternalScalerDisabledError
from ray.serve.schema import ApplicationStatusOverview, DeploymentStatusOverview

from registry.catalog import Catalog
from registry.entities import AdapterVersion, BaseVersion, DanglingAlias, Setting
from registry.errors import NotFoundError
from serve_app.config import EngineArgs, ModelArgs, PlatformArgs, RegistryArgs
from serve_app.control import fleet
from serve_app.control.base_admin import change_base
from serve_app.control.base_plan import MISSING_S, LastGood, plan, with_aliases
from serve_app.control.base_status import is_refused, start_error, state_of
from serve_app.control.fleet import Fleet
from serve_app.control.manager import Manager
from serve_app.errors import ConflictError
from serve_app.messages import BaseChange
from serve_app.platform_view import PlatformView, Sources
from tests.fakes_registry import FolderRegistry
from tests.hostile_registry import fake_controller


def base(name: str = "a", version: int = 1, alias: str | None = None) -> BaseVersion:
    aliases = () if alias is None else (alias,)
    return BaseVersion(name, version, f"{name}{version}".ljust(64, "0"), "", aliases)


def app_names(catalog: Catalog, *models: ModelArgs) -> list[str]:
    return [spec.app_name for spec in plan(models, catalog, cluster_has_gpu=False).specs]


def test_a_name_follows_its_alias_to_another_application() -> None:
    model = ModelArgs(name="a")
    before = app_names(Catalog((base(version=1), base(version=2, alias="champion"))), model)
    after = app_names(Catalog((base(version=1, alias="champion"), base(version=2))), model)
    assert len(before) == len(after) == 1
    assert before != after


def test_the_same_content_and_settings_keep_the_application() -> None:
    catalog = Catalog((base(),))
    assert app_names(catalog, ModelArgs(name="a")) == app_names(catalog, ModelArgs(name="a"))
    assert app_names(catalog, ModelArgs(name="a")) == app_names(
        catalog, ModelArgs(name="a", replicas=2)
    )
    assert app_names(catalog, ModelArgs(name="a")) != app_names(
        catalog, ModelArgs(name="a", max_queued_requests=7)
    )


def test_what_the_registry_does_not_have_is_missing_and_holds_up_nobody() -> None:
    adapter = AdapterVersion("lora", 1, "d" * 64, "a", base().digest, 8, (), "")
    models = [ModelArgs(name=name) for name in ("a", "b", "a@9", "lora", "no name!")]
    wanted = plan(models, Catalog((base(),), (adapter,)), cluster_has_gpu=False)
    assert [spec.base.name for spec in wanted.specs] == ["a"]
    assert wanted.missing == ("b", "a@9", "lora", "no name!")


def test_one_version_is_served_once_however_often_it_is_named() -> None:
    models = [ModelArgs(name="a"), ModelArgs(name="a@1")]
    assert len(plan(models, Catalog((base(),)), cluster_has_gpu=False).specs) == 1


def test_another_alias_is_no_reason_for_another_application() -> None:
    names = {
        plan([ModelArgs(name="a", alias=alias)], Catalog((base(),)), False).specs[0].app_name
        for alias in (None, "stable")
    }
    assert len(names) == 1


def test_auto_takes_the_gpu_that_the_cluster_has() -> None:
    catalog = Catalog((base(),))
    forced = ModelArgs(name="a", engine=EngineArgs(device="cpu"))
    devices = [
        plan([model], catalog, has_gpu).specs[0].device
        for model, has_gpu in (
            (ModelArgs(name="a"), True),
            (ModelArgs(name="a"), False),
            (forced, True),
        )
    ]
    assert devices == ["cuda", "cpu", "cpu"]


async def test_no_base_is_started_while_serve_shuts_down(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = fake_controller(monkeypatch)
    api = SimpleNamespace(message="", last_deployed_time_s=1.0, deployments={})
    controller.apps["api"] = api  # with the manager; the base's application is gone already
    catalog = Catalog((base(),))
    wanted = plan([ModelArgs(name="a")], catalog, cluster_has_gpu=False)
    bases = Fleet(Sources(partial(FolderRegistry, Path()), "no:engine"))
    for api.status, names in (("DELETING", []), ("RUNNING", [wanted.specs[0].app_name])):
        await bases.round(wanted, catalog, 0.0)
        assert [*controller.apps] == ["api", *names]


async def test_a_base_that_another_file_adds_does_not_make_a_running_server_unready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each file comes with a manager of its own: to the first all bases are new."""
    controller = fake_controller(monkeypatch)
    catalog = Catalog((base("a"), base("b"), base("c")))

    async def is_ready(manager: Fleet, *names: str) -> bool:
        models = [ModelArgs(name=name) for name in names]
        bases = await manager.round(plan(models, catalog, False), catalog, 0.0)
        return PlatformView("", catalog, bases, (), True, None).is_ready

    def new_manager() -> Fleet:
        return Fleet(Sources(partial(FolderRegistry, Path()), "no:engine"))

    def replicas_of(name: str) -> dict[str, int]:
        (app,) = (app for key, app in controller.apps.items() if key.startswith(f"base--{name}--"))
        states: dict[str, int] = app.deployments["engine"].replica_states
        return states

    other = new_manager()
    for ready in (False, True):
        assert await is_ready(other, "c") is ready
    first = new_manager()
    assert not await is_ready(first, "a")  # none of its bases ran before
    assert await is_ready(first, "a")
    second = new_manager()
    assert await is_ready(second, "a", "b")
    replicas_of("b").clear()
    assert await is_ready(second, "a", "b")
    replicas_of("a").clear()
    assert not await is_ready(second, "a", "b")


async def test_other_replicas_are_started_in_the_application_that_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same manager follows a setting of the registry, and another one a file."""
    controller = fake_controller(monkeypatch)
    catalog = Catalog((base("a"),))

    async def replicas(manager: Fleet, num_replicas: int, **settings: object) -> list[int]:
        model = ModelArgs.model_validate({"name": "a", "replicas": num_replicas, **settings})
        await manager.round(plan([model], catalog, False), catalog, 0.0)
        apps = [one.deployments["engine"].replica_states for one in controller.apps.values()]
        return [states["RUNNING"] for states in apps]

    first, second = (Fleet(Sources(partial(FolderRegistry, Path()), "no:engine")) for _ in "12")
    assert await replicas(first, 2) == [2]
    assert await replicas(first, 3) == [3]
    assert await replicas(second, 3) == [3]
    (app,) = controller.apps.values()
    app.deployments["engine"].replica_states = {"RUNNING": 2}  # one has died, Serve replaces it
    assert await replicas(second, 3) == [2]
    assert await replicas(second, 1) == [1]
    scaling = {"min_replicas": 1, "max_replicas": 4}  # from now on the policy's number
    assert await replicas(second, 4, autoscaling=scaling) == [1, 1]
    assert await replicas(second, 2, autoscaling=scaling) == [1, 1]


async def test_an_application_that_cannot_be_scaled_is_served_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(name: str, num_replicas: int) -> None:
        raise RayTaskError("scale", "traceback", ExternalScalerDisabledError("it is off"))

    fake_controller(monkeypatch)
    monkeypatch.setattr(fleet, "scale", refuse)
    catalog, bases = Catalog((base("a"),)), Fleet(Sources(partial(FolderRegistry, Path()), "no:e"))
    for number in (1, 2, 2):
        wanted = plan([ModelArgs(name="a", replicas=number)], catalog, False)
        served = await bases.round(wanted, catalog, 0.0)
    assert [one.state for one in served] == ["running"]
    (line,) = (line for line in caplog.messages if "replicas" in line)
    assert line.endswith("cannot get 2 replicas: it is off")


async def test_what_a_name_means_changes_without_an_answer_of_serve(tmp_path: Path) -> None:
    """No Serve runs here: whatever waits for its status would wait for ever."""
    registry = FolderRegistry(tmp_path)
    one = AdapterVersion("lora", 1, "d" * 64, "a", base().digest, 8, (), "", ("champion",))
    registry.write(Catalog((base(),), (one, replace(one, version=2, digest="e" * 64, aliases=()))))
    manager = Manager.__new__(Manager)
    sources = Sources(partial(FolderRegistry, tmp_path), "tests.fakes_engine:open_paced_engine")
    args = PlatformArgs(registry=RegistryArgs(poll_interval_s=0.01))
    await manager.__init__(args, sources)  # type: ignore[misc]
    watching = asyncio.create_task(manager._watcher.run())
    await manager._watcher.changed.wait()
    known = manager._named(manager._watcher.catalog)  # type: ignore[arg-type]
    await manager._publish(PlatformView("", known, (), (), True, None))
    first = await manager.view("", 5)
    assert first is not None
    registry.set_alias("lora", "champion", 2)
    second = await manager.view(first.revision, 20)
    assert second is not None
    assert second.catalog.resolve("lora").adapter.version == 2  # type: ignore[union-attr]
    for task in (watching, manager._reconciling):
        task.cancel()


async def test_what_a_bases_name_means_changes_with_the_applications_that_serve_it(
    tmp_path: Path,
) -> None:
    manager = Manager.__new__(Manager)
    sources = Sources(partial(FolderRegistry, tmp_path), "tests.fakes_engine:open_paced_engine")
    await manager.__init__(PlatformArgs(), sources)  # type: ignore[misc]
    broken = DanglingAlias("a", "champion", 3, "no files")
    for aliased in (Catalog((base(alias="champion"),)), Catalog((base(), base(version=2)))):
        known = manager._named(replace(aliased, dangling=(broken,) * (len(aliased.bases) - 1)))
    assert known.resolve("a").base.version == 1
    await manager._publish(PlatformView("", known, (), (), True, None))
    manager._watcher.catalog = replace(known, dangling=(), held=())  # the alias is dropped
    manager._publish_names(())
    view = await manager.view("", 5)
    assert view is not None
    assert view.catalog.resolve("a").base.version == 1
    manager._reconciling.cancel()


def with_setting(value: str, *bases: BaseVersion, name: str = "b") -> Catalog:
    return Catalog(bases, settings=(Setting(name, "serve", value), Setting(name, "pin", "true")))


def test_a_setting_in_the_registry_serves_a_base_that_no_file_names() -> None:
    catalog = with_setting('{"replicas": 2, "engine": {"seed": 7}}', base("a"), base("b"))
    first, second = plan([ModelArgs(name="a")], catalog, cluster_has_gpu=False).specs
    assert (first.base.name, first.source) == ("a", "file")
    assert (second.base.name, second.source) == ("b", "registry")
    assert (second.model.replicas, second.model.engine.seed) == (2, 7)


def test_an_added_base_follows_its_alias_and_keeps_its_application_when_it_moves_to_the_file() -> (
    None
):
    catalog = with_setting("{}", base("b", 1), base("b", 2, alias="champion"), base("b", 3))
    (added,) = plan([], catalog, cluster_has_gpu=False).specs
    assert added.base.version == 2
    (named,) = plan([ModelArgs(name="b")], catalog, cluster_has_gpu=False).specs
    assert (named.source, named.app_name) == ("file", added.app_name)


def test_the_file_wins_where_both_name_a_base() -> None:
    catalog = with_setting('{"replicas": 9}', base("b", 1), base("b", 2))
    (spec,) = plan([ModelArgs(name="b@1")], catalog, cluster_has_gpu=False).specs
    assert (spec.base.version, spec.model.replicas, spec.source) == (1, 1, "file")


BY_ID = ModelArgs(name="Meta/B-1", alias="prod")


def with_id(value: str) -> Catalog:
    return with_setting(value, replace(base("b"), model_id="Meta/B-1"))


def test_the_file_wins_over_a_setting_where_it_names_the_base_by_its_id() -> None:
    catalog = with_id('{"replicas": 9, "alias": "evil"}')
    wanted = plan([BY_ID], catalog, cluster_has_gpu=False)
    (spec,) = wanted.specs
    assert (spec.model.replicas, spec.source, wanted.refused) == (1, "file", ())
    aliases = with_aliases(catalog, "champion", [BY_ID]).default_aliases
    assert aliases.of_adapters == (("b", "prod"),)


def test_a_base_that_the_file_names_by_its_id_or_by_its_name_is_one_application() -> None:
    catalog = with_id("{}")
    assert app_names(catalog, BY_ID) == app_names(catalog, ModelArgs(name="b"))
    assert app_names(catalog, ModelArgs(name="Meta/B-1@1")) == app_names(
        catalog, ModelArgs(name="b@1")
    )


async def test_no_admin_call_changes_a_base_that_the_file_names_by_its_id(tmp_path: Path) -> None:
    registry = FolderRegistry(tmp_path)
    fleet = Fleet.__new__(Fleet)  # neither change reads it
    for kind in ("add", "remove"):
        change = BaseChange(kind, "b")  # type: ignore[arg-type]
        with pytest.raises(ConflictError, match="configuration file"):
            await change_base(change, [BY_ID], with_id("{}"), registry, fleet)


async def test_a_base_that_is_added_and_not_registered_names_the_command(tmp_path: Path) -> None:
    registry = FolderRegistry(tmp_path)
    fleet = Fleet.__new__(Fleet)
    change = BaseChange("add", "mine", "{}")
    words = "'mine'; register it first: loraplex register base FOLDER --name mine"
    with pytest.raises(NotFoundError, match=words):
        await change_base(change, [], Catalog(), registry, fleet)


def test_a_base_that_the_file_names_by_its_id_outlives_a_look_without_it() -> None:
    last_good, there = LastGood(), with_id("{}")
    (spec,) = last_good.complete(plan([BY_ID], there, False), [BY_ID], there, 0.0).specs
    for away in (Catalog(), Catalog((base("b"),))):  # the base is gone, or its id
        wanted = last_good.complete(plan([BY_ID], away, False), [BY_ID], away, 1.0)
        assert (wanted.specs, wanted.missing) == ((spec,), ())
    late_s = 2.0 + MISSING_S
    wanted = last_good.complete(plan([BY_ID], away, False), [BY_ID], away, late_s)
    assert (wanted.specs, wanted.missing) == ((), ("Meta/B-1",))


def test_a_base_whose_id_leaves_the_file_is_served_no_more() -> None:
    last_good, there = LastGood(), Catalog(with_id("{}").bases)
    assert last_good.complete(plan([BY_ID], there, False), [BY_ID], there, 0.0).specs
    assert last_good.complete(plan([], there, False), [], there, 1.0).specs == ()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "not a JSON object"),
        ('{"name": "c"}', "name"),
        ('{"replicas": 0}', "replicas"),
        ('{"engine": {"block_size": "x"}}', "engine.block_size"),
        ('{"unknown": 1}', "unknown"),
    ],
)
def test_a_wrong_setting_is_refused_in_words_and_holds_up_nobody(value: str, words: str) -> None:
    wanted = plan([ModelArgs(name="a")], with_setting(value, base("a"), base("b")), False)
    assert [spec.base.name for spec in wanted.specs] == ["a"]
    assert [one.name for one in wanted.refused] == ["b"]
    assert words in wanted.refused[0].reason
    assert wanted.missing == ()


def test_a_setting_of_what_is_no_base_is_refused() -> None:
    wanted = plan([], with_setting("{}", base("a")), cluster_has_gpu=False)
    assert (wanted.specs, wanted.missing) == ((), ())
    assert "no base model is named 'b'" in wanted.refused[0].reason


def test_when_to_sleep_is_no_matter_of_the_application() -> None:
    catalog = Catalog((base(),))
    sleepy = ModelArgs(name="a", idle_timeout_s=5, cold_start="refuse", cold_start_timeout_s=9)
    assert app_names(catalog, sleepy) == app_names(catalog, ModelArgs(name="a"))


def test_the_reason_of_a_failed_start_is_found_in_serves_message() -> None:
    message = """A replica failed to start with exception. Retrying 1 more time(s). Error:
ray::ServeReplica:base--a--61-ba:engine.initialize_and_get_metadata() (pid=1, ip=127.0.0.1)
  File "replica.py", line 70, in __init__
    raise root_cause(error) from None
ValueError: layer 3 of the base holds NaN"""
    assert start_error(["The deployments ['engine'] are UPDATING.", message])[1] == (
        "layer 3 of the base holds NaN"
    )
    assert start_error(["", "The deployments ['engine'] are UPDATING."])[1] == ""


@pytest.mark.parametrize(
    ("status", "error", "is_permanent"),
    [
        ("DEPLOY_FAILED", "engine.errors.UnsupportedModelError: kv_cache_dtype is fp8", True),
        ("DEPLOY_FAILED", "engine.errors.EngineMemoryError: kv_cache_dtype is fp8", False),
        ("DEPLOYING", "engine.errors.UnsupportedModelError: kv_cache_dtype is fp8", False),
    ],
)
def test_a_base_that_its_engine_refuses_is_told_from_one_that_may_start_later(
    status: str, error: str, is_permanent: bool
) -> None:
    deployment = DeploymentStatusOverview("UNHEALTHY", "UNSPECIFIED", {}, f"Traceback\n{error}")  # type: ignore[arg-type]
    app = ApplicationStatusOverview(status, "", 0.0, {"engine": deployment})  # type: ignore[arg-type]
    assert is_refused(app) is is_permanent
    assert state_of(app)[1] == "kv_cache_dtype is fp8"
    assert not is_refused(None)


async def test_a_manager_that_was_not_told_its_models_has_no_view(tmp_path: Path) -> None:
    """An empty list would look ready, and every running base unwanted."""
    manager = Manager.__new__(Manager)
    sources = Sources(partial(FolderRegistry, tmp_path), "tests.fakes_engine:open_paced_engine")
    FolderRegistry(tmp_path).write(Catalog((base(),)))
    await manager.__init__(PlatformArgs(), sources)  # type: ignore[misc]
    assert await manager.view("", 0.3) is None
    manager._reconciling.cancel()

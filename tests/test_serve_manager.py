"""What the manager decides, without Serve: which applications a list of models means."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from registry.catalog import Catalog
from registry.entities import AdapterVersion, BaseVersion
from serve_app.base_plan import plan
from serve_app.config import EngineArgs, ModelArgs, PlatformArgs
from serve_app.manager import Manager
from serve_app.topology import Sources
from tests.fakes_registry import FolderRegistry


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
    assert app_names(catalog, ModelArgs(name="a")) != app_names(
        catalog, ModelArgs(name="a", replicas=2)
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


async def test_a_manager_that_was_not_told_its_models_has_no_view(tmp_path: Path) -> None:
    """An empty list would look ready, and every running base unwanted."""
    manager = Manager.__new__(Manager)
    sources = Sources(partial(FolderRegistry, tmp_path), "tests.fakes_engine:open_paced_engine")
    FolderRegistry(tmp_path).write(Catalog((base(),)))
    await manager.__init__(PlatformArgs(), sources)  # type: ignore[misc]
    assert await manager.view("", 0.3) is None
    for task in manager._tasks:
        task.cancel()

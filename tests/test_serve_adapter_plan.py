"""Pins and retired versions, from one catalog to the next; and that every engine receives them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

import pytest
from ray.serve.exceptions import RayServeException

from registry.catalog import Catalog
from registry.entities import AdapterVersion, BaseVersion, Setting
from serve_app.control.adapter_plan import AdapterPlanner, plan_is_due
from serve_app.control.broadcaster import Broadcaster
from serve_app.messages import AdapterPlan

BASE = BaseVersion("base", 1, "b" * 64, "")
OTHER = BaseVersion("other", 1, "o" * 64, "")


def version(
    number: int, *aliases: str, name: str = "x", base: BaseVersion = BASE, digest: str = ""
) -> AdapterVersion:
    digest = digest or f"{name}{number}"
    return AdapterVersion(name, number, digest, base.name, base.digest, 8, (), "", aliases)


def catalog(*adapters: AdapterVersion, pinned: tuple[str, ...] = ()) -> Catalog:
    settings = tuple(Setting(name, "pin", "true") for name in pinned)
    return Catalog((BASE, OTHER), adapters, settings=settings)


def plan(history: AdapterPlanner, base: BaseVersion = BASE, until_s: float = 100.0) -> AdapterPlan:
    return history.plan_for(base.digest, until_s)


def after(*catalogs: Catalog) -> AdapterPlanner:
    history = AdapterPlanner("m", 0.0)
    for now_s, one in enumerate(catalogs):
        history.read(one, float(now_s))
    return history


def retired(history: AdapterPlanner) -> list[str]:
    return [digest for digest, _ in plan(history).retired]


def test_the_first_catalog_retires_nothing() -> None:
    assert plan(after(catalog(version(1), version(2)))) == AdapterPlan("m")


def test_a_flip_retires_the_version_before_and_a_flip_back_the_other() -> None:
    first = catalog(version(1, "champion"), version(2))
    second = catalog(version(1), version(2, "champion"))
    assert retired(after(first, second)) == ["x1"]
    assert retired(after(first, second, first)) == ["x2"]


def test_each_retirement_has_a_number_of_its_own() -> None:
    first = catalog(version(1, "champion"), version(2))
    second = catalog(version(1), version(2, "champion"))
    once = plan(after(first, second)).retired
    twice = plan(after(first, second, first, second)).retired
    assert once == (("x1", 1),)
    assert twice == (("x1", 3),)


def test_the_same_catalog_again_changes_nothing() -> None:
    first = catalog(version(1, "champion"), version(2))
    second = catalog(version(1), version(2, "champion"))
    assert plan(after(first, second, second, second)) == plan(after(first, second))


def test_another_alias_keeps_a_version_and_so_does_another_name_of_its_content() -> None:
    first = catalog(version(1, "champion"), version(2))
    assert retired(after(first, catalog(version(1, "canary"), version(2, "champion")))) == []
    twin = version(1, name="twin", digest="x1")
    assert retired(after(first, catalog(version(1), version(2, "champion"), twin))) == []


def test_a_new_highest_version_retires_the_default_without_alias() -> None:
    assert retired(after(catalog(version(1)), catalog(version(1), version(2)))) == ["x1"]


def test_a_deleted_version_is_retired_though_nothing_meant_it() -> None:
    first = catalog(version(1), version(2, "champion"))
    assert retired(after(first, catalog(version(2, "champion")))) == ["x1"]
    assert retired(after(first, catalog())) == ["x1", "x2"]


def test_a_version_that_is_meant_again_is_retired_no_more() -> None:
    first = catalog(version(1, "champion"), version(2))
    second = catalog(version(1), version(2, "champion"))
    again = catalog(version(1, "canary"), version(2, "champion"))
    assert retired(after(first, second, again)) == []


def test_retired_versions_wait_for_older_views() -> None:
    first = catalog(version(1, "champion"), version(2))
    history = after(first, catalog(version(1), version(2, "champion")))
    assert plan(history, until_s=0.9).retired == ()
    assert plan(history, until_s=1.0).retired == (("x1", 1),)
    assert plan(history, until_s=1000.0).retired == ()  # everybody has heard of it


def test_a_pin_follows_what_its_name_means() -> None:
    first = catalog(version(1, "champion"), version(2), pinned=("x",))
    second = catalog(version(1), version(2, "champion"), pinned=("x",))
    assert [pin.version for pin in plan(after(first)).pins] == [1]
    assert [pin.version for pin in plan(after(first, second)).pins] == [2]
    assert plan(after(first, catalog(version(1), version(2)))).pins == ()


def test_only_the_value_true_is_a_pin() -> None:
    one = replace(catalog(version(1)), settings=(Setting("x", "pin", "yes"),))
    assert plan(after(one)).pins == ()


def test_each_base_hears_of_its_own_adapters() -> None:
    first = catalog(
        version(1, "champion"), version(2), version(1, name="y", base=OTHER), pinned=("x", "y")
    )
    second = catalog(version(1), version(2, "champion"), pinned=("x", "y"))
    history = after(first, second)
    assert [pin.digest for pin in plan(history).pins] == ["x2"]
    assert plan(history, OTHER) == AdapterPlan("m", (), (("y1", 2),))


class Engines:
    """Receive what a manager plans; fail when `error` is set."""

    def __init__(self) -> None:
        self.plans: list[tuple[str, AdapterPlan]] = []
        self.error: Exception | None = None
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self._planner = AdapterPlanner("m", 0.0)
        self._broadcaster = Broadcaster("plan", "arrange", plan_is_due, self.send)

    def update(self, catalog: Catalog, running: Mapping[str, str]) -> None:
        now_s = asyncio.get_running_loop().time()
        self._broadcaster.publish(self._planner.plans(catalog, running, now_s))

    async def send(self, app_name: str, plan: AdapterPlan) -> int:
        self.plans.append((app_name, plan))
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        return 0


@pytest.fixture(autouse=True)
def _no_plan_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan is sent again after three seconds, which a busy machine may take between two lines."""
    monkeypatch.setattr("serve_app.control.adapter_plan.RESEND_S", 600.0)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


RUNNING = {BASE.digest: "app"}


async def test_a_change_is_sent_at_once_and_the_same_plan_not_again() -> None:
    engines = Engines()
    first = catalog(version(1, "champion"), version(2), pinned=("x",))
    for one in (first, first, catalog(version(1), version(2, "champion"), pinned=("x",))):
        engines.update(one, RUNNING)
        await settle()
    assert [plan.pins[0].version for _, plan in engines.plans] == [1, 2]
    assert engines.plans[-1][1].retired == (("x1", 1),)


async def test_a_base_that_comes_up_is_told() -> None:
    engines = Engines()
    engines.update(catalog(version(1)), {})
    await settle()
    assert engines.plans == []
    for running in (RUNNING, {}, RUNNING):  # away for a while: it is told anew
        engines.update(catalog(version(1)), running)
        await settle()
    assert engines.plans == [("app", AdapterPlan("m"))] * 2


async def test_engines_that_do_not_answer_hold_up_nobody() -> None:
    engines = Engines()
    engines.may_answer.clear()
    both = RUNNING | {OTHER.digest: "other-app"}
    for number in (1, 2, 3):
        engines.update(catalog(version(number)), both)
        await settle()
    assert [name for name, _ in engines.plans] == ["app", "other-app"]
    engines.error = RayServeException("away")
    engines.may_answer.set()
    await settle()
    engines.update(catalog(version(3)), both)  # the newest plan is still owed, to one of them
    await settle()
    assert [name for name, _ in engines.plans] == ["app", "other-app", "app"]
    assert [digest for digest, _ in engines.plans[-1][1].retired] == ["x1", "x2"]

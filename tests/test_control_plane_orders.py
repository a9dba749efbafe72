"""The control plane under orders of what people, the registry and the world do to it: no promise of
`tests/control_plane/promises.py` and `settled.py` is broken.

`python -m tests.benchmarks.control_plane` runs thousands of random ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.control_plane.draws import draw
from tests.control_plane.orders import run, shorten, shown
from tests.control_plane.plots import Step
from tests.control_plane.store import Database, quick_sqlite

NUM_RANDOM_ORDERS = 6
OTHER_DEFAULT_ALIAS = 2  # a seed whose configuration gives the adapters of beta another one


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    with quick_sqlite():
        yield Database(tmp_path_factory.mktemp("store"))


def wait(seconds: float) -> Step:
    return "wait", {"seconds": seconds}


def ask(name: str, canary: str, number: int = 40) -> Step:
    return "requests", {"name": name, "number": number, "at": 0, "canary": canary}


def register(content: str, base: str, alias: str | None, name: str = "pirate") -> Step:
    return "register", {"name": name, "content": content, "base": base, "alias": alias}


def start(version: int, weight: float) -> Step:
    canary = {"name": "pirate", "version": version, "weight": weight, "shadow": None}
    return "start_canary", canary


def plain(content: str, base: str, name: str = "pirate") -> Step:
    return "log_plain", {"name": name, "content": content, "base": base}


def base(kind: str, name: str, setting: str = "{}") -> Step:
    return "base", {"kind": kind, "name": name, "setting": setting}


def adapter(kind: str) -> Step:
    return "adapter", {"kind": kind, "name": "new", "content": "three", "base": "alpha"}


def lost_answer(process: str, number: int, has_effect: bool = True) -> Step:
    return "write_fails", {"process": process, "number": number, "has_effect": has_effect}


CHAMPION_3: Step = "set_alias", {"name": "pirate", "alias": "champion", "version": 3}
BETA_GOES: dict[str, Any] = {"name": "delete_model", "arguments": {"name": "beta"}}
FAILING = (start(2, 0.5), wait(3.0), ask("pirate", "error"))
BETA_FAILS = (ask("pirate", "error"), wait(1.5), ("engines_die", {"base": "beta"}), wait(3.0))
ORDERS: dict[str, tuple[Step, ...]] = {
    "a canary stays rolled back while no listing is answered": (
        *FAILING,
        wait(1.5),
        ("listings_fail", {"do": True}),
        wait(33.0),
        ask("pirate", "ok"),
    ),
    "a canary is not promoted before its roll-back is written": (
        *FAILING[:2],
        lost_answer("manager", 1, has_effect=False),
        FAILING[2],
        wait(1.5),
        ("promote", {"name": "pirate"}),
    ),
    "another version never has the weight of the canary before it": (
        FAILING[0],
        register("three", "alpha", None),
        start(3, 0.01),
    ),
    "a canary whose base falters is judged all the same": (
        register("three", "beta", None),
        start(3, 0.5),
        wait(3.0),
        *(ask("pirate", "error", 6), wait(1.5), *BETA_FAILS[2:]) * 10,
    ),
    "a model that goes between two pages hides no other": (
        ("between_pages", BETA_GOES),
        ("tag", {"name": "sql", "key": "pin", "value": "true"}),
        wait(3.0),
    ),
    "a champion that cannot be served makes no other version the meaning": (
        plain("three", "nowhere"),
        plain("four", "alpha"),
        wait(3.0),
        CHAMPION_3,
        wait(3.0),
    ),
    "a registration whose alias call lost its answer takes no alias away": (
        lost_answer("cli", 4),
        register("three", "alpha", "champion"),
    ),
    "a registration whose version call lost its answer leaves no version": (
        lost_answer("cli", 3),
        register("three", "alpha", None),
        ask("pirate", "ok", 3),
    ),
    "a store that takes no tags is served from": (
        ("read_only", {"do": True}),
        plain("three", "alpha", "new"),
        wait(3.0),
        wait(3.0),
        ask("new", "ok", 3),
    ),
    "a base that was in use a moment ago stays when an ingress goes": (
        base("add", "beta", '{"idle_timeout_s": 20}'),
        wait(33.0),
        ask("sql", "ok", 3),
        wait(3.0),
        ("ingress_starts", {}),
        wait(8.0),
        ask("sql", "ok", 3),
        wait(1.5),
        ("ingress_dies", {"restart": True}),
        wait(8.0),
    ),
    "a base can be added the moment it is registered": (
        wait(0.7),
        ("register_base", {"name": "gamma", "content": "five", "alias": "champion"}),
        base("add", "gamma"),
    ),
    "what is registered under a name that was unloaded is there": (
        adapter("load"),
        adapter("unload"),
        register("four", "alpha", "champion", "new"),
    ),
    "a canary order to a manager that has just started is no fault": (
        ("manager_dies", {"restart": True}),
        ("promote", {"name": "pirate"}),
    ),
    "a manager that starts keeps engines whose base it cannot find": (
        ("delete_version", {"name": "beta", "version": 1}),
        ("manager_dies", {"restart": False}),
    ),
    "after one look that hung the registry is looked at again soon": (
        ("looks_are_late", {"seconds": 5.0}),
        ("tag_version", {"name": "sql", "version": 1, "key": "effect", "value": "none"}),
        ("clock_jumps", {"seconds": 700.0}),
    ),
}


@pytest.mark.parametrize("promise", ORDERS)
def test_an_order_that_once_broke_a_promise(promise: str, database: Database) -> None:
    outcome = run(database, 0, ORDERS[promise])
    assert outcome.broken is None, shown(outcome)


def test_a_version_for_a_second_base_leaves_the_name_with_the_first(database: Database) -> None:
    outcome = run(database, OTHER_DEFAULT_ALIAS, (register("three", "beta", None),))
    assert outcome.broken is None, shown(outcome)


def test_random_orders_break_no_promise(database: Database) -> None:
    for seed in range(NUM_RANDOM_ORDERS):
        outcome = run(database, seed, draw(seed))
        if outcome.broken is not None:
            pytest.fail(shown(shorten(database, outcome)))

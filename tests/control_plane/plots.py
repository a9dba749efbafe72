"""Sequences of actions of people; the other steps of an order add faults in between."""

from __future__ import annotations

import random
from typing import Any

Step = tuple[str, dict[str, Any]]


def _canary_fails(r: random.Random) -> list[Step]:
    canary = {"name": "pirate", "version": 2, "weight": 0.5, "shadow": None}
    return [("start_canary", canary), ("wait", {"seconds": 3.0}), _asked("pirate", "error"), _PAUSE]


def _canary_of_another_base(r: random.Random) -> list[Step]:
    new = {"name": "pirate", "content": "three", "base": "beta", "alias": None}
    canary = {"name": "pirate", "version": 3, "weight": 0.5, "shadow": None}
    return [("register", new), ("start_canary", canary), *_canary_fails(r)[1:]]


def _registration_fails(r: random.Random) -> list[Step]:
    number, has_effect = r.randint(1, 6), r.random() < 0.7
    fault = {"process": "cli", "number": number, "has_effect": has_effect}
    new = {"name": "pirate", "content": "three", "base": "alpha", "alias": "champion"}
    return [("write_fails", fault), ("register", new)]


def _base_rests(r: random.Random) -> list[Step]:
    change = {"kind": "add", "name": "beta", "setting": '{"idle_timeout_s": 20}'}
    return [("base", change), ("wait", {"seconds": 33.0}), _asked("sql", "ok"), _PAUSE]


def _comes_and_goes(r: random.Random) -> list[Step]:
    one = {"name": "new", "content": "three", "base": "alpha"}
    kinds = r.sample(("load", "unload", "pin"), 3)
    return [("adapter", {"kind": kind, **one}) for kind in kinds]


def _champion_is_broken(r: random.Random) -> list[Step]:
    contents = [("nowhere", "three"), ("alpha", "four")]
    plain = [{"name": "pirate", "content": content, "base": base} for base, content in contents]
    alias = {"name": "pirate", "alias": "champion", "version": 3}
    return [*(("log_plain", one) for one in plain), _PAUSE, ("set_alias", alias)]


def _base_is_new(r: random.Random) -> list[Step]:
    new = {"name": "gamma", "content": "five", "alias": None}
    change = {"kind": "add", "name": "gamma", "setting": "{}"}
    return [("register_base", new), ("base", change), ("base", {**change, "kind": "remove"})]


def _asked(name: str, canary: str) -> Step:
    return "requests", {"name": name, "number": 40, "at": 0, "canary": canary}


_PAUSE: Step = ("wait", {"seconds": 1.5})
PLOTS = (
    _canary_fails,
    _canary_fails,
    _canary_of_another_base,
    _registration_fails,
    _base_rests,
    _comes_and_goes,
    _champion_is_broken,
    _base_is_new,
)

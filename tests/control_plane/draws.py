"""The steps of an order, drawn from a seed without reading the world, so that any of them can be
left out."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tests.control_plane.plots import PLOTS, Step

NUM_STEPS = (4, 18)  # beside those of a plot
ADAPTERS = ("pirate", "pirate", "pirate", "pirate", "sql", "new")
BASES = ("beta", "beta", "gamma")
_ALIASES = ("champion", "champion", "canary", "canary", "shadow", "prod")
_CONTENTS = ("one", "two", "three", "four")
_WEIGHTS = ("0", "0.5", "1", "0.01", "-1", "nan", "x" * 3000, "")
_SETTINGS = (
    "{}",
    '{"replicas": 2}',
    '{"idle_timeout_s": 20}',
    '{"max_queued_requests": 0}',
    '{"engine": {"max_model_len": 64}}',
    '{"router": {"policy": "os:system"}}',
    "{oops",
    "[" * 2000,
)
_ILLEGAL = ("My Adapter", "pirate (old)", "x" * 120)

_ALWAYS = ("wait", "requests")
_SHARE_OF_RULES = 0.35
_SHARE_OF_PLOTS = 0.7

_Draw = Callable[[random.Random], dict[str, Any]]


def _tag(r: random.Random) -> dict[str, Any]:
    name = r.choice((*ADAPTERS, *BASES, *_ILLEGAL))
    key, values = r.choice(
        (
            ("canary_weight", _WEIGHTS),
            ("shadow_weight", _WEIGHTS),
            ("canary_rolled_back", ("{", '{"version": 2, "reason": "x"}', "[]")),
            ("pin", ("true", "yes")),
            ("runtime", ("loaded", "unloaded")),
            ("serve", _SETTINGS),
            ("kind", ("base", "adapter", "x")),
        )
    )
    return {"name": name, "key": key, "value": r.choice(values)}


def _tag_version(r: random.Random) -> dict[str, Any]:
    key, values = r.choice(
        (
            ("digest", ("0" * 64, "x", "")),
            ("kind", ("base", "adapter")),
            ("base", ("beta", "nowhere")),
            ("base_digest", ("f" * 64,)),
            ("rank", ("-1", "9" * 400)),
            ("effect", ("refused", "none")),
        )
    )
    version = r.randint(1, 3)
    return {"name": r.choice(ADAPTERS), "version": version, "key": key, "value": r.choice(values)}


def _canary(r: random.Random) -> dict[str, Any]:
    version = r.choice((None, 1, 2, 2, 3))
    weight, shadow = r.choice(((0.5, None), (0.9, None), (0.01, None), (None, 0.5), (1.0, 0.5)))
    return {"name": r.choice(ADAPTERS), "version": version, "weight": weight, "shadow": shadow}


def _content(r: random.Random) -> dict[str, Any]:
    base = r.choice(("alpha", "alpha", "beta"))
    return {"name": r.choice(ADAPTERS), "content": r.choice(_CONTENTS), "base": base}


def _colleague(r: random.Random) -> Step:
    """Draws an action of a colleague that does not wait."""
    name = r.choice(("set_alias", "delete_alias", "delete_version", "delete_model", "tag"))
    return name, _DRAWS[name][1](r)


def _between_pages(r: random.Random) -> dict[str, Any]:
    name, arguments = _colleague(r)
    return {"name": name, "arguments": arguments}


def _switch(r: random.Random) -> dict[str, Any]:
    return {"do": r.random() < 0.7}


_DRAWS: dict[str, tuple[int, _Draw]] = {
    "wait": (16, lambda r: {"seconds": r.choice((0.3, 1.5, 3.0, 3.0, 8.0, 33.0, 70.0))}),
    "requests": (
        12,
        lambda r: {
            "name": r.choice(ADAPTERS),
            "number": r.choice((3, 40, 40)),
            "at": r.randint(0, 2),
            "canary": r.choice(("ok", "error", "error", "empty", "non_finite")),
        },
    ),
    "set_alias": (
        6,
        lambda r: {
            "name": r.choice((*ADAPTERS, *BASES)),
            "alias": r.choice(_ALIASES),
            "version": r.randint(1, 3),
        },
    ),
    "delete_alias": (
        3,
        lambda r: {"name": r.choice((*ADAPTERS, "beta")), "alias": r.choice(_ALIASES)},
    ),
    "tag": (6, _tag),
    "untag": (
        2,
        lambda r: {
            "name": r.choice((*ADAPTERS, "beta")),
            "key": r.choice(("canary_weight", "serve", "pin", "runtime")),
        },
    ),
    "tag_version": (2, _tag_version),
    "delete_version": (
        2,
        lambda r: {"name": r.choice((*ADAPTERS, "beta")), "version": r.randint(1, 3)},
    ),
    "delete_model": (2, lambda r: {"name": r.choice((*ADAPTERS, *BASES))}),
    "rename": (
        2,
        lambda r: {
            "name": r.choice((*ADAPTERS, "beta")),
            "new": r.choice((*ADAPTERS, *BASES, *_ILLEGAL)),
        },
    ),
    "log_plain": (3, _content),
    "recreate": (3, _content),
    "register": (4, lambda r: {**_content(r), "alias": r.choice((None, "champion", "canary"))}),
    "register_base": (
        2,
        lambda r: {
            "name": r.choice(BASES),
            "content": r.choice(("beta", "five", "six")),
            "alias": r.choice((None, "champion")),
        },
    ),
    "base": (
        6,
        lambda r: {
            "kind": r.choice(("add", "add", "remove", "sleep", "wake")),
            "name": r.choice((*BASES, *BASES, "alpha")),
            "setting": r.choice(_SETTINGS[:5]),
        },
    ),
    "adapter": (
        3,
        lambda r: {"kind": r.choice(("pin", "unpin", "load", "unload")), **_content(r)},
    ),
    "start_canary": (8, _canary),
    "promote": (3, lambda r: {"name": r.choice(ADAPTERS)}),
    "abort": (2, lambda r: {"name": r.choice(ADAPTERS)}),
    "registry_away": (
        3,
        lambda r: {"process": r.choice(("manager", "cli")), "is_away": r.random() < 0.6},
    ),
    "listings_fail": (2, _switch),
    "read_only": (2, _switch),
    "write_fails": (
        5,
        lambda r: {
            "process": r.choice(("manager", "cli")),
            "number": r.randint(1, 4),
            "has_effect": r.random() < 0.5,
        },
    ),
    "looks_are_late": (2, lambda r: {"seconds": r.choice((0.0, 0.5, 5.0, 40.0))}),
    "between_pages": (4, _between_pages),
    "serve_away": (2, lambda r: {"is_away": r.random() < 0.5}),
    "serve_refuses": (1, _switch),
    "starts_fail": (1, lambda r: {"number": r.randint(1, 2)}),
    "engines_die": (2, lambda r: {"base": r.choice(("alpha", "beta", "beta"))}),
    "engines_take_no_plan": (1, _switch),
    "reports_lost": (1, lambda r: {"number": r.choice((1, 10))}),
    "manager_dies": (3, lambda r: {"restart": r.random() < 0.7}),
    "manager_starts": (1, lambda _: {}),
    "ingress_starts": (1, lambda _: {}),
    "ingress_dies": (2, lambda r: {"restart": r.random() < 0.7}),
    "clock_jumps": (1, lambda r: {"seconds": r.choice((4.0, 20.0, 700.0))}),
    "wall_clock_is_set": (1, lambda r: {"seconds": r.choice((-3600.0, 3600.0))}),
}


def draw(seed: int) -> list[Step]:
    """Draws the steps. Each order uses only some of the rules, so that combinations of them happen
    more often. Most orders contain a plot, whose steps keep their order among the others."""
    r = random.Random(seed)
    names = [name for name in _DRAWS if name in _ALWAYS or r.random() < _SHARE_OF_RULES]
    weights = [_DRAWS[name][0] for name in names]
    chosen = r.choices(names, weights, k=r.randint(*NUM_STEPS))
    others = [(name, _DRAWS[name][1](r)) for name in chosen]
    plot = r.choice(PLOTS)(r) if r.random() < _SHARE_OF_PLOTS else []
    places = sorted(r.choices(range(len(others) + 1), k=len(plot)), reverse=True)
    for place, step in zip(places, reversed(plot), strict=True):
        others.insert(place, step)
    return others

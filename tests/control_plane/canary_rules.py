"""Rules for what operators order of canaries."""

from __future__ import annotations

import inspect

from serve_app.manager import Manager
from serve_app.traffic import parse_weight
from tests.control_plane.rules import Rule, collect, order
from tests.control_plane.store import PREFIX, Truth
from tests.control_plane.wishes import DEFAULT_ALIAS
from tests.control_plane.world import Violation, World

CANARY_RULES: dict[str, Rule] = {}
rule = collect(CANARY_RULES)


@rule
async def start_canary(
    world: World, name: str, version: int | None, weight: float | None, shadow: float | None
) -> str:
    world.journal.touch(name)
    was = _canary(world.truth(), name)
    seen: list[tuple[int, float]] = []
    world.watch = lambda truth: seen.append(_canary(truth, name))
    try:
        words, _ = await order(world, "start_canary", name, version, weight, shadow)
    finally:
        world.watch = None
    for number, share in seen:
        is_new = number not in (0, was[0])
        if weight is not None and is_new and share not in (0.0, weight):
            raise Violation(f"canary {name}@{number} was started with {weight:g}, got {share:g}")
    return words


def _canary(truth: Truth, name: str) -> tuple[int, float]:
    """Version and weight; 0: none."""
    if name not in truth:
        return 0, 0.0
    weight = parse_weight(truth[name].tags.get(PREFIX + "canary_weight"))
    return truth[name].aliases.get("canary", 0), weight or 0.0


@rule
async def promote(world: World, name: str) -> str:
    made = world.managers.current
    number, _ = _canary(world.truth(), name)
    known = world.truth().get(name)
    digest = (
        ""
        if known is None or not number
        else known.versions[number].tags.get(PREFIX + "digest", "")
    )
    is_vetoed = made is not None and (name, digest) in made._canaries._vetoes
    words, error = await order(world, "promote_canary", name, *_unsaid_version())
    if is_vetoed and not isinstance(error, Exception):
        raise Violation(f"{name}@{number} was rolled back, and promoted all the same")
    world.journal.touch(name)
    if not isinstance(error, Exception) and number:
        now = world.truth()[name].aliases.get(DEFAULT_ALIAS)
        if now is not None and now != number:
            raise Violation(f"promote of {name}@{number} left champion at {now}")
    return words


def _unsaid_version() -> tuple[None, ...]:
    """The operator takes whatever is on trial."""
    return (None,) * ("version" in inspect.signature(Manager.promote_canary).parameters)


@rule
async def abort(world: World, name: str) -> str:
    world.journal.touch(name)
    return (await order(world, "abort_canary", name))[0]

"""Rules for changes that no person makes: faults, deaths and clocks."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.control_plane.rules import RULES, Rule, collect
from tests.control_plane.world import World

TROUBLES: dict[str, Rule] = {}
rule = collect(TROUBLES)


def _faults(world: World, process: str) -> Any:
    return world.faults if process == "manager" else world.cli_faults


@rule
async def registry_away(world: World, process: str, is_away: bool) -> str:
    _faults(world, process).is_away = is_away
    return ""


@rule
async def listings_fail(world: World, do: bool) -> str:
    """Has the registry fail all searches and answer all other calls."""
    world.faults.is_unlistable = do
    return ""


@rule
async def read_only(world: World, do: bool) -> str:
    world.faults.is_read_only = do
    return ""


@rule
async def write_fails(world: World, process: str, number: int, has_effect: bool) -> str:
    """Has the n-th write from now on fail; if it has its effect, only the answer is lost."""
    faults = _faults(world, process)
    faults.failing_write, faults.has_effect = number, has_effect
    return ""


@rule
async def looks_are_late(world: World, seconds: float) -> str:
    world.faults.late_s = seconds
    return ""


@rule
async def between_pages(world: World, name: str, arguments: dict[str, Any]) -> str:
    """Runs this step between the first two pages of the manager's next listing."""

    def change() -> None:
        step = RULES[name](world, **arguments)
        try:
            step.send(None)  # type: ignore[attr-defined]
        except StopIteration:
            return
        raise AssertionError(f"{name} waits for something")

    world.one_listing_in_pages(change)
    return ""


@rule
async def serve_away(world: World, is_away: bool) -> str:
    world.serve.is_away = is_away
    return ""


@rule
async def serve_refuses(world: World, do: bool) -> str:
    world.serve.is_refusing = do
    return ""


@rule
async def starts_fail(world: World, number: int) -> str:
    world.serve.num_failing_starts = number
    return ""


@rule
async def engines_die(world: World, base: str) -> str:
    found = [app for app in world.serve.apps if world.wishes.parts(app)[0] == base]
    for app in found:
        world.serve.kill_engines(app)
    world.journal.disturbed.add(base)
    return f"of {', '.join(found)}" if found else "none there"


@rule
async def engines_take_no_plan(world: World, do: bool) -> str:
    world.managers.engines.is_away = do
    return ""


@rule
async def reports_lost(world: World, number: int) -> str:
    world.managers.num_lost_reports = number
    world.journal.forget_trials()
    return ""


@rule
async def manager_dies(world: World, restart: bool) -> str:
    """Kills the manager, with the verdicts that it has not written yet."""
    if world.managers.current is None:
        return "it is dead already"
    await world.managers.kill()
    world.forget_unwritten()
    world.wishes.restarted_s = world.loop.time()
    if restart:
        await world.managers.start()
    return ""


@rule
async def manager_starts(world: World) -> str:
    if world.managers.current is not None:
        return "it runs already"
    await world.managers.start()
    return ""


@rule
async def ingress_starts(world: World) -> str:
    return world.add_ingress() if len(world.ingresses) < 3 else "there are enough"


@rule
async def ingress_dies(world: World, restart: bool) -> str:
    """Kills the oldest ingress, with its counts since its last report."""
    if not world.ingresses:
        return "there is none"
    name = next(iter(world.ingresses))
    await world.remove_ingress(name)
    world.journal.forget_trials()
    return f"{name}; {world.add_ingress()}" if restart else name


@rule
async def clock_jumps(world: World, seconds: float) -> str:
    """Suspends the machine: every timer is due at once."""
    world.loop.now_s += seconds
    world.journal.forget_trials()
    await asyncio.sleep(0)
    return ""


@rule
async def wall_clock_is_set(world: World, seconds: float) -> str:
    world.loop.wall_s += seconds
    return ""

"""The promises that hold after each step; `settle` ends all faults and checks the outcome."""

from __future__ import annotations

import asyncio

from serve_app.control.manager import Manager
from tests.control_plane.processes import Ingress
from tests.control_plane.settled import unsettled
from tests.control_plane.store import CALM
from tests.control_plane.world import Violation, World

SETTLED_S = 200.0  # longer than any pause of the product
_LOOK_S = 4.0
_LASTING_S = 8.0


async def check_step(world: World) -> None:
    """Checks the promises that hold after any step."""
    journal = world.journal
    if journal.tracebacks:
        raise Violation(f"a traceback: {journal.tracebacks[0]}")
    if world.loop.errors:
        raise Violation(f"a task died: {world.loop.errors[0]}")
    if world.broken:
        raise Violation(world.broken[0])
    made = world.managers.current
    if made is not None:
        try:
            await made.check_health()
        except RuntimeError as error:
            if not world.serve.is_away:
                raise Violation(str(error)) from None
        _note_rollbacks(world, made)
    for ingress in world.ingresses.values():
        if any(task.done() for task in ingress.tasks):
            raise Violation(f"a task of {ingress.name} ended")
        _check_calm(world, ingress)
        _check_rolled_back(world, ingress)


def _check_calm(world: World, ingress: Ingress) -> None:
    """Checks adapters that no step changes, on a base that no step changes."""
    if {"alpha"} & (world.journal.disturbed | world.journal.rested):
        return
    for name in CALM:
        try:
            version = ingress.gateway.route(f"alpha:{name}", None).resolution.adapter
        except Exception as error:
            if ingress.name in world.journal.served_calm:
                words = f"{type(error).__name__}: {error}"
                raise Violation(f"{name}, which nobody touched: {words}") from None
            return
        if version is None or version.version != 1:
            raise Violation(f"{name} is {version}")
    world.journal.served_calm.add(ingress.name)


def _note_rollbacks(world: World, made: Manager) -> None:
    journal = world.journal
    for key, veto in made._canaries._vetoes.items():
        if key not in journal.rolled_back:
            journal.counts["roll-backs"] += 1
        journal.rolled_back.setdefault(key, veto.reason)
        if key[0] not in journal.unsound:
            raise Violation(f"the canary of {key[0]} did nothing bad: {veto.reason}")


def _check_rolled_back(world: World, ingress: Ingress) -> None:
    made, view = world.managers.current, ingress.gateway.view
    if made is None or made._view is None or view is None or view.revision != made._view.revision:
        return  # it has not received it yet
    for (name, digest), reason in world.journal.rolled_back.items():
        split = ingress.gateway._traffic.splits.get(name)
        version = None if split is None else split.canary.version
        if version is not None and version.digest == digest and split.canary.share > 0:  # type: ignore[union-attr]
            raise Violation(f"{name}@{version.version} has traffic again; rolled back: {reason}")


async def begin(world: World) -> None:
    def look(ingress: Ingress) -> None:
        try:
            _check_calm(world, ingress)
        except Violation as error:  # here it would end the ingress's task
            world.broken.append(str(error))

    world.on_view = look
    await world.start()
    world.on_write()
    await asyncio.sleep(6)
    await check_step(world)
    if world.journal.served_calm != world.ingresses.keys():
        raise Violation("the server does not start")


async def settle(world: World) -> None:
    """Ends all faults, and gives the platform time."""
    await world.heal()
    problems: list[str] = []
    deadline_s = world.loop.time() + SETTLED_S
    while world.loop.time() < deadline_s:
        await asyncio.sleep(_LOOK_S)
        await check_step(world)
        problems = unsettled(world)
        if not problems:
            await asyncio.sleep(_LASTING_S)
            await check_step(world)
            problems = unsettled(world)
            if not problems:
                world.journal.disturbed.clear()
                return
    raise Violation("; ".join(problems[:3]))

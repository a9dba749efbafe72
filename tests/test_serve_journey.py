"""Requests whose replicas die and come back while Serve's router still has the old list."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from engine.errors import EngineDeadError
from serve_app.config import MigrationArgs
from serve_app.dispatch import migration_state
from serve_app.dispatch.migration_state import MigrationState
from serve_app.errors import EngineGoneError
from serve_app.messages import StreamAddress
from serve_app.stream.server import StreamServer
from serve_app.stream.wire import StreamError
from tests.fakes_replicas import (
    made_attempt,
    made_base,
    made_migrations,
    make_request,
    read_all,
    running_fleet,
    tokens,
)
from tests.routing_factory import EngineEvents
from tests.waiting import until

PROMPT = (11, 12, 13, 14)
WHOLE = (PROMPT * 10)[:40]


async def test_engines_that_were_dead_when_a_request_came_make_it_no_suspect() -> None:
    async with running_fleet(2) as fleet:
        for replica in fleet.replicas.values():
            await replica.host.attend(fleet.server.address)
        await until(lambda: len(fleet.server.engines) == 2)
        for replica in fleet.replicas.values():
            replica.kill()
            replica.is_up = True  # Serve's router still lists it
        await until(lambda: not fleet.server.engines)
        fleet.args = MigrationArgs(limit=1, timeout_s=10.0)
        generation = fleet.generate(make_request(PROMPT))
        reading = asyncio.create_task(read_all(generation))
        await until(lambda: len(fleet.placed) >= 2 or reading.done())
        fleet.add()
        assert tokens(await reading) == WHOLE
        assert generation._state.num_deaths == 0
        assert {engine for engine, _ in fleet.placed} == {"e0", "e1", "e2"}


async def test_engines_that_cannot_reach_the_ingress_make_no_request_a_suspect() -> None:
    async with running_fleet(3) as fleet:
        fleet.args = MigrationArgs(limit=1, timeout_s=10.0)
        refused: list[str] = []
        for name, replica in fleet.replicas.items():
            dial = replica.host._links.open

            async def refuse(address: StreamAddress, name: str = name, dial: Any = dial) -> Any:
                if len(refused) == 2:
                    return await dial(address)
                refused.append(name)
                raise StreamError("cannot reach the ingress")

            replica.host._links.open = refuse  # type: ignore[method-assign]
        generation = fleet.generate(make_request(PROMPT))
        assert tokens(await read_all(generation)) == WHOLE
        assert len(set(refused)) == 2
        assert generation._state.num_deaths == 0


async def test_a_request_that_pauses_goes_on_when_a_replica_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(MigrationState, "_next_pause", lambda *_: 300.0)
    async with running_fleet(1) as fleet:
        fleet.args = MigrationArgs(timeout_s=600.0)
        fleet.pause(1)
        generation = fleet.generate(make_request(PROMPT))
        outputs = await generation.read()
        fleet.num_refusals = 1
        (replica,) = fleet.replicas.values()
        replica.kill()
        fleet.tell()
        fleet.pause(None)
        reading = asyncio.create_task(read_all(generation))
        await until(lambda: fleet.num_refusals == 0)
        await until(lambda: bool(fleet.migrations._arrivals))
        fleet.add()
        assert tokens(outputs + await reading) == WHOLE


def test_a_move_is_tried_again_until_its_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pauses grow to a second, which is no reason to give up a second early."""
    clock = SimpleNamespace(now_s=0.0)
    times = SimpleNamespace(monotonic=lambda: clock.now_s, time=time.time)
    monkeypatch.setattr(migration_state, "time", times)
    server, args = StreamServer(EngineEvents()), MigrationArgs(limit=3, timeout_s=3.0)
    migrating = MigrationState(made_migrations(server), made_base(args), is_copy=False)
    attempt = made_attempt(None)
    dead = EngineGoneError("it died", "e0", was_dead=True)
    for _ in range(30):
        try:
            clock.now_s += migrating.on_failure(dead, attempt, is_on_trial=False)
        except EngineDeadError:
            break
    else:
        pytest.fail("it is tried for ever")
    assert 2.9 < clock.now_s <= 3.0

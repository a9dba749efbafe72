"""Requests that wait at a full engine go to an engine with free rows, such as a replica that came
after they were sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from engine.types import TokenOutput
from tests.fakes_replicas import Fleet, make_request, read_all, running_fleet
from tests.waiting import until

PROMPT = tuple(range(40))
ENDLESS = 1_000_000  # tokens
Read = asyncio.Task[list[TokenOutput]]


@asynccontextmanager
async def full_engine(num_waiting: int, length: int) -> AsyncIterator[tuple[Fleet, list[Read]]]:
    """An engine with a row, whose request does not end. So many others of this length wait there;
    they are read."""
    async with running_fleet(0) as fleet:
        fleet.max_num_seqs = 1
        fleet.add()
        generations, reads = [], []
        for number in range(1 + num_waiting):
            wanted = length if number else ENDLESS
            request = make_request(PROMPT, max_tokens=wanted, name=f"r{number}")
            generations.append(fleet.generate(request))
            reads.append(asyncio.create_task(read_all(generations[-1])))
            await until(lambda number=number: loads(fleet).get("e0") == (1, number))
        try:
            yield fleet, reads[1:]
        finally:
            for read, generation in zip(reads, generations, strict=True):
                read.cancel()
                generation.close()


def loads(fleet: Fleet) -> dict[str, tuple[int, int]]:
    """The sequences that run and that wait, by engine, as the ingress knows them."""
    return {name: (one.num_running, one.num_waiting) for name, one in fleet.server.loads.items()}


async def add_connected(fleet: Fleet) -> None:
    replica = fleet.add()
    await replica.host.attend(fleet.server.address)
    await until(lambda: replica.engine_id in loads(fleet))


async def check_until_moved(fleet: Fleet, num_placed: int) -> None:
    def is_moved() -> bool:
        fleet.migrations.check_engines()
        return len(fleet.placed) == num_placed

    await until(is_moved)


def places(fleet: Fleet) -> list[str]:
    return [engine_id for engine_id, _ in fleet.placed]


async def test_a_request_that_waits_for_a_row_goes_to_an_engine_that_comes() -> None:
    async with full_engine(1, len(PROMPT)) as (fleet, (waiting,)):
        await add_connected(fleet)
        await check_until_moved(fleet, 3)
        assert [token for output in await waiting for token in output.token_ids] == list(PROMPT)
        assert places(fleet) == ["e0", "e0", "e1"]
        assert fleet.migrations.metrics.moves["base", "wait", "ok"] == 1


async def test_no_more_requests_move_than_rows_are_free() -> None:
    async with full_engine(3, ENDLESS) as (fleet, _):
        await add_connected(fleet)
        await check_until_moved(fleet, 5)
        await until(lambda: loads(fleet) == {"e0": (1, 2), "e1": (1, 0)})
        fleet.migrations.check_engines()
        await until(lambda: loads(fleet) == {"e0": (1, 2), "e1": (1, 0)})
        assert places(fleet) == [*["e0"] * 4, "e1"]

"""The limit that a refusal names, of a key with several."""

from __future__ import annotations

import asyncio

import pytest

from serve_app.errors import RateLimitError
from serve_app.tenancy.caller import KeyPolicy
from tests.limits_world import World


@pytest.mark.parametrize("pause_s", [1.15, 1.2, 1.25])
def test_a_refusal_names_the_limit_that_is_spent(pause_s: float) -> None:
    """The ingress has no lease of requests either, because nothing has claimed one meanwhile."""
    world = World(KeyPolicy(requests_per_minute=20, tokens_per_minute=60), 1)
    limits, refusals = world.limits[0], []

    async def scenario() -> None:
        charge = await limits.admit(world.caller, 70)
        await asyncio.sleep(pause_s)
        charge.settle(45)
        for _ in range(3):
            try:
                limits.check(world.caller)
                await limits.admit(world.caller, 5)
            except RateLimitError as error:
                refusals.append(str(error))
            await asyncio.sleep(0.05)

    world.run(scenario())
    assert set(refusals) <= {"Rate limit reached: 60 tokens per minute."}


def test_a_refusal_names_the_limit_that_a_request_waits_for_longest() -> None:
    world = World(KeyPolicy(requests_per_minute=20, tokens_per_minute=600), 1)
    limits = world.limits[0]

    async def scenario() -> None:
        charges = [await limits.admit(world.caller, 1) for _ in range(4)]
        for charge in charges:
            charge.settle(100)
        await asyncio.sleep(1.5)  # the next request comes after 3 s, tokens after 39 s
        for _ in range(2):
            with pytest.raises(RateLimitError, match="600 tokens per minute") as refused:
                await limits.admit(world.caller, 1)
            assert 35 < refused.value.wait_s < 39

    world.run(scenario())


def test_no_part_of_a_request_stays_at_an_ingress_where_it_is_of_no_use() -> None:
    world = World(KeyPolicy(requests_per_minute=60), 1)

    async def scenario() -> None:
        for pause_s in (0.1, 0.1, 2.0):  # one of three in the lease, two at the manager
            await world.request(0, 1, 1, 0.0)
            await asyncio.sleep(pause_s)
        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(world.request(0, 1, 1, 0.0))

    world.run(scenario())
    assert world.num_refused == 0

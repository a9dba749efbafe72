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

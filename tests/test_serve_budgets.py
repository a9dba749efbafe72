"""Budgets of tokens over many ingresses while their use is recorded, in virtual time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from serve_app.tenancy.caller import KeyPolicy
from tests.budget_world import BudgetWorld


def make_world(folder: Path, policy: KeyPolicy, num_ingresses: int, seed: int = 0) -> BudgetWorld:
    return BudgetWorld(policy, num_ingresses, seed, url=f"sqlite:///{folder / 'loraplex.db'}")


async def send(world: BudgetWorld, ingress: int, tokens: int, num_requests: int) -> None:
    for _ in range(num_requests):
        await world.request(ingress, tokens, tokens, 0.25)
        await asyncio.sleep(0.25)


def test_use_that_is_recorded_while_claims_fail_frees_no_part_of_a_budget(tmp_path: Path) -> None:
    world = make_world(tmp_path, KeyPolicy(tokens_per_day=1000), 1)

    async def scenario() -> None:
        await send(world, 0, 100, 2)
        world.is_busy = True
        await send(world, 0, 100, 40)
        assert world.num_used == world.num_recorded == 1000

    world.run(scenario())


def test_a_manager_grants_nothing_of_a_budget_before_it_knows_the_recorded_use(
    tmp_path: Path,
) -> None:
    world = make_world(tmp_path, KeyPolicy(tokens_per_day=1000), 1)

    async def scenario() -> None:
        await send(world, 0, 100, 12)
        await asyncio.sleep(2.0)
        world.store.is_away = True
        world.revive()
        await send(world, 0, 100, 12)
        world.store.is_away = False
        await asyncio.sleep(2.0)
        await send(world, 0, 100, 4)
        assert world.num_used == world.num_recorded == 1000

    world.run(scenario())


@pytest.mark.parametrize("seed", range(4))  # either ingress claims first
def test_a_new_manager_grants_no_part_of_a_budget_that_another_ingress_holds(
    tmp_path: Path, seed: int
) -> None:
    world = make_world(tmp_path, KeyPolicy(tokens_per_day=1000), 2, seed)

    async def open_many(num_requests: int) -> None:
        for _ in range(num_requests):
            for ingress in range(2):
                asyncio.get_running_loop().create_task(world.request(ingress, 100, 100, 20.0))
            await asyncio.sleep(0.1)

    async def scenario() -> None:
        for ingress in range(2):
            await world.request(ingress, 10, 10, 0.1)
        await asyncio.sleep(3.0)
        world.kill()
        await asyncio.sleep(2.0)
        await open_many(3)
        assert world.open_tokens == 600  # of each one's part, 490
        world.revive()
        await open_many(60)
        assert 900 < world.most_tokens <= 1000 + 100

    world.run(scenario())

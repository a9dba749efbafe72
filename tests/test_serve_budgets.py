"""Budgets of tokens over many ingresses while their use is recorded, in virtual time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from serve_app.errors import RateLimitError
from serve_app.tenancy.caller import KeyPolicy
from serve_app.tenancy.limits import Limits
from serve_app.tenancy.usage import Usage
from tests.budget_world import USAGE_KEY, BudgetWorld


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


def test_keys_without_a_budget_do_not_wait_for_the_recorded_use(tmp_path: Path) -> None:
    world = make_world(tmp_path, KeyPolicy(max_parallel_requests=1), 2)

    async def scenario() -> None:
        world.store.is_away = True
        world.revive()
        for ingress in (0, 1):
            await world.request(ingress, 100, 100, 1.0)
            await asyncio.sleep(2.0)  # until its slot is returned
        assert world.num_refused == 0

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


@pytest.mark.parametrize("seed", range(4))
def test_an_ingress_that_is_new_with_its_manager_gets_its_part_of_a_budget(
    tmp_path: Path, seed: int
) -> None:
    """Another file replaces both, while the ingress before has open streams."""
    world = make_world(tmp_path, KeyPolicy(tokens_per_day=1000), 2, seed)

    async def open_many(ingress: int, num_requests: int) -> None:
        for _ in range(num_requests):
            asyncio.get_running_loop().create_task(world.request(ingress, 100, 100, 20.0))
            await asyncio.sleep(0.05)

    async def scenario() -> None:
        await open_many(0, 8)
        await asyncio.sleep(2.0)
        world.revive()
        await open_many(1, 60)
        assert 1000 <= world.most_tokens <= 800 + 500

    world.run(scenario())


async def send_until_admitted(world: BudgetWorld, ingress: int, tokens: int) -> None:
    """Sends a request as an SDK does: again after a refusal that may pass, when it says so."""
    while True:
        try:
            charge = await world.limits[ingress].admit(world.caller, tokens)
            break
        except RateLimitError as error:
            refused = error
        assert (refused.should_retry, refused.code) == (True, "rate_limit_exceeded")
        assert "is held for other requests" in refused.message
        await asyncio.sleep(refused.wait_s)
    charge.settle(tokens)
    world.meters[ingress].add(USAGE_KEY, Usage(1, tokens))


@pytest.mark.parametrize("seed", range(4))
def test_a_request_is_refused_for_a_second_while_others_hold_the_rest_of_a_budget(
    tmp_path: Path, seed: int
) -> None:
    world = make_world(tmp_path, KeyPolicy(tokens_per_day=1000), 3, seed)

    async def scenario() -> None:
        await send(world, 0, 100, 6)
        while world.num_recorded < 600:
            await asyncio.sleep(0.01)
        async with asyncio.timeout(4.0), asyncio.TaskGroup() as group:
            for ingress in (1, 2, 1, 2):
                group.create_task(send_until_admitted(world, ingress, 100))

    world.run(scenario())


def test_recorded_use_counts_once_before_its_ingress_claims_again(tmp_path: Path) -> None:
    world = make_world(tmp_path, KeyPolicy(tokens_per_day=1000), 2)

    async def scenario() -> None:
        await send(world, 0, 100, 6)
        while world.num_recorded < 600:
            await asyncio.sleep(0.01)
        (await world.limits[1].admit(world.caller, 100)).settle(100)

    world.run(scenario())


BUDGET = 5000
MOST = 300  # tokens of a request


async def send_at_random(world: BudgetWorld, ingress: int) -> None:
    """Sends requests at rates that change. Of ten, two fail without an answer, and one is cancelled
    at some time."""
    draw, until_s = world.random, world.loop.time() + 20.0
    async with asyncio.TaskGroup() as group:
        while world.loop.time() < until_s:
            rate = draw.choice([0.5, 5.0, 20.0])
            for _ in range(draw.randint(1, int(3 * rate) + 1)):
                await asyncio.sleep(draw.expovariate(rate))
                tokens = draw.randint(50, MOST)
                real = 0 if draw.random() < 0.2 else tokens
                work = world.request(ingress, tokens, real, draw.expovariate(2.0))
                task = group.create_task(work)
                if draw.random() < 0.1:
                    world.loop.call_later(draw.expovariate(20.0), task.cancel)


async def use_up(world: BudgetWorld, limits: Limits) -> None:
    """Uses the rest of a budget, which admits one more request of any size."""
    for _ in range(2):
        (await limits.admit(world.caller, MOST)).settle(MOST)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("num_ingresses", "fault"), [(1, "busy"), (1, "killed"), (1, "lost"), (2, ""), (4, "")]
)
def test_a_budget_is_used_up_and_only_its_last_part_goes_beyond_it(
    tmp_path: Path, num_ingresses: int, fault: str, seed: int
) -> None:
    world = make_world(tmp_path, KeyPolicy(tokens_per_day=BUDGET), num_ingresses, seed)
    world.lost_share = 0.1 if fault == "lost" else 0.0

    def set_away(is_away: bool) -> None:
        if fault == "busy":
            world.is_busy = is_away
        else:
            world.store.is_away = is_away

    async def scenario() -> None:
        begin_s, duration_s = world.random.uniform(1.0, 5.0), world.random.uniform(2.0, 9.0)
        world.loop.call_later(begin_s, set_away, True)
        world.loop.call_later(begin_s + duration_s, set_away, False)
        if fault == "killed":  # the next manager begins while the database is away
            world.loop.call_later(begin_s, world.kill)
            world.loop.call_later(begin_s + 0.2 * duration_s, world.revive)
        async with asyncio.TaskGroup() as group:
            for ingress in range(num_ingresses):
                group.create_task(send_at_random(world, ingress))
        world.lost_share = 0.0
        await asyncio.sleep(15.0)  # the pauses of a task that failed included
        assert world.num_used > BUDGET - MOST
        assert world.most_tokens <= BUDGET + MOST
        assert world.num_recorded == world.num_used == world.keys.book.used["key", "day"]
        for lease in (limits._leases["key"] for limits in world.limits):
            assert lease.is_idle
            assert (lease._num_open, lease._open_tokens, lease._unrecorded) == (0, 0, 0)
            assert not lease._waiting
        for limits in world.limits:
            with pytest.raises(RateLimitError) as refused:
                await use_up(world, limits)
            assert (refused.value.should_retry, refused.value.code) == (False, "insufficient_quota")

    world.run(scenario())

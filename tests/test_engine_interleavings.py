"""The engine under any order of loads, unloads, flips, requests and cancels: nothing is mixed up,
stuck or left behind.

`python -m tests.benchmarks.interleavings` runs thousands of them.
"""

from __future__ import annotations

import pytest

from tests.interleaving_clients import run_round
from tests.interleaving_machine import MUST_HAPPEN, machine_of, run_interleavings
from tests.interleaving_world import Tally, World, make_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


def test_any_order_of_commands_and_steps_keeps_every_promise(world: World) -> None:
    tally = Tally()
    missing = set(MUST_HAPPEN)
    # The order of sets is another one in each process: with it a seed can miss what is rare.
    for seed in range(1, 6):
        run_interleavings(machine_of(world, tally), count=60, seed=seed)
        missing = {what for what in MUST_HAPPEN if not tally.counts[what]}
        if not missing:
            break
    assert missing == set()  # else it would show nothing


async def test_concurrent_callers_that_come_and_go_at_random_are_all_served(world: World) -> None:
    tally = Tally()
    for seed in range(15):
        await run_round(world, tally, seed)
    assert tally.counts["interleavings"] == 15
    assert tally.counts["ended: length"] > tally.counts["ended: error"]

"""Serve's count of a replica's calls, with room for control calls beyond the limit of requests."""

from __future__ import annotations

import asyncio

import pytest
from ray.serve._private.utils import Semaphore

from serve_app.replica.control_calls import CONTROL_CALLS, answer_while_full
from tests.waiting import until

LIMIT = 3


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Semaphore:
    """Counts calls as a replica does: the router's begin unless it is `locked`."""
    monkeypatch.setattr(Semaphore, "acquire", Semaphore.acquire)  # is restored after the test
    answer_while_full()
    return Semaphore(lambda: LIMIT)


async def begin(calls: Semaphore, count: int) -> None:
    for _ in range(count):
        await calls.acquire()  # type: ignore[no-untyped-call]


def is_full(calls: Semaphore) -> bool:
    return bool(calls.locked())  # type: ignore[no-untyped-call]


async def test_a_full_replica_begins_control_calls_and_no_requests(calls: Semaphore) -> None:
    await begin(calls, LIMIT - 1)
    assert not is_full(calls)
    await begin(calls, 1)
    assert is_full(calls)
    await begin(calls, CONTROL_CALLS)
    for _ in range(CONTROL_CALLS):
        assert is_full(calls)
        calls.release()  # type: ignore[no-untyped-call]
    assert is_full(calls)
    calls.release()  # type: ignore[no-untyped-call]
    assert not is_full(calls)


async def test_control_calls_beyond_their_room_wait_for_their_turn(calls: Semaphore) -> None:
    await begin(calls, LIMIT + CONTROL_CALLS)
    first, second = (asyncio.create_task(begin(calls, 1)) for _ in range(2))
    await until(lambda: len(calls._waiters or ()) == 2)
    calls.release()  # type: ignore[no-untyped-call]
    await first
    assert not second.done()
    calls.release()  # type: ignore[no-untyped-call]
    await second

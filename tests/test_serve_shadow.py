"""When a copy is not made. How they run and end: test_serve_canary_http."""

from __future__ import annotations

import pytest

from engine.types import EngineLoad
from serve_app.arms import Arms
from serve_app.migrations import Migrations
from serve_app.shadow import Shadows, Submitted, is_busy
from serve_app.stream_server import StreamServer
from tests.canary_factory import CANARY
from tests.fakes_replicas import Router

IDLE = EngineLoad(num_blocks=100, num_free_blocks=100)


@pytest.mark.parametrize(
    ("load", "busy"),
    [
        (IDLE, False),
        (EngineLoad(num_running=9, num_blocks=100, num_free_blocks=20), False),
        (EngineLoad(num_running=9, num_blocks=100, num_free_blocks=19), True),
        (EngineLoad(num_waiting=1, num_blocks=100, num_free_blocks=90), True),
        # Waits for its adapter, not for room: nobody else is held up by that.
        (
            EngineLoad(num_waiting=1, num_waiting_for_adapter=1, num_blocks=9, num_free_blocks=9),
            False,
        ),
    ],
)
def test_an_engine_is_busy_when_somebody_waits_for_room(load: EngineLoad, busy: bool) -> None:
    assert is_busy(load) == busy


@pytest.mark.parametrize(
    ("limit", "load"),
    [(0, IDLE), (8, None), (8, EngineLoad(num_waiting=3, num_blocks=100, num_free_blocks=100))],
)
async def test_a_copy_that_others_would_feel_is_not_begun(
    limit: int, load: EngineLoad | None, submitted: Submitted
) -> None:
    arms = Arms()
    shadows = Shadows(Migrations(StreamServer(), Router(), "i0"), arms, limit)
    shadows.offer(submitted, CANARY, load)
    assert (shadows.num_open, shadows.num_dropped) == (0, 1)
    assert arms.tallies() == ()


@pytest.fixture
def submitted() -> Submitted:
    """Never looked at."""
    return Submitted.__new__(Submitted)

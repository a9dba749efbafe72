"""The reasons not to make a copy. test_serve_canary_http tests how copies run and end."""

from __future__ import annotations

import pytest

from engine.types import EngineLoad, Request
from serve_app.canary.arm_stats import ArmStats
from serve_app.dispatch.completion import PreparedRequest
from serve_app.dispatch.shadow import Shadows, _copy_request, is_busy
from serve_app.openai.completions import CompletionRequest
from serve_app.openai.engine_params import Prompt
from serve_app.openai.json_body import parse_body
from serve_app.openai.responses import ResponseHead
from serve_app.routing.request import make_routing_request
from serve_app.stream.server import StreamServer
from serve_app.text.base_text import BaseText
from serve_app.text.tokenizer import TextTokenizer
from tests.canary_factory import CANARY
from tests.fakes_replicas import (
    Fleet,
    made_base,
    made_migrations,
    make_request,
    running_fleet,
)
from tests.routing_factory import EngineEvents
from tests.text_factory import byte_level_tokenizer
from tests.waiting import until

TEXT = BaseText(TextTokenizer(byte_level_tokenizer()), None, {}, frozenset())

IDLE = EngineLoad(num_blocks=100, num_free_blocks=100)


@pytest.mark.parametrize(
    ("load", "busy"),
    [
        (IDLE, False),
        (EngineLoad(num_running=9, num_blocks=100, num_free_blocks=20), False),
        (EngineLoad(num_running=9, num_blocks=100, num_free_blocks=19), True),
        (EngineLoad(num_waiting=1, num_blocks=100, num_free_blocks=90), True),
        # It waits for its adapter, not for capacity, so that no other request is held up.
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
    limit: int, load: EngineLoad | None, prepared: PreparedRequest
) -> None:
    arms = ArmStats()
    shadows = Shadows(made_migrations(StreamServer(EngineEvents())), arms, limit)
    shadows.offer(prepared, CANARY, load)
    assert (shadows.num_open, shadows.num_dropped) == (0, 1)
    assert arms.counts() == ()


def _prepared(fleet: Fleet, request: Request) -> PreparedRequest:
    parsed = parse_body(CompletionRequest, b'{"model": "m", "prompt": "x"}')
    prompts = (Prompt(request.prompt_token_ids, None),)
    head = ResponseHead("completion", "id", "m", 0, "fp")
    routing = make_routing_request((request,), (), fleet.base.description.limits)
    base = made_base(fleet.args, fleet, TEXT)
    return PreparedRequest(base, parsed, head, prompts, (request,), (), routing)


async def test_a_copy_that_is_in_quarantine_is_dropped_without_a_failed_task(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running_fleet(1) as fleet:
        request, arms = make_request((11, 12, 13, 14), max_tokens=4), ArmStats()
        fleet.migrations.quarantine.add((_copy_request(request, CANARY),))
        shadows = Shadows(fleet.migrations, arms, 1)
        caplog.clear()
        shadows.offer(_prepared(fleet, request), CANARY, IDLE)
        await until(lambda: shadows.num_open == 0)
        assert (shadows.num_dropped, fleet.placed, arms.counts()) == (1, [], ())
        assert not [one for one in caplog.records if one.levelname == "ERROR"]


async def test_a_copy_whose_engine_dies_is_lost_by_no_client() -> None:
    async with running_fleet(1) as fleet:
        prepared = _prepared(fleet, make_request((11, 12, 13, 14), max_tokens=4000))
        shadows = Shadows(fleet.migrations, ArmStats(), 1)
        shadows.offer(prepared, CANARY, IDLE)
        await until(lambda: fleet.replicas["e0"].engine.load().num_running > 0)
        fleet.replicas["e0"].kill()
        await until(lambda: shadows.num_open == 0)
        assert fleet.migrations.metrics.lost.total() == 0


@pytest.fixture
def prepared() -> PreparedRequest:
    """An instance without fields: none of them may be read."""
    return PreparedRequest.__new__(PreparedRequest)

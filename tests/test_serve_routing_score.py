"""The expected time to the first token, by tables."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.admission import EngineLimits
from engine.types import EngineLoad
from serve_app.messages import RoutingRequest
from serve_app.routing.score import adapter_load_s, expected_ttft, work_s
from serve_app.routing.view import ReplicaView
from serve_app.stream.wire import LoadSeconds
from tests.routing_factory import make_ask, make_view, make_views

APPROX_S = 1e-9


@pytest.mark.parametrize(
    ("num_tokens", "load", "queue_s", "prefill_s"),
    [
        (100, {}, 0.0, 0.01 + 0.01),
        (2500, {}, 0.0, 0.25 + 3 * 0.01),  # three steps of the budget of 1000
        # One step with the queued tokens is planned without this request.
        (100, {"queued_tokens": 400}, 0.04 + 0.01, 0.02),
        # The second thousand queues before it, in a step of its own.
        (100, {"queued_tokens": 2000}, 0.2 + 2 * 0.01, 0.02),
        # Ten sequences: a step of 11 ms has just begun.
        (100, {"num_running": 10}, 0.011, 0.01 + 0.011),
        # The device is busy for 30 ms with a step, and the step after it is planned.
        (100, {"num_running": 10, "in_flight_s": 0.03}, 0.03 + 0.011, 0.021),
        # Beside ten sequences a step computes 200 prompt tokens: the first 200 are planned, 300
        # queue, and this request's 300 share the second step with them and need a third.
        (
            300,
            {"num_running": 10, "queued_tokens": 500, "step_prompt_tokens": 200},
            0.05 + 2 * 0.011,
            0.03 + 2 * 0.011,
        ),
        # Prompts that wait for room for their adapter are overtaken.
        (
            100,
            {
                "num_running": 10,
                "num_waiting": 4,
                "num_waiting_for_adapter": 4,
                "queued_tokens": 900,
                "queued_tokens_for_adapter": 900,
            },
            0.011,
            0.021,
        ),
        # All 64 rows used: 16.4 ms per step, a row becomes free every second step.
        (100, {"num_running": 64}, 128 / 64 * 0.0164, 0.01 + 0.0164),
        (100, {"num_running": 64, "num_waiting": 9}, 10 * 128 / 64 * 0.0164, 0.0264),
        # 100 KV tokens are missing, 100,000 are used: so many become free in 0.128 steps.
        (100, {"num_running": 10, "num_free_blocks": 0}, 0.011, 0.021),
    ],
)
def test_queue_and_prefill_follow_the_measured_steps(
    num_tokens: int, load: dict[str, object], queue_s: float, prefill_s: float
) -> None:
    terms = expected_ttft(make_ask(num_tokens=num_tokens), make_view(**load))  # type: ignore[arg-type]
    assert terms.queue_s == pytest.approx(queue_s, abs=APPROX_S)
    assert terms.prefill_s == pytest.approx(prefill_s, abs=APPROX_S)
    assert terms.adapter_s == 0.0
    assert terms.total_s == pytest.approx(queue_s + prefill_s)


@pytest.mark.parametrize(
    ("tiers", "load_s"),
    [
        ({"device": "a"}, 0.0),
        ({"host": "a"}, 0.01),
        ({"disk": "a"}, 0.21),
        ({}, 2.01),
    ],
)
def test_the_adapter_comes_from_its_fastest_tier(tiers: dict[str, str], load_s: float) -> None:
    view = make_view(**tiers)  # type: ignore[arg-type]
    request = make_ask(adapter="a")
    assert adapter_load_s("a", view) == pytest.approx(load_s)
    assert expected_ttft(request, view).adapter_s == pytest.approx(load_s)


def test_several_adapters_wait_for_the_slowest_of_them() -> None:
    view = make_view(device="a", host="ab", disk="abc")
    assert [adapter_load_s(key, view) for key in ("a", "2*a", "a+b", "a+0.5*c", "b+d")] == (
        pytest.approx([0.0, 0.0, 0.01, 0.21, 2.01])
    )
    assert view.has_adapter("a+0.5*b")
    assert not view.has_adapter("a+c")
    view.place(make_ask("call", adapter="a+d"), 0.0)
    assert view.is_loading("d")
    assert not view.is_loading("b")


def test_an_adapter_is_loaded_while_the_queue_is_worked_off() -> None:
    view = make_view(disk="a", queued_tokens=999)
    terms = expected_ttft(make_ask(adapter="a"), view)
    assert terms.queue_s == pytest.approx(0.0999 + 0.01)
    assert terms.adapter_s == pytest.approx(0.21 - 0.1099)


def test_the_age_of_the_newest_frame_shortens_the_step_under_way() -> None:
    request = make_ask()
    ahead = make_view(num_running=10, in_flight_s=0.03)  # its frame arrived at 1.0
    assert expected_ttft(request, ahead, 1.0).queue_s == pytest.approx(0.03 + 0.011)
    assert expected_ttft(request, ahead, 1.02).queue_s == pytest.approx(0.01 + 0.011)
    # The step after it does not begin before this one ends, however late the frame is.
    assert expected_ttft(request, ahead, 1.2).queue_s == pytest.approx(0.011)
    one_by_one = make_view(num_running=10)
    assert expected_ttft(request, one_by_one, 1.004).queue_s == pytest.approx(0.007)
    assert expected_ttft(request, one_by_one, 1.2).queue_s == 0.0


def test_an_adapter_without_room_on_the_device_waits_as_long_as_others_did() -> None:
    full = {"num_running": 10, "num_waiting": 1, "num_waiting_for_adapter": 1}
    view = make_view(device="a", host="ab", adapter_room_s=0.8, **full)  # type: ignore[arg-type]
    here, blocked = (expected_ttft(make_ask(adapter=name), view) for name in "ab")
    assert here.adapter_s == 0.0
    assert blocked.adapter_s == pytest.approx(0.8 - blocked.queue_s)
    assert expected_ttft(make_ask(), view).adapter_s == 0.0
    view.observe(replace(view.load, num_waiting_for_adapter=0), 1.0)
    assert expected_ttft(make_ask(adapter="b"), view).adapter_s < 0.01


def test_an_adapter_that_another_request_brings_is_half_way_here() -> None:
    view = make_view()
    view.place(make_ask("first", adapter="a"), 1.0)
    assert adapter_load_s("a", view) == pytest.approx(0.01 + 1.0)


def test_cached_prefixes_need_no_prefill() -> None:
    view = make_view(prefixes=(11, 12, 13))
    request = make_ask(num_tokens=100, prefixes=(11, 12, 99))
    assert view.num_cached_tokens(request.prefixes) == 64
    assert expected_ttft(request, view).prefill_s == pytest.approx(0.01 + 36 * 0.0001)


@pytest.mark.parametrize("held", range(9))
def test_the_longest_cached_prefix_is_found(held: int) -> None:
    view = make_view(prefixes=range(held))
    assert view.num_cached_tokens(tuple(range(8))) == 32 * held


def test_what_was_placed_counts_until_the_engine_says_that_it_has_it() -> None:
    view = make_view()
    before = expected_ttft(make_ask(), view).total_s
    view.place(make_ask("a", num_tokens=500, num_sequences=2), 1.0)
    assert (view.queued_tokens, view.num_sequences, len(view._placed)) == (500, 2, 1)
    assert expected_ttft(make_ask(), view).total_s > before + 0.05
    view.place(make_ask("a", num_tokens=300), 1.0)  # a retry: counted once, with its new size
    assert (view.queued_tokens, view.num_sequences) == (300, 1)
    view.unplace("a")
    view.unplace("a")
    assert (view.queued_tokens, view.num_sequences, len(view._placed)) == (0, 0, 0)


def test_what_nobody_ever_took_over_is_forgotten() -> None:
    view = make_view()
    view.place(make_ask("a"), 1.0)
    view.place(make_ask("b"), 32.0)
    assert len(view._placed) == 1


def test_a_request_that_needs_more_work_is_told_so() -> None:
    view = make_view()
    assert work_s(make_ask(num_sequences=4), view) > work_s(make_ask(), view)
    assert work_s(make_ask(num_tokens=1000), view) > work_s(make_ask(), view)


def test_an_engine_that_measured_nothing_yet_can_be_scored() -> None:
    view = ReplicaView("r0", EngineLimits(0, 0, 0, 0, 0))
    terms = expected_ttft(RoutingRequest("call", 0), view)
    assert terms.total_s > 0


def test_who_measured_nothing_yet_is_as_good_as_the_others() -> None:
    views = make_views(3)
    old, other, new = views.replicas
    for view, seconds in ((old, 0.1), (other, 0.3)):
        view.observe_load_s(LoadSeconds(0.02, seconds, 3.0))
        view.on_disk = frozenset({"a"})
    new.observe(EngineLoad(), 2.0)
    new.on_disk = frozenset({"a"})
    request = make_ask(adapter="a")
    assert (
        expected_ttft(request, new) == expected_ttft(request, old) == expected_ttft(request, other)
    )
    assert adapter_load_s("a", new) == pytest.approx(0.02 + 0.14)

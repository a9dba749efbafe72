"""The report of a replica to the autoscaling policy, and the way of the backlog to it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from ray import serve

from engine.admission import EngineLimits
from engine.types import EngineLoad, Request, ResumedChoice, SamplingParams
from serve_app.autoscaling.stats import ScalingStats
from serve_app.control import broadcaster as broadcaster_module
from serve_app.control import fleet
from serve_app.control.base_sleep import ScaleToZero
from serve_app.control.broadcaster import Broadcaster
from serve_app.dispatch.activity import Activity
from serve_app.messages import Backlog, BaseActivity, IngressReport
from tests.fakes_broadcast import Handle
from tests.waiting import until

LIMITS = EngineLimits(4096, 1000, 50_000, max_num_seqs=8, max_num_batched_tokens=512)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def request(num_tokens: int, *resumed: ResumedChoice) -> Request:
    return Request("r", (1,) * num_tokens, SamplingParams(), resumed=resumed)


def test_the_newest_load_is_reported_with_the_limits() -> None:
    load = EngineLoad(
        num_running=3,
        num_waiting=2,
        queued_tokens=700,
        num_blocks=100,
        num_free_blocks=25,
        step_token_s=0.001,
    )
    found = ScalingStats(LIMITS, Clock()).sample(load)
    assert all(type(value) is float for value in found.values())
    expected = {"num_running": 3, "num_waiting": 2, "queued_tokens": 700, "kv_usage": 0.75}
    expected |= {"step_token_s": 0.001, "max_num_seqs": 8, "max_kv_tokens": 50_000}
    assert found | expected == found


def test_arriving_tokens_are_those_that_the_prefix_cache_lacked() -> None:
    clock = Clock()
    stats = ScalingStats(LIMITS, clock)
    for second in range(1, 61):
        clock.now_s += 1.0
        stats.arrived([request(300), request(100, ResumedChoice(0, (1,) * 100))])
        found = stats.sample(EngineLoad(prefix_hits=200 * second))
    assert found["arriving_tokens_per_s"] == pytest.approx(300, rel=0.01)
    for _ in range(60):
        clock.now_s += 1.0
        found = stats.sample(EngineLoad(prefix_hits=200 * 60))
    assert found["arriving_tokens_per_s"] == pytest.approx(0, abs=0.01)


def test_a_backlog_is_reported_until_nobody_tells_of_it_any_more() -> None:
    clock = Clock()
    stats = ScalingStats(LIMITS, clock)
    stats.set_backlog(Backlog(7, 900))
    found = stats.sample(EngineLoad())
    assert (found["backlog_requests"], found["backlog_tokens"]) == (7, 900)
    clock.now_s += 6.0
    assert stats.sample(EngineLoad())["backlog_requests"] == 0


def test_the_manager_adds_up_what_waits_in_all_ingresses() -> None:
    keeper = ScaleToZero()
    for name, count in (("one", 3), ("two", 4)):
        activity = BaseActivity("b" * 64, count, 0.0, Backlog(count, 100 * count))
        keeper.add_report(IngressReport(name, (activity,)), 10.0)
    assert keeper.backlog("b" * 64, 10.5) == Backlog(7, 700)
    assert keeper.backlog("c" * 64, 10.5) == Backlog()
    assert keeper.backlog("b" * 64, 20.0) == Backlog()


def test_an_ingress_reports_what_its_queue_says() -> None:
    activity = Activity()
    activity.enter("b" * 64)
    (quiet,) = activity.report(lambda _: Backlog())
    (busy,) = activity.report({"b" * 64: Backlog(2, 50)}.__getitem__)
    assert (quiet.backlog, busy) == (Backlog(), replace(quiet, backlog=Backlog(2, 50)))


async def test_engines_hear_of_a_backlog_once_an_interval_and_once_of_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet, "REPORT_INTERVAL_S", 600.0)
    sent: list[tuple[str, Backlog]] = []

    async def send(app_name: str, backlog: Backlog) -> int:
        sent.append((app_name, backlog))
        if backlog.num_requests == 2:
            raise TimeoutError
        return 0

    broadcaster = Broadcaster("backlog", "set_backlog", fleet.backlog_is_due, send)
    broadcaster.publish({"quiet": Backlog(), "busy": Backlog(1, 10)})
    await until(lambda: bool(sent))
    broadcaster.publish({"quiet": Backlog(), "busy": Backlog(2, 20)})  # too early
    await asyncio.sleep(0)
    assert sent == [("busy", Backlog(1, 10))]
    monkeypatch.setattr(fleet, "REPORT_INTERVAL_S", 0.1)
    for backlog in (Backlog(2, 20), Backlog(), Backlog()):
        await asyncio.sleep(fleet.REPORT_INTERVAL_S)
        broadcaster.publish({"quiet": Backlog(), "busy": backlog})
    await until(lambda: len(sent) == 3)
    assert sent[1:] == [("busy", Backlog(2, 20)), ("busy", Backlog())]


async def test_the_handle_of_a_removed_application_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[str] = []
    handle = Handle(False)

    def open_handle(deployment: str, app_name: str) -> Handle:
        opened.append(app_name)
        return handle

    monkeypatch.setattr(serve, "get_deployment_handle", open_handle)
    broadcaster = Broadcaster[Backlog]("backlog", "set_backlog", lambda *_: True)
    broadcaster.publish({"app": Backlog(1)})
    await until(lambda: len(handle.calls) == 1)
    await settle()
    broadcaster.publish({"app": Backlog(2)})
    await until(lambda: len(handle.calls) == 2)
    assert opened == ["app"]
    await settle()
    broadcaster.publish({})
    broadcaster.publish({"app": Backlog(3)})
    await until(lambda: len(handle.calls) == 3)
    assert opened == ["app", "app"]
    assert handle.calls == [("set_backlog", Backlog(number)) for number in (1, 2, 3)]


async def test_a_replica_that_hangs_is_the_only_one_that_misses_a_value(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Checks that the late call is cancelled, too: it would be counted by Serve as long as it waits
    in its replica."""
    monkeypatch.setattr(broadcaster_module, "_TIMEOUT_S", 1.0)
    handle = Handle(False, True, False)
    monkeypatch.setattr(serve, "get_deployment_handle", lambda *_: handle)
    broadcaster = Broadcaster[Backlog]("backlog", "set_backlog", lambda *_: True)
    broadcaster.publish({"app": Backlog(1)})
    await until(lambda: bool(caplog.records))
    (record,) = caplog.records
    assert record.getMessage().startswith("1 engine replicas of app did not receive the backlog")
    assert [one.is_cancelled for one in handle.results[0]] == [False, True, False]


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)

"""Background tasks: none ends by an exception unseen, and loops of a process go on."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.types import StepOutput
from serve_app import tasks
from serve_app.canary.arm_stats import ArmStats
from serve_app.dispatch.activity import CountsReporter
from serve_app.metrics.engine import EngineMetrics
from serve_app.replica import engine_actor
from serve_app.replica.engine_actor import EngineHost
from serve_app.tasks import check_running, failures_text, keep, share, spawn
from tests.fakes_engine import PacedEngine
from tests.ingress_app import make_gateway
from tests.waiting import until


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "_FIRST_PAUSE_S", 0.001)


def num_failures(name: str) -> int | None:
    """Returns the count as a scraper reads it; None: no such task was ever begun."""
    (family,) = text_string_to_metric_families(failures_text({"process": "test"}).decode())
    found = [sample.value for sample in family.samples if sample.labels["task"] == name]
    return int(found[0]) if found else None


async def fail() -> None:
    raise ValueError("no such thing")


async def test_a_task_that_nobody_awaits_is_logged_and_counted_when_it_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    task = spawn(fail(), "lonely")
    await until(task.done)
    await until(lambda: num_failures("lonely") == 1)
    assert "the task lonely ended by an exception" in caplog.text
    assert "ValueError: no such thing" in caplog.text
    with pytest.raises(RuntimeError, match="the task 'lonely' ended"):
        check_running(None, task)


async def test_a_cancelled_task_and_one_that_returns_are_no_failures() -> None:
    sleeper, sound = spawn(asyncio.sleep(60), "sound"), spawn(asyncio.sleep(0), "sound")
    check_running(sleeper, sound)
    await sound
    sleeper.cancel()
    await until(sleeper.done)
    assert num_failures("sound") == 0


async def test_a_loop_that_fails_when_it_is_cancelled_does_not_begin_again() -> None:
    num_begun = 0

    async def loop() -> None:
        nonlocal num_begun
        num_begun += 1
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise ConnectionError("the far end left first") from None

    task = keep(loop, "stopped")
    await until(lambda: num_begun == 1)
    task.cancel()
    await until(task.done)
    assert num_begun == 1


async def test_a_failure_that_somebody_awaits_is_that_ones_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(ValueError, match="no such thing"):
        await share(fail(), "shared")
    assert num_failures("shared") is None
    assert not caplog.records


async def test_a_loop_that_fails_begins_again_until_it_is_cancelled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    begun = 0

    async def work() -> None:
        nonlocal begun
        begun += 1
        if begun == 1:
            raise ValueError("no such thing")
        if begun == 2:  # its awaitable is cancelled, not the loop
            raise asyncio.CancelledError
        await asyncio.sleep(60)

    task = keep(work, "loop")
    await until(lambda: begun == 3)
    assert num_failures("loop") == 2
    assert "the task loop failed, it begins again" in caplog.text
    check_running(task)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert task.cancelled()
    assert begun == 3


class FakeManager:
    """Counts the reports; has no view."""

    def __init__(self) -> None:
        self.num_reports = 0
        self.view = SimpleNamespace(remote=self._wait)
        self.report = SimpleNamespace(remote=self._report)

    async def _wait(self, revision: str, timeout_s: float) -> None:
        await asyncio.sleep(60)

    async def _report(self, report: object) -> SimpleNamespace:
        self.num_reports += 1
        return SimpleNamespace(num_ingresses=1, quarantined=())


async def test_an_ingress_whose_report_cannot_be_made_reports_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class FailingArms(ArmStats):
        num_calls = 0

        def counts(self) -> tuple[()]:
            FailingArms.num_calls += 1
            if FailingArms.num_calls < 3:
                raise KeyError("an arm")
            return ()

    manager = FakeManager()
    gateway = make_gateway(manager)
    gateway.arms = FailingArms()
    with caplog.at_level(logging.ERROR):
        gateway.start(CountsReporter("i0", lambda: b""))
        await until(lambda: manager.num_reports > 0)
    assert "the task report failed" in caplog.text
    assert gateway.is_healthy
    gateway.check_tasks()
    for task in gateway._tasks:
        task.cancel()
    await until(lambda: all(task.done() for task in gateway._tasks))
    assert not gateway.is_healthy  # it follows the manager no more
    with pytest.raises(RuntimeError, match="the task 'follow-manager' ended"):
        gateway.check_tasks()
    (watch,) = (one for one in asyncio.all_tasks() if one.get_name() == "watch-engines")
    watch.cancel()


async def test_an_engine_whose_heartbeat_fails_beats_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_actor, "HEARTBEAT_S", 0.001)

    class FailingMetrics(EngineMetrics):
        num_beats = 0

        def observe_step(self, step: StepOutput, now_s: float) -> None:
            self.num_beats += 1
            if self.num_beats == 2:
                raise ZeroDivisionError
            super().observe_step(step, now_s)

    metrics = FailingMetrics("base", "e0", 16)
    host = EngineHost(PacedEngine(), "e0", metrics)
    host.start()
    try:
        await until(lambda: metrics.num_beats > 3)
    finally:
        host.stop()
    assert "the task heartbeat failed" in caplog.text

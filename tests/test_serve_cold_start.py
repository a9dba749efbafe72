"""Requests for a base that sleeps, at a single ingress, without Serve."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import cast

import pytest
from ray.serve.handle import DeploymentHandle
from starlette.types import Message

from engine.admission import EngineLimits
from registry.catalog import Catalog
from registry.entities import AdapterVersion, BaseVersion, Setting
from registry.errors import NotFoundError
from serve_app.api.ingress import build_asgi
from serve_app.config import ModelArgs
from serve_app.dispatch.base_handle import BaseHandle
from serve_app.dispatch.cold_start import ColdStarts
from serve_app.errors import ClientGoneError, OverloadedError, ServiceUnavailableError
from serve_app.messages import Backlog, BaseDescription
from serve_app.platform_view import PlatformView, ServedBase
from serve_app.text.base_text import BaseText
from tests.ingress_app import make_gateway, make_state

BASE = BaseVersion("a", 1, "a" * 64, "")
ASLEEP = ServedBase(BASE, "app", "asleep", ModelArgs(name="a"), start_s=6.2)


class Manager:
    """Implements `wake_base.remote` of the manager's handle."""

    def __init__(self) -> None:
        self.woken: list[str] = []
        self.wake_base = self

    async def remote(self, digest: str) -> None:
        self.woken.append(digest)


class World:
    def __init__(self, base: ServedBase = ASLEEP) -> None:
        self.manager = Manager()
        self.gateway = make_gateway(self.manager)
        self.cold_starts = ColdStarts(self.gateway)
        self.left = asyncio.Event()
        self.see(base)

    def see(self, *bases: ServedBase) -> None:
        self.gateway._apply(PlatformView("1", Catalog((BASE,)), bases, (), True, None))

    def come_up(self) -> None:
        running = replace(ASLEEP, state="running", deployed_s=2.0)
        description = BaseDescription({}, EngineLimits(64, 64, 64))
        handle = cast("DeploymentHandle[object]", None)
        text = cast("BaseText", None)
        self.gateway._resting[BASE.digest] = BaseHandle(BASE, "app", handle, description, text, 2.0)
        self.see(running)

    async def receive(self) -> Message:
        await self.left.wait()
        return {"type": "http.disconnect"}

    def ask(self) -> asyncio.Task[object]:
        admit = self.cold_starts.admit("a", self.receive)
        return asyncio.get_running_loop().create_task(admit)

    @property
    def num_open(self) -> int:
        return sum(base.num_open for base in self.gateway.activity.report(lambda _: Backlog()))


@pytest.fixture(autouse=True)
def _no_base_is_woken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A base is woken again after a second, which a busy machine may take between two lines."""
    monkeypatch.setattr("serve_app.dispatch.cold_start._RETRY_S", 600.0)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_requests_wait_wake_it_once_and_go_on_when_it_answers() -> None:
    world = World()
    asked = [world.ask() for _ in range(3)]
    await settle()
    assert world.manager.woken == [BASE.digest]
    assert world.num_open == 3
    world.see(replace(ASLEEP, state="starting", is_waking=True))
    await settle()
    assert not any(task.done() for task in asked)
    world.come_up()
    await asyncio.gather(*asked)
    assert world.num_open == 3  # until each is left
    assert world.gateway.is_healthy


async def test_more_than_may_wait_are_told_to_come_back() -> None:
    world = World(replace(ASLEEP, model=ModelArgs(name="a", max_queued_requests=1)))
    first = world.ask()
    await settle()
    with pytest.raises(OverloadedError) as refused:
        await world.ask()
    assert refused.value.retry_after_s == 7
    world.come_up()
    await first


async def test_a_base_that_lets_nobody_wait_is_woken_all_the_same() -> None:
    world = World(replace(ASLEEP, model=ModelArgs(name="a", cold_start="refuse")))
    with pytest.raises(ServiceUnavailableError) as refused:
        await world.ask()
    await settle()
    assert refused.value.retry_after_s == 7
    assert world.manager.woken == [BASE.digest]
    assert world.num_open == 0


async def test_who_waits_is_told_why_it_does_not_start() -> None:
    world = World()
    asked = world.ask()
    await settle()
    world.see(replace(ASLEEP, state="failed", is_waking=True, message="no memory is left"))
    with pytest.raises(ServiceUnavailableError, match="no memory is left"):
        await asked
    assert world.num_open == 0


async def test_who_waits_for_a_base_that_is_removed_is_told_so() -> None:
    world = World()
    asked = world.ask()
    await settle()
    world.see()
    with pytest.raises(NotFoundError):
        await asked


async def test_the_wait_has_an_end() -> None:
    world = World(replace(ASLEEP, model=ModelArgs(name="a", cold_start_timeout_s=0.01)))
    with pytest.raises(ServiceUnavailableError, match="did not start within 1 s"):
        await world.ask()
    assert world.num_open == 0


async def test_a_client_that_leaves_waits_no_longer() -> None:
    world = World()
    asked = world.ask()
    await settle()
    world.left.set()
    with pytest.raises(ClientGoneError):
        await asked
    assert world.num_open == 0


async def test_a_client_that_leaves_tokenize_at_a_base_asleep_is_no_failure_of_the_server(
    caplog: pytest.LogCaptureFixture,
) -> None:
    state = make_state(manager=Manager())
    state.gateway._apply(PlatformView("1", Catalog((BASE,)), (ASLEEP,), (), True, None))
    headers = {"host": "testserver", "content-type": "application/json"}
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/tokenize",
        "raw_path": b"/tokenize",
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "server": ("testserver", 80),
        "client": ("127.0.0.1", 1),
    }
    content = b'{"model": "a", "prompt": "x"}'
    messages = [{"type": "http.request", "body": content, "more_body": False}]
    sent: list[Message] = []

    async def receive() -> Message:
        return messages.pop() if messages else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    await build_asgi(state)(scope, receive, send)
    assert sent[0]["status"] == 499
    counted = state.metrics.text(0).decode().splitlines()
    assert 'loraplex_client_disconnects_total{ingress="i0"} 1.0' in counted
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_sleep_that_was_called_off_costs_nothing() -> None:
    world = World(replace(ASLEEP, sleep_epoch=5.0, deployed_s=2.0))
    assert world.gateway._asleep() == ((BASE.digest, 5.0),)
    asked = world.ask()
    await settle()
    world.come_up()
    await settle()
    assert asked.done()
    await asked


async def test_requests_for_a_canary_whose_base_sleeps_wake_it_and_are_answered_by_stable() -> None:
    other = replace(BASE, name="other", digest="o" * 64)
    stable = AdapterVersion("pirate", 1, "1" * 64, "a", BASE.digest, 8, (), "", ("champion",))
    canary = replace(
        stable,
        version=2,
        digest="2" * 64,
        base_name="other",
        base_digest=other.digest,
        aliases=("canary",),
    )
    weight = Setting("pirate", "canary_weight", "1")
    catalog = Catalog((BASE, other), (stable, canary), settings=(weight,))
    world = World()
    world.come_up()
    asleep = replace(ASLEEP, base=other, app_name="far")
    assert world.gateway.view is not None
    (awake,) = world.gateway.view.bases
    world.gateway._apply(PlatformView("2", catalog, (awake, asleep), (), True, None))
    route, _ = await world.cold_starts.admit("pirate", world.receive)
    await settle()
    assert world.manager.woken == [other.digest]
    assert route.arm is not None
    assert (route.arm.arm, route.arm.version) == ("stable", 1)
    starting = replace(asleep, state="starting", is_waking=True)
    world.gateway._apply(PlatformView("3", catalog, (awake, starting), (), True, None))
    await world.cold_starts.admit("pirate", world.receive)
    await settle()
    assert world.manager.woken == [other.digest]  # once


async def test_the_version_before_stands_in_until_the_new_one_answers() -> None:
    old = replace(BASE, version=1, digest="0" * 64)
    world = World()
    description = BaseDescription({}, EngineLimits(64, 64, 64))
    deployment, text = cast("DeploymentHandle[object]", None), cast("BaseText", None)
    handle = BaseHandle(old, "old", deployment, description, text, 0.0)
    world.gateway._handles[old.digest] = handle
    new = replace(BASE, version=2)
    starts = replace(ASLEEP, base=new, state="starting", is_awaited=False)
    stands = ServedBase(old, "old", "running", ASLEEP.model, replaced_by=new.digest)
    catalog = Catalog((old, new))
    world.gateway._apply(PlatformView("2", catalog, (starts, stands), (), True, None))
    assert world.gateway.is_ready
    settled = replace(handle, migration=ASLEEP.model.migration)
    assert world.gateway.resolve("a")[0] == settled
    with pytest.raises(ServiceUnavailableError):
        world.gateway.resolve("a@2")

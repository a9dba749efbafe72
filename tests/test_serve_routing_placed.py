"""The calls on their way that a view counts: Serve's own routing coroutine with the product's
router, without a cluster. However a call ends, it leaves the count."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray.serve._private.common import (
    DeploymentHandleSource,
    DeploymentID,
    ReplicaID,
    RequestMetadata,
)
from ray.serve._private.request_router.common import PendingRequest
from ray.serve._private.request_router.replica_wrapper import RunningReplica
from ray.serve._private.router import AsyncioRouter

from serve_app.admission.capacity import has_capacity
from serve_app.messages import StreamAddress, SubmitCall
from serve_app.routing.serve_router import LoraplexRouter
from serve_app.routing.state import routing_state
from serve_app.routing.view import ReplicaView
from tests.routing_factory import IDLE, LIMITS, make_ask
from tests.waiting import until

ADDRESS = StreamAddress("127.0.0.1", 1, "token", "ingress")


class Result:
    """A replica's answer to a call, given by the test."""

    def __init__(self) -> None:
        self.accepts: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._on_done: list[Callable[[Result], None]] = []

    async def get_rejection_response(self) -> SimpleNamespace:
        return SimpleNamespace(accepted=await self.accepts, num_ongoing_requests=1)

    def add_done_callback(self, callback: Callable[[Result], None]) -> None:
        self._on_done.append(callback)

    def cancel(self) -> None:
        for callback in self._on_done:
            callback(self)


class Replica:
    """A replica as Serve's router sees it."""

    is_cross_language = False
    max_ongoing_requests = 256
    node_id, availability_zone, actor_id = "node", None, "actor"
    multiplexed_model_ids: frozenset[str] = frozenset()
    routing_stats: dict[str, object] = {}  # noqa: RUF012

    def __init__(self, deployment: DeploymentID) -> None:
        self.replica_id = ReplicaID("e0", deployment)
        self.sent: list[Result] = []

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return 0

    def try_send_request(self, pending: PendingRequest, with_rejection: bool) -> Result:
        self.sent.append(Result())
        return self.sent[-1]


class Rig:
    def __init__(self, app_name: str) -> None:
        deployment = DeploymentID("engine", app_name)
        source = DeploymentHandleSource.UNKNOWN
        self.router = LoraplexRouter(deployment, source, use_replica_queue_len_cache=True)
        self.router.initialize_state(policy="expected_ttft", options={})
        self.replica = Replica(deployment)
        views = routing_state(app_name).views
        views.set_limits(LIMITS)
        self.router.update_replicas([cast(RunningReplica, self.replica)])
        self.view = cast(ReplicaView, views.get("e0"))
        self.view.observe(IDLE, time.monotonic())

    def route(self, call_id: str, num_sequences: int) -> asyncio.Task[object]:
        @contextmanager
        def queued(*_: object) -> Iterator[None]:
            yield

        async def resolve(pending: PendingRequest) -> None:
            pending.resolved = True

        serve = SimpleNamespace(
            _active_request_router=self.router,
            _enable_strict_max_ongoing_requests=True,
            _metrics_manager=SimpleNamespace(wrap_queued_request=queued),
            _resolve_args_with_metrics=resolve,
            _register_completion_callback=lambda *_: None,
            _register_decrement_queue_len_cache_callback=lambda *_: None,
        )
        ask = make_ask(call_id, 160, num_sequences=num_sequences)
        call = SubmitCall((), (), ADDRESS, ask)
        metadata = RequestMetadata(call_id, call_id, call_method="submit")
        pending = PendingRequest(args=[call], kwargs={}, metadata=metadata)
        route_once = cast(Any, AsyncioRouter)._route_and_send_request_once

        async def route() -> object:
            result = await route_once(serve, pending, "r", False)
            while result is None:  # a replica rejected the call
                result = await route_once(serve, pending, "r", True)
            return result

        return asyncio.get_running_loop().create_task(route())

    @property
    def placed(self) -> tuple[int, int]:
        """The calls and the sequences that the view counts."""
        return len(self.view._placed), self.view.num_sequences

    @property
    def has_capacity(self) -> bool:
        return has_capacity([self.view], [], 0.5)


@pytest.fixture
async def rig(request: pytest.FixtureRequest) -> Rig:
    return Rig(request.node.name)


async def test_a_call_that_is_cancelled_on_its_way_to_the_replica_leaves_the_count(
    rig: Rig,
) -> None:
    task = rig.route("call", 256)
    await until(lambda: bool(rig.replica.sent))
    assert rig.placed == (1, 256)
    assert not rig.has_capacity
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: rig.placed == (0, 0))
    assert rig.has_capacity


async def test_a_call_that_is_cancelled_the_moment_its_replica_was_chosen_leaves_the_count(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    chose = rig.router._fulfill_next_pending_request
    routed: list[asyncio.Task[object]] = []

    def chose_and_cancelled(*args: Any) -> None:
        chose(*args)
        assert rig.placed == (1, 16)
        routed[0].cancel()

    monkeypatch.setattr(rig.router, "_fulfill_next_pending_request", chose_and_cancelled)
    routed.append(rig.route("call", 16))
    with suppress(asyncio.CancelledError):
        await routed[0]
    await until(lambda: rig.placed == (0, 0))
    assert not rig.replica.sent


async def test_a_call_whose_replica_fails_it_leaves_the_count(rig: Rig) -> None:
    task = rig.route("call", 16)
    await until(lambda: bool(rig.replica.sent))
    rig.replica.sent[0].accepts.set_exception(RuntimeError("the way to the replica broke"))
    with pytest.raises(RuntimeError):
        await task
    await until(lambda: rig.placed == (0, 0))


async def test_a_call_that_its_replica_took_is_counted_until_it_ends(rig: Rig) -> None:
    task = rig.route("call", 16)
    await until(lambda: bool(rig.replica.sent))
    (result,) = rig.replica.sent
    result.accepts.set_result(True)
    assert await task is result
    await asyncio.sleep(0)
    assert rig.placed == (1, 16)
    result.cancel()
    assert rig.placed == (0, 0)


async def test_no_call_that_was_forgotten_on_its_way_takes_room_for_ever(rig: Rig) -> None:
    now_s = time.monotonic()
    rig.view.place(make_ask("old", num_sequences=256), now_s)
    rig.view.place(make_ask("new"), now_s + 20.0)
    rig.view.observe(IDLE, now_s + 29.0)
    assert rig.placed == (2, 257)
    rig.view.observe(IDLE, now_s + 31.0)  # a frame, without a call placed since
    assert rig.placed == (1, 1)
    assert rig.has_capacity
    rig.view.observe(IDLE, now_s + 3600.0)
    assert (rig.placed, rig.view.queued_tokens) == ((0, 0), 0)


async def test_a_call_that_replicas_reject_is_watched_once_and_counted_where_it_goes(
    rig: Rig,
) -> None:
    task = rig.route("call", 16)
    for number in range(1, 4):
        await until(lambda number=number: len(rig.replica.sent) == number)  # type: ignore[misc]
        assert rig.placed == (1, 16)
        assert rig.router._watched == {"call"}
        if number < 3:
            rig.replica.sent[-1].accepts.set_result(False)
    assert len(cast(Any, task)._callbacks) == 1
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    await until(lambda: rig.placed == (0, 0))
    assert not rig.router._watched

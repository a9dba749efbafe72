"""Requests that wait for an engine: their order, refusals, and metrics."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from itertools import count
from random import Random

import pytest
from starlette.types import Message

from engine.admission import EngineLimits
from engine.types import EngineLoad
from serve_app.admission.capacity import has_capacity
from serve_app.admission.controller import AdmissionController
from serve_app.admission.fair_queue import QueuedRequest
from serve_app.admission.queue import AdmissionQueue
from serve_app.config import FairnessArgs
from serve_app.errors import ClientGoneError, OverloadedError
from serve_app.messages import RoutingRequest
from serve_app.metrics.ingress import QueueStats
from serve_app.routing.view import ReplicaView, ReplicaViews
from tests.waiting import until

ROWS = 4
LIMITS = EngineLimits(4096, 1000, 65536, max_num_seqs=ROWS, max_num_batched_tokens=512)
AHEAD = 1  # rows given in excess of the free rows
FULL = EngineLoad(num_running=ROWS + AHEAD, step_fixed_s=0.001, step_token_s=0.001)
_numbers = count()


def make_request(tenant: str = "", priority: int = 0, num_tokens: int = 10) -> RoutingRequest:
    call_id = f"call {next(_numbers)}"
    return RoutingRequest(call_id, num_tokens, tenant=tenant, priority=priority)


def running(number: int, *, waiting: int = 0, queued: int = 0) -> EngineLoad:
    return EngineLoad(
        num_running=number,
        num_waiting=waiting,
        queued_tokens=queued,
        step_fixed_s=0.001,
        step_token_s=0.001,
    )


async def stay() -> Message:
    """Acts as the `receive` of a client that never leaves."""
    await asyncio.Event().wait()
    raise AssertionError


@dataclass(slots=True)
class World:
    """One replica, whose frames are sent by the test, and the queue in front of it."""

    settings: FairnessArgs = field(default_factory=FairnessArgs)
    max_waiting: int = 100
    now_s: float = 0.0
    views: ReplicaViews = field(default_factory=lambda: ReplicaViews(LIMITS))
    stats: QueueStats = field(default_factory=lambda: QueueStats("ingress", ("named",)))
    requests: list[RoutingRequest] = field(default_factory=list)
    queue: AdmissionQueue = field(init=False)

    def __post_init__(self) -> None:
        self.views.set_replicas(["replica"])
        self.queue = AdmissionQueue(
            self.settings,
            self.max_waiting,
            self.views,
            self.stats,
            "base",
            lambda: self.now_s,
        )

    def frame(self, load: EngineLoad) -> None:
        view = self.views.get("replica")
        assert view is not None
        view.observe(load, 1.0)
        self.queue.wake()

    def add(
        self, tenant: str = "", priority: int = 0, num_tokens: int = 10
    ) -> asyncio.Task[QueuedRequest]:
        request = make_request(tenant, priority, num_tokens)
        self.requests.append(request)
        return asyncio.create_task(self.queue.add_request(request, 16, stay))

    async def let_one_go(self) -> None:
        """Frees a row, which is occupied again before the next frame."""
        before = self.queue.num_waiting
        self.all_are_counted()
        self.frame(running(ROWS))
        await until(lambda: self.queue.num_waiting < before)
        self.frame(FULL)
        self.all_are_counted()

    async def let_go(self, number: int) -> None:
        """Lets one request go per second."""
        for _ in range(number):
            self.now_s += 1.0
            await self.let_one_go()

    def all_are_counted(self) -> None:
        """Makes the replica's view count all requests that went."""
        for request in self.requests:
            self.queue.placed(request.call_id)


async def refused(task: asyncio.Task[QueuedRequest]) -> OverloadedError:
    with pytest.raises(OverloadedError) as caught:
        await task
    return caught.value


async def test_a_request_goes_at_once_where_an_engine_has_capacity() -> None:
    world = World()
    world.frame(running(1))
    queued = await world.add()
    assert queued.waited_s == 0
    assert world.queue.num_waiting == 0


async def test_without_a_known_replica_nobody_waits_here() -> None:
    world = World()
    world.views.set_replicas([])
    await asyncio.gather(*(world.add() for _ in range(50)))


async def test_a_request_waits_until_a_row_is_free() -> None:
    world = World()
    world.frame(FULL)
    task = world.add()
    await until(lambda: world.queue.num_waiting == 1)
    world.now_s = 3.0
    world.frame(running(ROWS))
    assert (await task).waited_s == 3.0


async def test_what_is_under_way_is_counted_until_a_replica_counts_it() -> None:
    world = World()
    world.frame(running(ROWS))  # one request may go
    first = await world.add()
    second = world.add()
    await until(lambda: world.queue.num_waiting == 1)
    view = world.views.get("replica")
    assert view is not None
    view.place(first.request, 1.0)
    world.queue.placed(first.request.call_id)
    world.queue.wake()
    await asyncio.sleep(0)
    assert world.queue.num_waiting == 1  # now the view counts it
    view.unplace(first.request.call_id)
    world.queue.wake()
    await second


async def test_tenants_take_turns() -> None:
    world = World()
    world.frame(FULL)
    went: list[str] = []

    async def one(tenant: str) -> None:
        await world.add(tenant)
        went.append(tenant)

    tasks = [asyncio.create_task(one(tenant)) for tenant in ["flood"] * 6 + ["modest"] * 3]
    await until(lambda: world.queue.num_waiting == 9)
    for number in range(1, 7):
        await world.let_one_go()
        await until(lambda number=number: len(went) == number)
    assert sorted(went) == ["flood"] * 3 + ["modest"] * 3
    for task in tasks:
        task.cancel()


async def test_a_better_class_goes_first() -> None:
    world = World()
    world.frame(FULL)
    usual, urgent = world.add(), world.add(priority=-1)
    await until(lambda: world.queue.num_waiting == 2)
    await world.let_one_go()
    await urgent
    assert not usual.done()
    usual.cancel()


async def test_a_full_queue_refuses_who_holds_it() -> None:
    world = World(max_waiting=3)
    world.frame(FULL)
    held = [world.add("flood") for _ in range(3)]
    await until(lambda: world.queue.num_waiting == 3)
    error = await refused(world.add("flood"))
    assert error.retry_after_s >= 1
    modest = world.add("modest")
    await refused(held[-1])  # the newest request of the tenant with most is evicted
    assert world.queue.num_waiting == 3
    with pytest.raises(OverloadedError):
        world.queue.check(make_request("flood"))
    world.queue.check(make_request("another"))
    for task in (*held, modest):
        task.cancel()


async def test_who_would_wait_too_long_is_told_so_at_once() -> None:
    world = World(FairnessArgs(max_queue_s=5.0))
    world.frame(FULL)
    tasks = [world.add("a") for _ in range(10)]
    await until(lambda: world.queue.num_waiting == 10)
    await world.let_go(9)
    more = [world.add("a") for _ in range(4)]  # at one per second, five wait five seconds
    await until(lambda: world.queue.num_waiting == 5)
    error = await refused(world.add("a"))
    assert 5 <= error.retry_after_s <= 7
    other = world.add("b")  # has a share of its own
    await until(lambda: world.queue.num_waiting == 6)
    for task in (*tasks, *more, other):
        task.cancel()


async def test_before_a_queue_has_moved_its_pace_is_that_of_what_runs() -> None:
    world = World(FairnessArgs(max_queue_s=5.0))
    world.frame(running(0))
    first = [await world.add("a") for _ in range(ROWS)]
    for queued in first:
        world.queue.set_generated(queued, 16)
    world.now_s = 4.0
    world.queue.close(first[0])  # a request lasts four seconds
    world.all_are_counted()
    world.frame(FULL)
    tasks = [world.add("a") for _ in range(4)]
    await until(lambda: world.queue.num_waiting == 4)
    error = await refused(world.add("a"))  # behind four, of which three run in four seconds
    assert 5 <= error.retry_after_s <= 6
    for task in tasks:
        task.cancel()


@pytest.mark.parametrize("seed", range(20))
def test_where_nothing_runs_nobody_is_refused_for_what_rounding_left(seed: int) -> None:
    draw, controller = Random(seed), AdmissionController({}, 10.0, 30.0, 256)
    running = []
    for number in range(draw.randint(2, 40)):
        request = RoutingRequest("", draw.randint(50, 900), adapter_name="x", adapter_rank=16)
        queued, _ = controller.add_request(request, 64, 0.1 * number, has_capacity=True)
        running.append(queued)
    draw.shuffle(running)
    for queued in running:
        controller.set_generated(queued, 30)
        controller.close(queued, 10.0)
    for _ in range(3):  # other ingresses filled the engines
        queued, _ = controller.add_request(request, 64, 10.0, has_capacity=False)
        assert queued.is_waiting


async def test_who_filled_the_queue_alone_gives_way_to_those_who_come() -> None:
    world = World(FairnessArgs(max_queue_s=5.0))
    world.frame(FULL)
    flood = [world.add("flood") for _ in range(17)]
    await until(lambda: world.queue.num_waiting == 17)
    await world.let_go(9)
    assert world.queue.num_waiting == 8  # at one per second, the last waits eight seconds
    others = [world.add(name) for name in "abc"]
    await until(lambda: world.queue.num_waiting == 11)
    world.now_s += 1.0
    world.queue.wake()
    await refused(flood[-1])  # its turn would come after eleven
    assert not flood[9].done()
    for task in (*flood, *others):
        task.cancel()


async def test_nobody_waits_for_ever_for_an_engine_that_stands_still() -> None:
    world = World(FairnessArgs(max_queue_s=0.02))
    world.frame(FULL)
    await refused(world.add())
    assert world.queue.num_waiting == 0
    assert b'reason="waited"' in world.stats.text()


async def test_a_client_that_leaves_leaves_the_queue() -> None:
    world = World()
    world.frame(FULL)
    gone = asyncio.Event()

    async def receive() -> Message:
        await gone.wait()
        return {"type": "http.disconnect"}

    task = asyncio.create_task(world.queue.add_request(make_request(), 16, receive))
    await until(lambda: world.queue.num_waiting == 1)
    gone.set()
    with pytest.raises(ClientGoneError):
        await task
    assert world.queue.num_waiting == 0
    assert world.queue.is_idle


async def test_a_cancelled_request_leaves_the_queue() -> None:
    world = World()
    world.frame(FULL)
    tasks = [world.add() for _ in range(2)]
    await until(lambda: world.queue.num_waiting == 2)
    tasks[0].cancel()
    await until(lambda: world.queue.num_waiting == 1)
    await world.let_one_go()
    await tasks[1]


async def test_a_long_answer_is_charged_as_it_grows() -> None:
    world = World()
    world.frame(running(0))
    talker = await world.add("talks")
    world.frame(FULL)
    tasks = {name: [world.add(name) for _ in range(4)] for name in ("talks", "is brief")}
    await until(lambda: world.queue.num_waiting == 8)
    world.queue.set_generated(talker, 5000)
    for _ in range(4):
        await world.let_one_go()
    await asyncio.gather(*tasks["is brief"])
    assert not any(task.done() for task in tasks["talks"])
    for task in tasks["talks"]:
        task.cancel()


async def test_metrics_tell_of_the_queue_and_of_named_tenants_only() -> None:
    world = World(max_waiting=1)
    world.frame(running(0))
    queued = await world.add("named", num_tokens=30)
    world.queue.set_generated(queued, 7)
    world.queue.close(await world.add("somebody", num_tokens=5))
    world.frame(FULL)
    waiting = world.add("named")
    await until(lambda: world.queue.num_waiting == 1)
    await refused(world.add("named"))
    text = world.stats.text().decode()
    for line in (
        'loraplex_queue_waiting{ingress="ingress",model_name="base"} 1.0',
        'loraplex_queue_wait_seconds_count{ingress="ingress",model_name="base"} 2.0',
        'loraplex_shed_total{ingress="ingress",model_name="base",reason="full"} 1.0',
        'loraplex_tenant_tokens_total{ingress="ingress",tenant="named"} 37.0',
        'loraplex_tenant_tokens_total{ingress="ingress",tenant="other"} 5.0',
    ):
        assert line in text
    assert "somebody" not in text
    waiting.cancel()


async def test_the_backlog_tells_what_waits_what_goes_and_what_is_refused() -> None:
    world = World(max_waiting=2)
    world.frame(running(0))
    for _ in range(4):
        await world.add(num_tokens=30)
    world.frame(FULL)
    waiting = [world.add(num_tokens=7) for _ in range(2)]
    await until(lambda: world.queue.num_waiting == 2)
    for _ in range(8):
        await refused(world.add())
    backlog = world.queue.backlog
    assert (backlog.num_requests, backlog.num_tokens) == (2, 14)
    assert backlog.refused_per_s == pytest.approx(2 * backlog.sent_per_s)
    world.now_s = 600.0
    assert (world.queue.backlog.sent_per_s, world.queue.backlog.refused_per_s) == (0, 0)
    for task in waiting:
        task.cancel()


def seen(load: EngineLoad) -> ReplicaView:
    view = ReplicaView("replica", LIMITS)
    view.observe(load, 1.0)
    return view


@pytest.mark.parametrize(
    ("load", "has"),
    [
        (running(0), True),
        (running(ROWS + AHEAD - 1), True),
        (running(ROWS + AHEAD), False),
        (EngineLoad(num_running=ROWS, step_fixed_s=0.1), False),  # 128 tokens of 4 rows: 3.2 s
        (running(1, queued=100), True),
        (running(1, queued=2000), False),  # 2 s of prefilling
        (running(1, waiting=3), False),  # rows are free, so they wait for memory
        (EngineLoad(num_running=1, num_waiting=3, num_waiting_for_adapter=3), True),
        (EngineLoad(num_running=1, step_fixed_s=5.0), True),  # slow, but empty
    ],
)
def test_an_engine_has_room_while_little_waits_there(load: EngineLoad, has: bool) -> None:
    assert has_capacity([seen(load)], [], 0.5) == has


def test_replicas_that_said_nothing_yet_get_what_their_rows_hold() -> None:
    unseen = [ReplicaView(name, LIMITS) for name in ("a", "b")]
    sent = [RoutingRequest(f"call-{i}", 10) for i in range(2 * LIMITS.max_num_seqs)]
    assert has_capacity(unseen, sent[:-1], 0.5)
    assert not has_capacity(unseen, sent, 0.5)
    unseen[0].place(sent[0], 0.0)
    assert not has_capacity(unseen, sent[1:], 0.5)


def test_one_replica_with_room_is_enough() -> None:
    assert has_capacity([seen(FULL), seen(running(1))], [], 0.5)
    silent = seen(running(1))
    silent.disconnect()
    assert not has_capacity([seen(FULL), silent], [], 0.5)

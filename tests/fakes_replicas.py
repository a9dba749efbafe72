"""The engine replicas of a base in this process, behind the part of a Serve handle that a
Generation uses: real engine hosts with the paced engine and real sockets, no Ray. They can be
killed, hung and drained.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle

from engine.types import Request, SamplingParams, TokenOutput
from registry.entities import BaseVersion
from serve_app.config import MigrationArgs
from serve_app.dispatch.attempt import Attempt
from serve_app.dispatch.base_handle import BaseHandle
from serve_app.dispatch.generation import Generation
from serve_app.dispatch.migrations import Migrations
from serve_app.errors import EngineGoneError
from serve_app.messages import BaseDescription, SubmitCall
from serve_app.metrics.engine import EngineMetrics
from serve_app.replica.engine_actor import EngineHost
from serve_app.routing.request import make_routing_request
from serve_app.stream.server import EngineListener, StreamServer
from serve_app.text.base_text import BaseText
from tests.fakes_engine import PacedEngine
from tests.routing_factory import EngineEvents

APP = "base-app"


class Replica:
    def __init__(self, engine_id: str, rate: float) -> None:
        self.engine_id = engine_id
        self.engine = PacedEngine(rate=rate)
        self.host = EngineHost(self.engine, engine_id, EngineMetrics("base", engine_id, 16))
        self.is_up = True
        self.found_in: str | None = None  # the tier of adapters on their way; None: memory
        self._is_hung = False
        self._died = asyncio.Event()
        loop = asyncio.get_running_loop()
        self.engine.crash = lambda: cast(None, loop.call_soon_threadsafe(self._end))
        self.host.start()

    @property
    def is_dead(self) -> bool:
        return self._died.is_set()

    def kill(self) -> None:
        """Acts as `kill -9` of its process."""
        self.engine._stopped.set()
        self._end()

    def hang(self) -> None:
        """Acts as SIGSTOP: its connections stay."""
        self._is_hung = True
        self.engine._stopped.set()
        assert self.host._heartbeat is not None
        self.host._heartbeat.cancel()

    def _end(self) -> None:
        self.is_up = False
        self._died.set()
        self.host.stop()

    async def submit(self, call: SubmitCall) -> None:
        name = ",".join(adapter.name for adapter in call.adapters) or None
        for adapter in call.adapters:
            await self.engine.load_adapter(adapter.name, adapter.digest, "nowhere")
        if self._is_hung:
            await self._died.wait()
        loop = asyncio.get_running_loop()
        submitted = self.host.submit(call.requests, call.reply_to, name, self.found_in)
        running = loop.create_task(submitted)
        died = loop.create_task(self._died.wait())
        try:
            await asyncio.wait({running, died}, return_when=asyncio.FIRST_COMPLETED)
            if self._died.is_set():
                raise EngineGoneError("the engine died", self.engine_id)
            await running
        finally:
            running.cancel()
            died.cancel()


class _Response:
    def __init__(self, task: asyncio.Task[None]) -> None:
        self._task = task

    def __await__(self) -> Generator[object, None, object]:
        """Cancels the call when its awaiter is cancelled, as Serve's response does."""
        try:
            return (yield from asyncio.shield(self._task).__await__())
        except asyncio.CancelledError:
            self.cancel()
            raise

    def cancel(self) -> None:
        self._task.cancel()


@dataclass
class Router:
    """Acts as the functions of `routing.state` that migrations use."""

    placed: list[tuple[str, SubmitCall]] = field(default_factory=list)
    deprioritised: set[str] = field(default_factory=set)

    def placed_at(self, app_name: str, call_id: str) -> str | None:
        found = (engine for engine, call in self.placed if call.routing.call_id == call_id)
        return next(found, None)

    def deprioritise(self, engine_id: str) -> None:
        self.deprioritised.add(engine_id)


@dataclass
class Fleet:
    """Implements the handle's method `submit`. Calls go to the replicas in turn."""

    server: StreamServer
    router: Router
    migrations: Migrations
    rate: float
    args: MigrationArgs = field(default_factory=lambda: MigrationArgs(timeout_s=60.0))
    replicas: dict[str, Replica] = field(default_factory=dict)
    max_num_seqs: int = 256  # of each engine that is added
    num_refusals: int = 0  # so many calls are refused first
    return_s: float = 0.0  # so long after its last token a call returns
    paused_at: int | None = None  # of each engine that is added, see `pause`
    num_cancelled: int = 0  # calls
    _num_calls: int = 0
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def submit(self) -> Fleet:
        return self

    @property
    def base(self) -> BaseHandle:
        return made_base(self.args, self, max_num_seqs=self.max_num_seqs)

    @property
    def placed(self) -> list[tuple[str, SubmitCall]]:
        return self.router.placed

    @property
    def num_up(self) -> int:
        return sum(replica.is_up for replica in self.replicas.values())

    def add(self) -> Replica:
        replica = Replica(f"e{len(self.replicas)}", self.rate)
        replica.engine.max_num_seqs = self.max_num_seqs
        replica.engine.pause_at = self.paused_at
        self.replicas[replica.engine_id] = replica
        self.tell()
        return replica

    def pause(self, at: int | None) -> None:
        """Lets no choice get more than `at` tokens, until it is None: an answer of 0.2 s would end
        before a test that runs late disturbs it."""
        self.paused_at = at
        for replica in self.replicas.values():
            replica.engine.pause_at = at

    def drain(self, engine_id: str) -> None:
        self.replicas[engine_id].is_up = False
        self.tell()

    def tell(self) -> None:
        """Updates the replicas as Serve's router does: later than the connection of a dead engine
        ends."""
        up = [
            name
            for name, replica in self.replicas.items()
            if replica.is_up or (replica.is_dead and name in self.server.engines)
        ]
        self.migrations.replicas_changed(APP, up)

    def remote(self, call: SubmitCall) -> _Response:
        task = asyncio.get_running_loop().create_task(self._run(call))
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return _Response(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self.num_cancelled += task.cancelled()

    def generate(self, *requests: Request, session: str | None = None) -> Generation:
        routing = make_routing_request(requests, (), self.base.description.limits, session)
        return Generation(self.migrations, self.base, requests, (), routing)

    async def _run(self, call: SubmitCall) -> None:
        if self.num_refusals:
            self.num_refusals -= 1
            raise BackPressureError(num_queued_requests=1, max_queued_requests=1)
        self._num_calls += 1
        while not (able := self._able(call)):
            await asyncio.sleep(0.005)
        replica = able[self._num_calls % len(able)]
        self.router.placed.append((replica.engine_id, call))
        await replica.submit(call)
        await asyncio.sleep(self.return_s)

    def _able(self, call: SubmitCall) -> list[Replica]:
        return [
            replica
            for name, replica in self.replicas.items()
            if replica.is_up and name not in call.routing.avoid
        ]


def made_base(
    args: MigrationArgs,
    handle: object = None,
    text: BaseText | None = None,
    max_num_seqs: int = 256,
) -> BaseHandle:
    """`text` may be left out where no text is read."""
    return BaseHandle(
        BaseVersion("base", 1, "b" * 64, ""),
        APP,
        cast(DeploymentHandle[object], handle),
        BaseDescription({}, PacedEngine(max_num_seqs=max_num_seqs).model_limits),
        cast(BaseText, text),
        0.0,
        migration=args,
    )


def made_migrations(
    server: StreamServer, router: Router | None = None, *seconds: float
) -> Migrations:
    """`seconds`: until an engine counts as silent, and until it is deprioritised."""
    router = router or Router()
    return Migrations(server, router.placed_at, router.deprioritise, "i0", *seconds)


def made_attempt(engine_id: str | None) -> Attempt:
    """Returns an attempt at this engine that has no token and no call behind it."""
    stream = SimpleNamespace(engine_id=engine_id, has_output=False)
    attempt = SimpleNamespace(app_name=APP, call_id="c", began_s=0.0, stream=stream)
    return cast(Attempt, attempt)


@asynccontextmanager
async def running_fleet(
    count: int,
    rate: float = 200.0,
    silence_s: float = 10.0,
    shun_s: float = 3.0,
    listener: EngineListener | None = None,
) -> AsyncIterator[Fleet]:
    server = StreamServer(listener or EngineEvents())
    await server.listen("127.0.0.1")
    router = Router()
    migrations = made_migrations(server, router, silence_s, shun_s)
    fleet = Fleet(server, router, migrations, rate)
    for _ in range(count):
        fleet.add()
    try:
        yield fleet
    finally:
        for replica in fleet.replicas.values():
            replica.host.stop()
        server.close()
        await asyncio.sleep(0)


def make_request(
    prompt: tuple[int, ...], max_tokens: int = 40, n: int = 1, name: str = "r"
) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=max_tokens, n=n))


async def read_all(
    generation: Generation, on_outputs: Callable[[], None] | None = None
) -> list[TokenOutput]:
    outputs: list[TokenOutput] = []
    async with asyncio.timeout(120):
        while generation._progress.open_requests:
            outputs += await generation.read()
            if on_outputs is not None:
                on_outputs()
    return outputs


def tokens(outputs: list[TokenOutput], choice: int = 0, name: str = "r") -> tuple[int, ...]:
    """Returns the tokens of a choice; fails if any is missing or doubled."""
    found: list[int] = []
    for output in outputs:
        if (output.request_id, output.choice) == (name, choice):
            assert output.offset == len(found)
            found += output.token_ids
    return tuple(found)

"""An event loop whose time is a number: when nothing is ready, the clock jumps to the next timer.

Its network is in memory (see `virtual_network`), executors run inline. So a minute of a fleet takes
as long as its callbacks, and the same seed gives the same run. The number of the present iteration
lets a caller act between any two callbacks.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import selectors
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from typing import Any

from tests.virtual_network import LATENCY_S, Connection

EPOCH_S = 1_700_000_000.0
_EXECUTOR_S = (0.0, 0.004)


class StandstillError(Exception):
    """No timer is left, so that nothing would ever happen again."""


class _Clock(selectors.SelectSelector):
    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise StandstillError("the event loop waits for nothing")
        if timeout > 0:
            self.now_s += timeout
        return []


class _Task(asyncio.Task[Any]):
    """Found in sets in the order of creation, and not by address."""

    number: int

    def __new__(cls, work: Any, *, loop: VirtualLoop, **_: Any) -> _Task:
        task = super().__new__(cls)
        loop.num_tasks += 1
        task.number = loop.num_tasks  # before its constructor puts it into a set
        return task

    def __hash__(self) -> int:
        return self.number


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self, seed: int) -> None:
        self._clock = _Clock()
        super().__init__(self._clock)
        self.num_tasks = 0
        self.on_connection: Callable[[Connection], object] = lambda _: None
        # What a task with an empty context has of the one that began it.
        self.inherited: tuple[ContextVar[Any], ...] = ()
        self.set_task_factory(self._make_task)
        self.random = random.Random(f"network {seed}")
        self.iteration = 0
        self.connections: list[Connection] = []
        self._due: dict[int, list[Callable[[], object]]] = {}
        self._listeners: dict[int, tuple[Callable[[], asyncio.Protocol], Context]] = {}

    def time(self) -> float:
        return self._clock.now_s

    def at_iteration(self, iteration: int, callback: Callable[[], object]) -> None:
        """Calls back between two callbacks, at the beginning of that iteration."""
        self._due.setdefault(max(iteration, self.iteration + 1), []).append(callback)

    def _run_once(self) -> None:
        self.iteration += 1
        for callback in self._due.pop(self.iteration, ()):
            callback()
        super()._run_once()  # type: ignore[misc]

    def _make_task(
        self, loop: object, work: Any, *, context: Context | None = None, **how: Any
    ) -> _Task:
        for variable in self.inherited if context is not None else ():
            if variable not in context and (value := variable.get(None)) is not None:
                context.run(variable.set, value)
        return _Task(work, loop=self, context=context, **how)

    def _write_to_self(self) -> None:
        """There is no other thread that this one would wait for."""

    def run_in_executor(  # type: ignore[override]
        self, executor: object, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        done: asyncio.Future[Any] = self.create_future()

        def run() -> None:
            if done.cancelled():
                return
            try:
                done.set_result(func(*args))
            except Exception as error:
                done.set_exception(error)

        self.call_later(self.random.uniform(*_EXECUTOR_S), run)
        return done

    async def create_server(  # type: ignore[override]
        self, protocol_factory: Callable[[], asyncio.Protocol], host: str, port: int = 0
    ) -> _Server:
        port = 20_000 + len(self._listeners)
        self._listeners[port] = protocol_factory, copy_context()
        return _Server(self, host, port)

    async def create_connection(  # type: ignore[override]
        self,
        protocol_factory: Callable[[], asyncio.Protocol],
        host: str,
        port: int,
        *,
        ssl: object = None,
    ) -> tuple[asyncio.Transport, asyncio.Protocol]:
        assert ssl is None
        await asyncio.sleep(self.random.uniform(*LATENCY_S))
        if port not in self._listeners:
            raise ConnectionRefusedError(f"nobody listens at {host}:{port}")
        accept, context = self._listeners[port]
        connection = Connection(self, self.random, self.connections, copy_context(), context)
        near, far = connection.ends
        far.begin(accept)
        near.begin(protocol_factory)
        self.on_connection(connection)
        assert near.protocol is not None
        return near, near.protocol


class _Server:
    def __init__(self, loop: VirtualLoop, host: str, port: int) -> None:
        self._loop, self._address = loop, (host, port)
        self.sockets: Sequence[_Server] = (self,)

    def getsockname(self) -> tuple[str, int]:
        return self._address

    def close(self) -> None:
        self._loop._listeners.pop(self._address[1], None)


@contextmanager
def repeatable(loop: VirtualLoop, *kinds: type) -> Iterator[None]:
    """Ids and seeds are the loop's. `kinds`: their objects are found in sets in the order of their
    first use there, and not by address."""
    serials: dict[int, tuple[int, object]] = {}
    before = [(kind, kind.__hash__) for kind in kinds]
    new_id, randbits = uuid.uuid4, secrets.randbits

    def serial(one: object) -> int:
        return serials.setdefault(id(one), (len(serials), one))[0]

    try:
        for kind in kinds:
            kind.__hash__ = serial  # type: ignore[assignment]
        uuid.uuid4 = lambda: uuid.UUID(int=loop.random.getrandbits(128), version=4)
        secrets.randbits = loop.random.getrandbits
        yield
    finally:
        uuid.uuid4, secrets.randbits = new_id, randbits
        for kind, known in before:
            kind.__hash__ = known  # type: ignore[method-assign]


@contextmanager
def virtual_time(loop: VirtualLoop, *bound: Callable[..., object]) -> Iterator[None]:
    """The clocks of `time` are the loop's. `bound`: functions that have a clock as a default."""
    monotonic, wall = time.monotonic, time.time
    defaults = [(function, function.__defaults__) for function in bound]  # type: ignore[attr-defined]
    try:
        for function, values in defaults:
            function.__defaults__ = tuple(  # type: ignore[attr-defined]
                loop.time if value is monotonic else value for value in values
            )
        time.monotonic = loop.time
        time.time = lambda: EPOCH_S + loop.time()
        yield
    finally:
        time.monotonic, time.time = monotonic, wall
        for function, values in defaults:
            function.__defaults__ = values  # type: ignore[attr-defined]

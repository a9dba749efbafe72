"""An event loop whose time is a number: when nothing is ready, the clock jumps to the next timer.

Its network is in memory: every connection has two transports, bytes take a random time in order,
and a connection can be held (nothing arrives until it is released) or cut. Executors run inline. So
a minute of a fleet takes as long as its callbacks, and the same seed gives the same run. The number
of the present iteration lets a caller act between any two callbacks.
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
from contextvars import Context, copy_context
from typing import Any

EPOCH_S = 1_700_000_000.0
_LATENCY_S = (0.0001, 0.002)
_APART_S = 1e-6
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
        self.set_task_factory(lambda loop, work, **how: _Task(work, loop=self, **how))
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
        await asyncio.sleep(self.random.uniform(*_LATENCY_S))
        if port not in self._listeners:
            raise ConnectionRefusedError(f"nobody listens at {host}:{port}")
        accept, context = self._listeners[port]
        connection = Connection(self, copy_context(), context)
        self.connections.append(connection)
        near, far = connection.ends
        far.begin(accept)
        near.begin(protocol_factory)
        assert near.protocol is not None
        return near, near.protocol


class Connection:
    """Its first end is that of the peer which dialled."""

    def __init__(self, loop: VirtualLoop, near: Context, far: Context) -> None:
        self.loop = loop
        self.is_held = False
        self.ends = (_End(self, near), _End(self, far))

    def contexts(self) -> tuple[Context, Context]:
        return self.ends[0].context, self.ends[1].context

    def hold(self) -> None:
        """Nothing arrives at either end any more, and neither end learns of it."""
        self.is_held = True

    def release(self) -> None:
        """All that was on its way arrives, late."""
        self.is_held = False
        for end in self.ends:
            end.flush()

    def cut(self) -> None:
        for end in self.ends:
            end.lose()
        if self in self.loop.connections:
            self.loop.connections.remove(self)


class _End(asyncio.Transport):
    """What its owner writes arrives at the other end."""

    def __init__(self, connection: Connection, context: Context) -> None:
        super().__init__()
        self.context = context
        self.protocol: asyncio.Protocol | None = None
        self._connection = connection
        self._loop = connection.loop
        self._arriving: list[bytes] = []  # held on the way here
        self._due_s = 0.0
        self._high = 64 * 1024
        self._unsent = 0
        self._is_paused = self._is_closing = self._is_lost = False

    def begin(self, factory: Callable[[], asyncio.Protocol]) -> None:
        self.protocol = self.context.copy().run(factory)
        self._call(self.protocol.connection_made, self)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return _Socket() if name == "socket" else default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = 64 * 1024 if high is None else high

    def is_closing(self) -> bool:
        return self._is_closing

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._is_closing:
            return
        data = bytes(data)
        self._unsent += len(data)
        draw = self._loop.random
        cut = draw.randrange(len(data) + 1) if draw.random() < 0.1 else len(data)
        for part in (data[:cut], data[cut:]):
            if part:
                latest_s = self._loop.time() + draw.uniform(*_LATENCY_S)
                # Timers of one moment have no order.
                self._due_s = max(self._due_s + _APART_S, latest_s)
                self._loop.call_at(self._due_s, self._other._arrive, part)
        if self._unsent > self._high and not self._is_paused:
            self._is_paused = True
            self._call(self.protocol_of().pause_writing)

    def abort(self) -> None:
        """As asyncio's: the owner hears of the end in the next iteration, the peer later."""
        self._is_closing = True
        self._loop.call_soon(self._connection.cut)

    def close(self) -> None:
        self.abort()

    def protocol_of(self) -> asyncio.Protocol:
        assert self.protocol is not None
        return self.protocol

    def flush(self) -> None:
        arriving, self._arriving = self._arriving, []
        for part in arriving:
            self._arrive(part)

    def lose(self) -> None:
        if self._is_lost or self.protocol is None:
            return
        self._is_lost = self._is_closing = True
        self._call(self.protocol.connection_lost, None)

    @property
    def _other(self) -> _End:
        first, second = self._connection.ends
        return second if self is first else first

    def _arrive(self, part: bytes) -> None:
        if self._connection.is_held:
            self._arriving.append(part)
            return
        other = self._other
        other._unsent -= len(part)
        if other._is_paused and other._unsent <= other._high // 4:
            other._is_paused = False
            if not other._is_lost:
                other._call(other.protocol_of().resume_writing)
        if not self._is_lost:
            self._call(self.protocol_of().data_received, part)

    def _call(self, callback: Callable[..., object], *args: object) -> None:
        self.context.copy().run(callback, *args)


class _Socket:
    def setsockopt(self, *_: object) -> None:
        pass


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

"""Connections in memory: bytes take a random time and keep their order, a connection can be held
(nothing arrives until it is released) or cut.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextvars import Context
from typing import Any

LATENCY_S = (0.0001, 0.002)
_APART_S = 1e-6


class Connection:
    """Its first end is that of the peer which dialled."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        draw: random.Random,
        connections: list[Connection],
        near: Context,
        far: Context,
    ) -> None:
        """`connections`: it is one of them until it is cut."""
        self.loop = loop
        self.draw = draw
        self.is_held = False
        self._connections = connections
        connections.append(self)
        self.ends = (_End(self, near), _End(self, far))

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
        if self in self._connections:
            self._connections.remove(self)


class _End(asyncio.Transport):
    """Carries the bytes that its owner writes to the other end."""

    def __init__(self, connection: Connection, context: Context) -> None:
        super().__init__()
        self.context = context
        self.protocol: asyncio.Protocol | None = None
        self._connection = connection
        self._loop, self._draw = connection.loop, connection.draw
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
        draw = self._draw
        cut = draw.randrange(len(data) + 1) if draw.random() < 0.1 else len(data)
        for part in (data[:cut], data[cut:]):
            if part:
                latest_s = self._loop.time() + draw.uniform(*LATENCY_S)
                # Timers of one moment have no order.
                self._due_s = max(self._due_s + _APART_S, latest_s)
                self._loop.call_at(self._due_s, self._other._arrive, part)
        if self._unsent > self._high and not self._is_paused:
            self._is_paused = True
            self._call(self.protocol_of().pause_writing)

    def abort(self) -> None:
        """Ends the connection as asyncio does: for the owner in the next iteration, then for the
        peer."""
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

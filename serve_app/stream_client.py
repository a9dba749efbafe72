"""The engine end of the side stream: one `IngressLink` to each ingress replica with live requests.

Reconnect rule: a link is dialled by the first submit that names its ingress and lives until the
connection ends; then its requests are aborted (`on_lost`) and the next submit dials anew.
Bound: a slow ingress may have HIGH_WATER_BYTES unsent in the socket; beyond it outputs wait and go
out as one frame, and at MAX_WAITING_OUTPUTS of them the link is cut. Ignorant of Ray and engines.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import cast

from engine.types import EngineLoad, TokenOutput
from serve_app.stream import (
    MAX_CONTROL_BYTES,
    Abort,
    FrameSplitter,
    Hello,
    Step,
    StreamAddress,
    StreamError,
    decode_frame,
    encode_frame,
)

logger = logging.getLogger(__name__)

HIGH_WATER_BYTES = 1024 * 1024
MAX_WAITING_OUTPUTS = 65_536
_DIAL_TIMEOUT_S = 5.0
_DEAD_PEER_MS = (
    10_000  # unacknowledged bytes for so long end the connection (a host that lost power)
)


class IngressLink(asyncio.Protocol):
    """Made by `dial`. `send` once a step, from the event loop only."""

    def __init__(
        self,
        address: StreamAddress,
        engine_id: str,
        on_abort: Callable[[IngressLink, Abort], None],
        on_lost: Callable[[IngressLink], None],
    ) -> None:
        self.address = address
        self.is_open = False
        self._engine_id = engine_id
        self._on_abort = on_abort
        self._on_lost = on_lost
        self._splitter = FrameSplitter(MAX_CONTROL_BYTES)
        self._transport: asyncio.Transport | None = None
        self._is_paused = False
        self._waiting: list[TokenOutput] = []
        self._load = EngineLoad()
        self._sent_adapters: tuple[tuple[str, ...], tuple[str, ...]] | None = None

    async def dial(self) -> None:
        loop = asyncio.get_running_loop()
        host, port = self.address.host, self.address.port
        try:
            async with asyncio.timeout(_DIAL_TIMEOUT_S):
                await loop.create_connection(lambda: self, host, port)
        except OSError as error:  # TimeoutError is one
            raise StreamError(f"cannot reach the ingress at {host}:{port}: {error}") from None
        if not self.is_open:
            raise StreamError(f"the ingress at {host}:{port} closed the connection at once")

    def send(self, outputs: list[TokenOutput], load: EngineLoad) -> None:
        """One frame, or, while the ingress is slow, part of the next one."""
        self._load = load
        if not self._is_paused:
            self._write(outputs)
            return
        self._waiting += outputs
        if len(self._waiting) > MAX_WAITING_OUTPUTS and self._transport is not None:
            logger.warning("ingress %s does not keep up, link cut", self.address.ingress_id)
            self._transport.abort()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport has the interface without being a subclass.
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        raw: socket.socket = transport.get_extra_info("socket")
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD_PEER_MS)
        self._transport.write(encode_frame(Hello(self.address.token, self._engine_id)))
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._splitter.feed(data):
                frame = decode_frame(payload)
                if not isinstance(frame, Abort):
                    raise StreamError(f"unexpected {type(frame).__name__} frame")
                self._on_abort(self, frame)
        except StreamError as error:
            logger.warning("link to ingress %s closed: %s", self.address.ingress_id, error)
            assert self._transport is not None
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._waiting.clear()
        self._on_lost(self)

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            self._write(waiting)

    def _write(self, outputs: list[TokenOutput]) -> None:
        if self._transport is None or not self.is_open:
            return
        load = self._load
        adapters = (load.adapters_on_device, load.adapters_on_host)
        # Hundreds of 64-character digests a step would outweigh the tokens.
        same_adapters = adapters == self._sent_adapters
        if same_adapters:
            load = replace(load, adapters_on_device=(), adapters_on_host=())
        self._sent_adapters = adapters
        self._transport.write(encode_frame(Step(tuple(outputs), load, same_adapters)))

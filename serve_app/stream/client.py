"""The engine end of the side stream: one `IngressLink` to each ingress replica.

A link gets a frame a step, its own tokens in it or not. Its first frame has the whole of what later
ones only change. Bounds: a slow ingress may have HIGH_WATER_BYTES unsent in the socket; beyond it
outputs wait encoded and changes merged, and go out in frames of about MAX_FRAME_BYTES as it reads.
At MAX_WAITING_BYTES the link is cut: that ingress's own streams from this engine fail, and go on at
another replica; streams of other ingresses have links of their own. Ignorant of Ray and engines.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import cast

from msgspec import Raw

from engine.types import TokenOutput
from serve_app.messages import StreamAddress
from serve_app.network import client_tls
from serve_app.stream.snapshot import Digests, EngineSnapshot, Output
from serve_app.stream.wire import (
    MAX_CONTROL_BYTES,
    Abort,
    Accepted,
    FrameSplitter,
    Hello,
    StreamError,
    decode_frame,
    encode_frame,
    encode_output,
)

logger = logging.getLogger(__name__)

HIGH_WATER_BYTES = 1024 * 1024
# A frame ends with the output that reaches this size. The largest output alone is one that an
# ingress takes (MAX_STEP_BYTES).
MAX_FRAME_BYTES = 1024 * 1024
# The bound for each ingress: the prompt log-probabilities of several requests that ask for as many
# as they may, or half a minute of 30,000 tokens a second.
MAX_WAITING_BYTES = 256 * 1024 * 1024
_OBJECT_BYTES = 128  # of Python's objects around an encoded output, and of its place in the queue
MIN_MERGED = 1024  # changes that are worth keeping in any case
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
        engine_key: str,
        news: EngineSnapshot,
        on_abort: Callable[[IngressLink, Abort], None],
        on_lost: Callable[[IngressLink], None],
    ) -> None:
        self.address = address
        self.is_open = False
        self._engine_id = engine_id
        self._engine_key = engine_key
        self._news = news
        self._on_abort = on_abort
        self._on_lost = on_lost
        self._splitter = FrameSplitter(MAX_CONTROL_BYTES)
        self._transport: asyncio.Transport | None = None
        self._is_paused = False
        self._waiting: deque[Raw] = deque()  # outputs, encoded
        self._waiting_bytes = 0
        self._accepted: list[Accepted] = []  # that no step counts yet
        self._counted: list[Accepted] = []
        # Prefixes that came (True) or went since the last frame; None: the whole is to be told.
        self._changes: dict[int, bool] | None = None
        self._sent_adapters: tuple[Digests, Digests] | None = None
        self._sent_disk: Digests | None = None

    async def dial(self) -> None:
        loop = asyncio.get_running_loop()
        host, port = self.address.host, self.address.port
        certificate = self.address.certificate
        try:
            tls = client_tls(certificate) if certificate else None
            async with asyncio.timeout(_DIAL_TIMEOUT_S):
                await loop.create_connection(lambda: self, host, port, ssl=tls)
        except OSError as error:  # TimeoutError is one
            raise StreamError(f"cannot reach the ingress at {host}:{port}: {error}") from None
        if not self.is_open:
            raise StreamError(f"the ingress at {host}:{port} closed the connection at once")

    def accept(self, accepted: Accepted) -> None:
        """Goes out with the frame of the next step, whose load counts it: whoever heard of it with
        an older load would take its row for free, as long as that step takes."""
        self._accepted.append(accepted)

    def tell_whole(self) -> None:
        """Whatever it knows already: in a frame now, or as soon as it reads again."""
        self._changes = self._sent_adapters = self._sent_disk = None
        if not self._is_paused:
            self._write_own()

    def send(self, outputs: Sequence[TokenOutput] = (), *, is_step: bool = True) -> None:
        """Once after each of the news: one frame, or, while the ingress is slow, part of the
        next one."""
        news = self._news
        if is_step and self._accepted:
            self._counted += self._accepted
            self._accepted.clear()
        if outputs or self._counted or self._is_paused or self._changes is None:
            self._merge()
            if self._is_paused:
                self._hold(outputs)
            else:
                self._write_own(outputs)
            if self._waiting_bytes > MAX_WAITING_BYTES:
                self._cut()
        elif self._transport is not None and self.is_open:
            same_adapters = self._sent_adapters is news.adapters
            same_disk = self._sent_disk is news.on_disk
            self._sent_adapters, self._sent_disk = news.adapters, news.on_disk
            self._transport.write(news.frame(same_adapters=same_adapters, same_disk=same_disk))

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
        self._transport.write(
            encode_frame(Hello(self.address.token, self._engine_id, self._engine_key))
        )
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
        self._waiting_bytes = 0
        self._accepted.clear()
        self._counted.clear()
        self._changes = None
        self._on_lost(self)

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        self._write_waiting()

    def _merge(self) -> None:
        if self._changes is None:
            return
        self._changes.update(dict.fromkeys(self._news.cached, True))
        self._changes.update(dict.fromkeys(self._news.evicted, False))
        if len(self._changes) > len(self._news.prefixes) + MIN_MERGED:
            self._changes = None  # the whole is shorter by now

    def _hold(self, outputs: Sequence[TokenOutput]) -> None:
        """Keeps them, encoded, until the ingress reads again."""
        for output in outputs:
            encoded = encode_output(output)
            self._waiting.append(Raw(encoded))
            self._waiting_bytes += len(encoded) + _OBJECT_BYTES

    def _cut(self) -> None:
        num_mib, ingress_id = self._waiting_bytes >> 20, self.address.ingress_id
        logger.warning("ingress %s does not read, %d MiB wait, link cut", ingress_id, num_mib)
        if self._transport is not None:
            self._transport.abort()

    def _write_waiting(self) -> None:
        """Sends one frame in any case, and more until nothing waits or the ingress is slow."""
        while True:
            outputs, num_bytes = [], 0
            while self._waiting and num_bytes < MAX_FRAME_BYTES:
                output = self._waiting.popleft()
                outputs.append(output)
                num_bytes += len(memoryview(output))
            self._waiting_bytes -= num_bytes + _OBJECT_BYTES * len(outputs)
            self._write(self._own_frame(outputs))
            if self._is_paused or not self._waiting:
                return

    def _write_own(self, outputs: Sequence[TokenOutput] = ()) -> None:
        frame = self._own_frame(outputs)
        if len(frame) > MAX_FRAME_BYTES and len(outputs) > 1:
            self._hold(outputs)
            self._write_waiting()
        else:
            self._write(frame)

    def _own_frame(self, outputs: Sequence[Output]) -> bytes:
        news = self._news
        return news.own_frame(
            outputs,
            self._counted,
            self._changes,
            same_adapters=self._sent_adapters is news.adapters,
            same_disk=self._sent_disk is news.on_disk,
        )

    def _write(self, own_frame: bytes) -> None:
        """The frame holds all the news that this link lacked."""
        if self._transport is None or not self.is_open:
            return
        self._counted, self._changes = [], {}
        self._sent_adapters, self._sent_disk = self._news.adapters, self._news.on_disk
        self._transport.write(own_frame)

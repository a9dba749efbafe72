"""The engine end of the side stream: one `IngressLink` to each ingress replica.

A link gets a frame per step, even without tokens for it. Its first frame has the full state,
later frames only the changes. Bounds: a slow ingress may have HIGH_WATER_BYTES unsent in the
socket; beyond that, outputs wait encoded and changes merged, and are sent in frames of about
MAX_FRAME_BYTES as the ingress reads. At MAX_WAITING_BYTES the link is cut: that ingress's streams
from this engine fail, and continue at another replica; other ingresses have links of their own.
Ignorant of Ray and engines.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import cast

from msgspec import Raw

from engine.types import EngineLoad, StepOutput, TokenOutput
from serve_app.messages import StreamAddress
from serve_app.network import client_tls
from serve_app.stream.snapshot import Digests, EngineSnapshot, Output, Same
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
from serve_app.tasks import has_failed, share

logger = logging.getLogger(__name__)

HIGH_WATER_BYTES = 1024 * 1024
# A frame ends with the output that reaches this size. Even the largest output alone is within the
# limit of an ingress (MAX_STEP_BYTES).
MAX_FRAME_BYTES = 1024 * 1024
# The bound per ingress: the prompt log-probabilities of several requests that ask for the most, or
# half a minute of 30,000 tokens per second.
MAX_WAITING_BYTES = 256 * 1024 * 1024
_OBJECT_BYTES = 128  # the Python objects around an encoded output, and its slot in the queue
MIN_MERGED = 1024  # so many merged changes are kept in any case
_DIAL_TIMEOUT_S = 5.0
# Bytes unacknowledged for so long end the connection (a host that lost power).
_DEAD_PEER_MS = 10_000


class IngressLink(asyncio.Protocol):
    """A link to an ingress, opened by `dial`. All methods run in the same event loop."""

    def __init__(self, address: StreamAddress, links: IngressLinks) -> None:
        self.address = address
        self.is_open = False
        self._links = links
        self._snapshot = links.snapshot
        self._splitter = FrameSplitter(MAX_CONTROL_BYTES)
        self._transport: asyncio.Transport | None = None
        self._is_paused = False
        self._waiting: deque[Raw] = deque()  # outputs, encoded
        self._waiting_bytes = 0
        self._accepted: list[Accepted] = []  # no step's load counts them yet
        self._counted: list[Accepted] = []  # for the next frame
        # Prefixes cached (True) or evicted since the last frame; None: the next frame has all.
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
        except OSError as error:  # includes TimeoutError
            raise StreamError(f"cannot reach the ingress at {host}:{port}: {error}") from None
        if not self.is_open:
            raise StreamError(f"the ingress at {host}:{port} closed the connection at once")

    def accept(self, accepted: Accepted) -> None:
        """Sends the acceptance with the frame of the next step, whose load counts the request. If
        it were sent earlier, the router would see it with a load that does not count the request,
        and would overbook its row for the length of that step."""
        self._accepted.append(accepted)

    def send_full_state(self) -> None:
        """Sends all prefixes and adapters now, or as soon as the ingress reads again."""
        self._changes = self._sent_adapters = self._sent_disk = None
        if not self._is_paused:
            self._write_frame()

    def send(self, outputs: Sequence[TokenOutput] = (), *, is_step: bool = True) -> None:
        """Is called once after each change of the snapshot. Sends a frame or, while the ingress
        is slow, adds to the next frame."""
        if is_step and self._accepted:
            self._counted += self._accepted
            self._accepted.clear()
        if outputs or self._counted or self._is_paused or self._changes is None:
            self._merge()
            if self._is_paused:
                self._hold(outputs)
            else:
                self._write_frame(outputs)
            if self._waiting_bytes > MAX_WAITING_BYTES:
                self._cut()
        elif self._transport is not None and self.is_open:
            snapshot = self._snapshot
            frame = snapshot.shared_frame(self._same)
            self._sent_adapters, self._sent_disk = snapshot.adapters, snapshot.on_disk
            self._transport.write(frame)

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
        hello = Hello(self.address.token, self._links.engine_id, self._links.engine_key)
        self._transport.write(encode_frame(hello))
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._splitter.feed(data):
                frame = decode_frame(payload)
                if not isinstance(frame, Abort):
                    raise StreamError(f"unexpected {type(frame).__name__} frame")
                self._links.on_abort(self, frame)
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
        self._links.forget(self)

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        self._write_waiting()

    def _merge(self) -> None:
        """Adds the step's changes of the prefix cache to the unsent changes."""
        if self._changes is None:
            return
        self._changes.update(dict.fromkeys(self._snapshot.cached, True))
        self._changes.update(dict.fromkeys(self._snapshot.evicted, False))
        if len(self._changes) > len(self._snapshot.prefixes) + MIN_MERGED:
            self._changes = None  # sending all is shorter by now

    def _hold(self, outputs: Sequence[TokenOutput]) -> None:
        """Keeps the outputs, encoded, until the ingress reads again."""
        for output in outputs:
            encoded = encode_output(output)
            self._waiting.append(Raw(encoded))
            self._waiting_bytes += len(encoded) + _OBJECT_BYTES

    def _cut(self) -> None:
        num_mib, ingress_id = self._waiting_bytes >> 20, self.address.ingress_id
        logger.warning("ingress %s does not read: link cut with %d MiB unsent", ingress_id, num_mib)
        if self._transport is not None:
            self._transport.abort()

    def _write_waiting(self) -> None:
        """Sends at least one frame, and more until no output waits or the ingress is slow."""
        while True:
            outputs, num_bytes = [], 0
            while self._waiting and num_bytes < MAX_FRAME_BYTES:
                output = self._waiting.popleft()
                outputs.append(output)
                num_bytes += len(memoryview(output))
            self._waiting_bytes -= num_bytes + _OBJECT_BYTES * len(outputs)
            self._write(self._frame(outputs))
            if self._is_paused or not self._waiting:
                return

    def _write_frame(self, outputs: Sequence[TokenOutput] = ()) -> None:
        frame = self._frame(outputs)
        if len(frame) > MAX_FRAME_BYTES and len(outputs) > 1:
            self._hold(outputs)
            self._write_waiting()
        else:
            self._write(frame)

    @property
    def _same(self) -> Same:
        snapshot = self._snapshot
        return self._sent_adapters is snapshot.adapters, self._sent_disk is snapshot.on_disk

    def _frame(self, outputs: Sequence[Output]) -> bytes:
        snapshot, changes, counted, same = self._snapshot, self._changes, self._counted, self._same
        if changes is None:
            return snapshot.frame_for(outputs, counted, tuple(snapshot.prefixes), (), True, same)
        cached = tuple(digest for digest, is_cached in changes.items() if is_cached)
        evicted = tuple(digest for digest, is_cached in changes.items() if not is_cached)
        return snapshot.frame_for(outputs, counted, cached, evicted, False, same)

    def _write(self, frame: bytes) -> None:
        """Sends a frame that brings the ingress up to date."""
        if self._transport is None or not self.is_open:
            return
        self._counted, self._changes = [], {}
        self._sent_adapters, self._sent_disk = self._snapshot.adapters, self._snapshot.on_disk
        self._transport.write(frame)


class IngressLinks:
    """All ingresses that an engine is connected to: dials each once and sends it every step.

    The first submit or attend that names an ingress dials its link, which lives until the
    connection ends; then its requests are aborted (`on_lost`), and only the next submit or attend
    dials again.
    """

    def __init__(
        self,
        engine_id: str,
        on_abort: Callable[[IngressLink, Abort], None],
        on_lost: Callable[[IngressLink], None],
    ) -> None:
        self.snapshot = EngineSnapshot()
        self.engine_id = engine_id
        self.engine_key = secrets.token_urlsafe(32)
        self.on_abort = on_abort
        self._on_lost = on_lost
        self._links: dict[str, IngressLink] = {}  # by ingress id
        self._dialling: dict[str, asyncio.Task[IngressLink]] = {}
        self._is_closed = False

    async def open(self, address: StreamAddress) -> IngressLink:
        """Returns an open link; concurrent callers share the dialling. Raises StreamError if the
        ingress cannot be reached, or closed the link before this caller resumed."""
        link = self._links.get(address.ingress_id)
        if link is not None and link.is_open:
            return link
        task = self._dialling.get(address.ingress_id)
        if task is None:
            task = share(self._dial(address), "dial-ingress")
            self._dialling[address.ingress_id] = task
            task.add_done_callback(partial(self._dialled, address.ingress_id))
        link = await asyncio.shield(task)
        if not link.is_open:  # its end was reported before the caller had a request there
            raise StreamError(f"ingress {address.ingress_id} closed the connection at once")
        return link

    async def attend(self, address: StreamAddress) -> None:
        """Sends the ingress the full state now, and every step from now on."""
        link = self._links.get(address.ingress_id)
        if link is not None and link.is_open:
            link.send_full_state()
        else:
            await self.open(address)

    def send(self, step: StepOutput, outputs: Mapping[IngressLink, list[TokenOutput]]) -> None:
        """Sends a step to every ingress. `outputs`: the step's outputs by their link."""
        self.snapshot.observe(step)
        for link in tuple(self._links.values()):
            link.send(outputs.get(link, ()))

    def heartbeat(self, load: EngineLoad, stall: float = 0.0) -> None:
        """Sends the load after the newest step to every ingress. `stall`: see `Step.stall`."""
        self.snapshot.observe(StepOutput((), load), stall)
        for link in tuple(self._links.values()):
            link.send(is_step=False)

    def close(self) -> None:
        self._is_closed = True
        for link in tuple(self._links.values()):
            link.close()

    async def _dial(self, address: StreamAddress) -> IngressLink:
        link = IngressLink(address, self)
        await link.dial()
        if self._is_closed:
            link.close()
            raise StreamError("the engine was stopped")
        self._links[address.ingress_id] = link
        link.send_full_state()
        return link

    def _dialled(self, ingress_id: str, task: asyncio.Task[IngressLink]) -> None:
        self._dialling.pop(ingress_id, None)
        has_failed(task)  # reads the error: all awaiters may have left

    def forget(self, link: IngressLink) -> None:
        if self._links.get(link.address.ingress_id) is link:
            del self._links[link.address.ingress_id]
        self._on_lost(link)

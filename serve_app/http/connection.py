"""One client's connection, as uvicorn sees it, with an end to every wait for the client.

uvicorn waits for ever for the first byte, for the rest of a header, and for a client that does not
read; it buffers a header of any length, and the rest of an answer of any length. None of that
reaches an ASGI application, so that the protocol itself has to bound it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from uvicorn.config import HTTP_PROTOCOLS

from serve_app.config import IngressArgs
from serve_app.errors import ApiError

if TYPE_CHECKING:  # both parsers have the attributes that are used here
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as _Protocol
else:
    from uvicorn.protocols.http.auto import AutoHTTPProtocol as _Protocol

logger = logging.getLogger(__name__)

_PHRASES = {408: b"Request Timeout", 431: b"Request Header Fields Too Large"}
_SECOND_LOOK_S = 0.1
_BURST_S = 1.0
_LOOK_S = 1.0


def install(args: IngressArgs) -> None:
    """Every uvicorn server that starts in this process from now on uses the protocol."""
    FrontProtocol.args = args
    if "auto" not in HTTP_PROTOCOLS:
        raise RuntimeError("this uvicorn does not choose its HTTP protocol by the name auto")
    HTTP_PROTOCOLS["auto"] = f"{__name__}:{FrontProtocol.__name__}"


class FrontProtocol(_Protocol):
    args = IngressArgs()
    _num_header_bytes = 0  # of the request that has not begun yet
    _deadline: asyncio.TimerHandle | None = None  # for its header
    _look: asyncio.TimerHandle | None = None  # at a client that does not read
    _stream_look: asyncio.TimerHandle | None = None  # at a client that falls behind a stream
    _is_paused = False  # by asyncio, until the client has read down to the low mark
    _was_behind = False  # at the last look, or when writing was paused

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # An answer is written without waiting for the client, so that all that the client has not
        # read is in one place, and counted, instead of in Serve's queues.
        transport.set_write_buffer_limits(high=self.args.max_unread_bytes)
        self._await_header()

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        if before is None or not before.more_body:
            self._num_header_bytes += len(data)
        super().data_received(data)
        cycle = self.cycle
        if cycle is not before or self.transport.get_protocol() is not self:  # or a web socket
            self._num_header_bytes = 0
            self._stop_waiting()
        elif self._num_header_bytes > self.args.max_header_bytes:
            self._refuse(431, f"The headers are longer than {self.args.max_header_bytes} bytes.")
        elif self._deadline is None and self._is_idle():
            # The next header, or the rest of a body that was refused.
            self._await_header()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        for look in (self._look, self._stream_look):
            if look is not None:
                look.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._look is None and self.transport.get_write_buffer_size():
            self._watch_reader(self.args.write_timeout_s)

    def pause_writing(self) -> None:
        """More than `max_unread_bytes` wait for the client. uvicorn goes on writing."""
        self._is_paused = self._was_behind = True
        if self._stream_look is None:
            self._stream_look = self.loop.call_later(_BURST_S, self._check_stream)

    def resume_writing(self) -> None:
        self._is_paused = False

    def _is_idle(self) -> bool:
        """No request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _await_header(self) -> None:
        self._deadline = self.loop.call_later(self.args.header_timeout_s, self._look_again)

    def _look_again(self) -> None:
        """The process may have been held up, with the header in the socket."""
        self._deadline = self.loop.call_later(_SECOND_LOOK_S, self._end_wait)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _end_wait(self) -> None:
        if not self._is_idle():
            return
        if self._num_header_bytes:
            self._refuse(408, "The header of the request did not arrive in time.")
        else:
            self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        self._stop_waiting()
        if self.transport.is_closing():
            return
        if self._is_idle():
            error = ApiError(status, message, code="bad_header")
            body = error.body()
            head = [b"HTTP/1.1 %d %s" % (status, _PHRASES[status])]
            head += [f"{name}: {value}".encode() for name, value in error.headers().items()]
            head += [b"content-type: application/json", b"content-length: %d" % len(body)]
            self.transport.write(b"\r\n".join((*head, b"", body)))
        self.transport.close()

    def _check_stream(self) -> None:
        """A moment later, for a burst leaves in one: a whole answer may be long, a stream may
        not fall behind. asyncio reports one pause until the client reads below the low mark, so
        that the looks go on until then: the client may stop reading again before that."""
        self._stream_look = None
        if not self._is_paused:
            return
        is_behind = self.transport.get_write_buffer_size() > self.args.max_unread_bytes
        if is_behind and self._was_behind and not self._is_idle():
            self._give_up("falls behind its stream")
            return
        self._was_behind = is_behind
        self._stream_look = self.loop.call_later(_BURST_S, self._check_stream)

    def _watch_reader(self, patience_s: float) -> None:
        """The end of an answer must keep moving."""
        size = self.transport.get_write_buffer_size()
        since_s = self.loop.time()

        def look() -> None:
            nonlocal size, since_s
            now = self.transport.get_write_buffer_size()
            if not now:
                self._look = None
                return
            if now != size:
                size, since_s = now, self.loop.time()
            elif self.loop.time() - since_s >= patience_s:
                self._look = None
                self._give_up("does not read its answer")
                return
            self._look = self.loop.call_later(_LOOK_S, look)

        self._look = self.loop.call_later(_LOOK_S, look)

    def _give_up(self, why: str) -> None:
        waiting = self.transport.get_write_buffer_size()
        logger.warning("client_too_slow: %s %s; %d bytes wait", self.client, why, waiting)
        self.transport.abort()

"""A uvicorn protocol in which every wait for the client ends.

uvicorn waits without limit for the first byte, for the rest of a header, and for a client that does
not read; it buffers headers and unsent responses of any length. An ASGI application sees none of
this, so the protocol itself must bound it.

A request that offers to go on in another protocol, as Java's HTTP client does with h2c, is answered
in HTTP/1.1: uvicorn would lose its body.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import TYPE_CHECKING

from uvicorn.config import HTTP_PROTOCOLS

from serve_app.config import IngressArgs
from serve_app.errors import ApiError

if TYPE_CHECKING:  # both parsers have the attributes used here
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as _Protocol
else:
    from uvicorn.protocols.http.auto import AutoHTTPProtocol as _Protocol

logger = logging.getLogger(__name__)

_PHRASES = {
    400: b"Bad Request",
    408: b"Request Timeout",
    431: b"Request Header Fields Too Large",
}
_OF_BODY = (b"content-length", b"transfer-encoding")
_RECHECK_S = 0.1
_BURST_S = 1.0
_CHECK_S = 1.0


def install(args: IngressArgs) -> None:
    """Makes every uvicorn server that starts later in this process use the protocol."""
    FrontProtocol.args = args
    if "auto" not in HTTP_PROTOCOLS:
        raise RuntimeError("this version of uvicorn has no HTTP protocol named auto to replace")
    HTTP_PROTOCOLS["auto"] = f"{__name__}:{FrontProtocol.__name__}"


class FrontProtocol(_Protocol):
    """A client's connection."""

    args = IngressArgs()
    _num_header_bytes = 0  # received of the next request's header
    _deadline: asyncio.TimerHandle | None = None  # for that header
    _read_check: asyncio.TimerHandle | None = None  # that the client reads the end of a response
    _stream_check: asyncio.TimerHandle | None = None  # that the client keeps up with a stream
    _is_paused = False  # by asyncio, until the client has read down to the low-water mark
    _was_behind = False  # at the last check, or when writing was paused
    _received = b""  # the bytes that the parser has read last
    _again = b""  # the bytes from a request on whose offer of another protocol is declined

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # A response is written without waiting for the client, so all unread bytes are in this one
        # buffer, where they are counted, instead of in Serve's queues.
        transport.set_write_buffer_limits(high=self.args.max_unread_bytes)
        self._await_header()

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        if before is None or not before.more_body:
            self._num_header_bytes += len(data)
        self._received = data
        super().data_received(data)
        while self._again:
            self._received, self._again = self._again, b""
            super().data_received(self._received)
        cycle = self.cycle
        if cycle is not before or self.transport.get_protocol() is not self:  # or a web socket
            self._num_header_bytes = 0
            self._stop_waiting()
        elif self._num_header_bytes > self.args.max_header_bytes:
            limit = self.args.max_header_bytes
            self._refuse(431, f"The headers are longer than the limit of {limit} bytes.")
        elif self._deadline is None and self._is_idle():
            # These bytes belong to the next header, or to the rest of a refused body.
            self._await_header()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        for check in (self._read_check, self._stream_check):
            if check is not None:
                check.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._read_check is None and self.transport.get_write_buffer_size():
            self._watch_reader(self.args.write_timeout_s)

    def pause_writing(self) -> None:
        """Called when more than `max_unread_bytes` are unread. uvicorn keeps writing."""
        self._is_paused = self._was_behind = True
        if self._stream_check is None:
            self._stream_check = self.loop.call_later(_BURST_S, self._check_stream)

    def resume_writing(self) -> None:
        self._is_paused = False

    def _should_upgrade(self) -> bool:
        """Returns True for a request that offers another protocol: uvicorn then does not begin it,
        and calls `handle_websocket_upgrade` at the end of its header."""
        if not hasattr(self, "parser"):  # h11 keeps the body
            return super()._should_upgrade()
        return self._get_upgrade() is not None

    def handle_websocket_upgrade(self, *event: object) -> None:
        if hasattr(self, "parser") and not self._is_for_web_socket():
            self._decline_upgrade()
            return
        super().handle_websocket_upgrade(*event)
        # What the web socket's own parser refuses, it does not answer.
        if not getattr(self.transport.get_protocol(), "handshake_initiated", True):
            self._refuse(400, "The request for a web socket cannot be read.")

    def _is_for_web_socket(self) -> bool:
        return (
            super()._should_upgrade()
            and self.scope["method"] == "GET"
            and all(name not in _OF_BODY for name, _ in self.headers)
        )

    def _decline_upgrade(self) -> None:
        """Begins the request anew without its offer: the parser takes what follows the offer for
        bytes of the other protocol. Called while the parser's exception, which says where they
        begin, is handled."""
        end = getattr(sys.exception(), "args", (0,))[0]
        version = self.parser.get_http_version().encode()
        head = [b"%s %s HTTP/%s" % (self.scope["method"].encode(), self.url, version)]
        head += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        self._again = b"\r\n".join((*head, b"", self._received[end:]))
        self.parser = type(self.parser)(self)

    def _is_idle(self) -> bool:
        """Returns True while no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _await_header(self) -> None:
        self._deadline = self.loop.call_later(self.args.header_timeout_s, self._recheck_header)

    def _recheck_header(self) -> None:
        """Waits a moment more: if this process was stalled, the header may be in the socket."""
        self._deadline = self.loop.call_later(_RECHECK_S, self._end_wait)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _end_wait(self) -> None:
        if not self._is_idle():
            return
        if self._num_header_bytes:
            self._refuse(408, "The request header did not arrive in time.")
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
        """Aborts a connection that has stayed behind its stream since the last check; a burst is
        read within that time, and a whole response may be long. asyncio reports a pause only once
        until the client has read down to the low-water mark, and the client may stop reading before
        that, so the checks continue until then."""
        self._stream_check = None
        if not self._is_paused:
            return
        is_behind = self.transport.get_write_buffer_size() > self.args.max_unread_bytes
        if is_behind and self._was_behind and not self._is_idle():
            self._abort("falls behind its stream")
            return
        self._was_behind = is_behind
        self._stream_check = self.loop.call_later(_BURST_S, self._check_stream)

    def _watch_reader(self, timeout_s: float) -> None:
        """Aborts the connection if the client reads no byte of the end of a response for
        `timeout_s`."""
        size = self.transport.get_write_buffer_size()
        since_s = self.loop.time()

        def check() -> None:
            nonlocal size, since_s
            now = self.transport.get_write_buffer_size()
            if not now:
                self._read_check = None
                return
            if now != size:
                size, since_s = now, self.loop.time()
            elif self.loop.time() - since_s >= timeout_s:
                self._read_check = None
                self._abort("does not read its response")
                return
            self._read_check = self.loop.call_later(_CHECK_S, check)

        self._read_check = self.loop.call_later(_CHECK_S, check)

    def _abort(self, reason: str) -> None:
        num_unread = self.transport.get_write_buffer_size()
        logger.warning("client_too_slow: %s %s; %d bytes unread", self.client, reason, num_unread)
        self.transport.abort()

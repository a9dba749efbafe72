"""The ingress end of the side stream: accepts engines, sorts their tokens to the requests.

`StreamServer.open(ids)` returns a `TokenStream`; a read returns everything since the last read, so
that a slow client costs no more wake-ups than its reads. The request itself bounds the unread
tokens (max_tokens times its choices). Ignorant of HTTP; the caller reports the failure of the
unary call with `TokenStream.fail`.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import socket
import ssl
import time
from collections.abc import Iterable
from typing import Protocol, cast

from engine.errors import EngineDeadError
from engine.types import EngineLoad, TokenOutput
from serve_app.messages import StreamAddress
from serve_app.network import is_loopback, server_tls
from serve_app.stream.wire import (
    MAX_CONTROL_BYTES,
    MAX_STEP_BYTES,
    SILENCE_S,
    Abort,
    FrameSplitter,
    Hello,
    Step,
    StreamError,
    decode_frame,
    encode_frame,
)
from serve_app.tasks import keep, spawn

logger = logging.getLogger(__name__)

_HELLO_TIMEOUT_S = 5.0
_ACCEPT_RETRY_S = 1.0
_BACKLOG = 100  # asyncio's default
_MAX_STRANGERS = 64  # connections at once without a valid Hello
_MAX_LOST = 1024  # engines whose lost connection is remembered


class EngineListener(Protocol):
    """Called in the server's event loop."""

    def frame_received(self, engine_id: str, step: Step) -> None:
        """Is called after a frame's tokens are delivered."""

    def choice_stopped(self, engine_id: str, num_tokens: int) -> None:
        """Is called when a choice ended at a stop string, which no frame reports."""

    def engine_lost(self, engine_id: str) -> None:
        """Is called when the engine's last connection ended."""


class StreamServer:
    """The server of an ingress process. All methods run in the same event loop."""

    def __init__(self, listener: EngineListener) -> None:
        self.loads: dict[str, EngineLoad] = {}  # by engine id, of the engines connected now
        self._listener = listener
        self._token = secrets.token_urlsafe(32)
        self._ingress_id = secrets.token_hex(8)
        self._streams: dict[str, TokenStream] = {}
        self._connections: set[_EngineConnection] = set()
        self._strangers: dict[_EngineConnection, None] = {}  # in order of arrival
        self._keys: dict[str, str] = {}  # by engine id, of engines connected or in `_lost_s`
        # By id of an engine that is not connected: when its last connection ended, oldest first.
        self._lost_s: dict[str, float] = {}
        self._servers: dict[str, tuple[_Listener, str]] = {}  # and certificate, by host
        self._address: StreamAddress | None = None

    async def listen(self, host: str, *, encrypt: bool | None = None) -> None:
        """Listens on a free port. After a call with another host, new calls name that host and old
        links live on. `encrypt`: use TLS; None: use it unless the host is loopback."""
        if host not in self._servers:
            loop = asyncio.get_running_loop()
            server: _Listener
            if encrypt if encrypt is not None else not is_loopback(host):
                tls, certificate = server_tls()
                server = _EncryptedServer(self, await _listening(host), tls)
            else:
                server = await loop.create_server(lambda: _EngineConnection(self), host, 0)
                certificate = ""
            self._servers[host] = server, certificate
        server, certificate = self._servers[host]
        port = server.sockets[0].getsockname()[1]
        self._address = StreamAddress(host, port, self._token, self._ingress_id, certificate)

    @property
    def address(self) -> StreamAddress:
        assert self._address is not None
        return self._address

    @property
    def engines(self) -> frozenset[str]:
        """The ids of the engines connected now. An engine has the id of its Serve replica."""
        return frozenset(connection.engine_id for connection in self._connections)

    @property
    def num_open(self) -> int:
        """The engine requests whose stream is still open."""
        return len(self._streams)

    def open(self, request_ids: Iterable[str]) -> TokenStream:
        stream = TokenStream(self, tuple(request_ids))
        for request_id in stream.request_ids:
            assert request_id not in self._streams
            self._streams[request_id] = stream
        return stream

    def close(self) -> None:
        for server, _ in self._servers.values():
            server.close()
        for connection in (*self._connections, *self._strangers):
            connection.close()

    def _admit_stranger(self, connection: _EngineConnection) -> None:
        """Closes the oldest stranger beyond the limit. An engine sends Hello at once, so a stranger
        that holds silent connections open does not keep engines out."""
        if connection in self._strangers:  # since the begin of its handshake
            return
        if len(self._strangers) >= _MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.close()
        self._strangers[connection] = None

    def _accepts(self, hello: Hello) -> bool:
        """Checks the token and the key. An id belongs to the process that used it first."""
        if not hmac.compare_digest(hello.token.encode(), self._token.encode()):
            return False
        key = self._keys.setdefault(hello.engine_id, hello.engine_key)
        return hmac.compare_digest(hello.engine_key.encode(), key.encode())

    def _deliver(self, connection: _EngineConnection, step: Step) -> None:
        connection.stall = step.stall
        self.loads[connection.engine_id] = step.load
        streams = self._streams
        for accepted in step.accepted:
            stream = streams.get(accepted.request_id)
            if stream is not None and stream._is_of(connection):
                stream._connection = connection
                stream.found_in = accepted.found_in
        for output in step.outputs:
            stream = streams.get(output.request_id)
            if stream is not None and stream._is_of(connection):
                stream._push(output, connection)
        try:
            self._listener.frame_received(connection.engine_id, step)
        except Exception:  # a listener's failure must not end the connection
            logger.exception("the listener of the side stream failed")

    def silence_s(self, engine_id: str) -> float | None:
        """Returns the seconds since the last bytes from this engine, plus the delay of an overdue
        step by its last frame, on the same scale. Returns None if it is not connected."""
        since_s = [
            connection.received_s - SILENCE_S * connection.stall
            for connection in self._connections
            if connection.engine_id == engine_id
        ]
        return time.monotonic() - max(since_s) if since_s else None

    def has_lost(self, engine_id: str, before_s: float) -> bool:
        """Returns True if this engine's last connection ended before `before_s` (monotonic clock).
        Then no later request can have reached it, because an engine connects first."""
        lost_s = self._lost_s.get(engine_id)
        return lost_s is not None and lost_s < before_s

    def _lost(self, connection: _EngineConnection) -> None:
        self._connections.discard(connection)
        if all(other.engine_id != connection.engine_id for other in self._connections):
            self._lost_s[connection.engine_id] = time.monotonic()
            if len(self._lost_s) > _MAX_LOST:
                oldest = next(iter(self._lost_s))
                del self._lost_s[oldest]
                self._keys.pop(oldest, None)
            self.loads.pop(connection.engine_id, None)
            self._listener.engine_lost(connection.engine_id)
        for stream in set(self._streams.values()):
            if stream._connection is connection:
                stream.fail(EngineDeadError("the connection to the engine was lost"))

    def _forget(self, stream: TokenStream) -> None:
        for request_id in stream.request_ids:
            self._streams.pop(request_id, None)


class TokenStream:
    """The tokens of a submit call, which has engine requests for a single engine."""

    def __init__(self, server: StreamServer, request_ids: tuple[str, ...]) -> None:
        self.request_ids = request_ids
        self._server = server
        self._arrived: list[TokenOutput] = []
        self._wake: asyncio.Future[None] | None = None
        self._failure: BaseException | None = None
        self._connection: _EngineConnection | None = None  # known once the engine accepted it
        self.has_output = False  # a token arrived, read or not
        self.found_in = ""  # see `Accepted`; "" until the engine accepted the requests

    @property
    def engine_id(self) -> str | None:
        return None if self._connection is None else self._connection.engine_id

    @property
    def engine_load(self) -> EngineLoad | None:
        engine_id = self.engine_id
        return None if engine_id is None else self._server.loads.get(engine_id)

    async def read(self) -> list[TokenOutput]:
        """Returns everything that arrived since the last read, never an empty list. Raises the
        failure of the stream after its last output."""
        while not self._arrived:
            if self._failure is not None:
                raise self._failure
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        arrived, self._arrived = self._arrived, []
        return arrived

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """Aborts the request at the engine at once. Before the engine accepted it, only cancelling
        the call does."""
        if self._connection is not None:
            self._connection.send_abort(Abort(request_id, choice))

    def stop(self, request_id: str, choice: int, num_tokens: int) -> None:
        """Ends a choice whose text reached a stop string after so many output tokens."""
        if self._connection is not None:
            self._connection.send_abort(Abort(request_id, choice, "stop"))
            self._server._listener.choice_stopped(self._connection.engine_id, num_tokens)

    def fail(self, failure: BaseException) -> None:
        """Ends the stream after the outputs that have arrived. The first failure counts."""
        if self._failure is None:
            self._failure = failure
            self._notify()

    def close(self) -> None:
        self._server._forget(self)

    def _is_of(self, connection: _EngineConnection) -> bool:
        """An engine sends tokens of requests that it accepted, or that no engine has accepted."""
        return self._connection is None or self._connection.engine_id == connection.engine_id

    def _push(self, output: TokenOutput, connection: _EngineConnection) -> None:
        self._connection = connection
        self.has_output = True
        self._arrived.append(output)
        self._notify()

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


class _EngineConnection(asyncio.Protocol):
    def __init__(self, server: StreamServer) -> None:
        self.engine_id = ""  # empty until its Hello was accepted
        self.received_s = time.monotonic()
        self.stall = 0.0  # of its newest frame
        self._server = server
        self._splitter = FrameSplitter(MAX_CONTROL_BYTES)
        self._transport: asyncio.Transport | None = None
        self._handshake: asyncio.Task[None] | None = None  # of a TLS connection
        self._hello_timer: asyncio.TimerHandle | None = None

    def begin_tls(self, accepted: socket.socket, tls: ssl.SSLContext) -> None:
        """Begins the handshake, after which `connection_made` is called, unless it fails."""
        self._server._admit_stranger(self)
        self._handshake = spawn(self._encrypt(accepted, tls), "tls-handshake")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport has the interface without being a subclass.
        self._transport = cast(asyncio.Transport, transport)
        self._server._admit_stranger(self)
        loop = asyncio.get_running_loop()
        self._hello_timer = loop.call_later(_HELLO_TIMEOUT_S, self._transport.abort)

    def data_received(self, data: bytes) -> None:
        self.received_s = time.monotonic()
        try:
            for payload in self._splitter.feed(data):
                self._receive(payload)
        except StreamError as error:
            logger.warning("engine connection closed: %s", error)
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        self._server._strangers.pop(self, None)
        if self.engine_id:
            logger.info("engine %s disconnected", self.engine_id)
            self._server._lost(self)

    def send_abort(self, abort: Abort) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode_frame(abort))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        elif self._handshake is not None:
            self._handshake.cancel()

    async def _encrypt(self, accepted: socket.socket, tls: ssl.SSLContext) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self, accepted, ssl=tls, ssl_handshake_timeout=_HELLO_TIMEOUT_S
            )
        except OSError as error:  # includes ssl.SSLError and TimeoutError
            logger.warning("engine connection closed in its TLS handshake: %s", error)
        finally:
            if self._transport is None:
                self._server._strangers.pop(self, None)

    def _receive(self, payload: bytes) -> None:
        frame = decode_frame(payload)
        if self.engine_id and isinstance(frame, Step):
            self._server._deliver(self, frame)
        elif not self.engine_id and isinstance(frame, Hello) and self._server._accepts(frame):
            self._welcome(frame)
        else:
            raise StreamError(f"unexpected {type(frame).__name__} frame")

    def _welcome(self, hello: Hello) -> None:
        self._cancel_timer()
        self._server._strangers.pop(self, None)
        self.engine_id = hello.engine_id or "engine"
        # Only a peer with the token may make this process buffer large frames.
        self._splitter.max_frame_bytes = MAX_STEP_BYTES
        self._server._connections.add(self)
        self._server._lost_s.pop(self.engine_id, None)
        logger.info("engine %s connected", self.engine_id)

    def _cancel_timer(self) -> None:
        if self._hello_timer is not None:
            self._hello_timer.cancel()
            self._hello_timer = None


class _EncryptedServer:
    """Accepts connections itself: asyncio's server reports a TLS connection only after its
    handshake, so connections that never begin theirs would not be counted."""

    def __init__(self, server: StreamServer, listener: socket.socket, tls: ssl.SSLContext) -> None:
        self.sockets = (listener,)
        self._server = server
        self._tls = tls
        self._accepting = keep(lambda: self._accept(listener), "accept-engines")
        # Not earlier: the event loop still watches the socket.
        self._accepting.add_done_callback(lambda _: listener.close())

    def close(self) -> None:
        self._accepting.cancel()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(listener)
            except OSError as error:  # no free file descriptor, or the peer has left already
                logger.warning("could not accept an engine connection: %s", error)
                await asyncio.sleep(_ACCEPT_RETRY_S)
                continue
            _EngineConnection(self._server).begin_tls(accepted, self._tls)
            await asyncio.sleep(0)  # the handshake's task owns the socket once it has begun


_Listener = asyncio.Server | _EncryptedServer


async def _listening(host: str) -> socket.socket:
    """Listens on a free port of the first address of `host`."""
    found = await asyncio.get_running_loop().getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    family, _, _, _, address = found[0]
    listener = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    listener.setblocking(False)
    return listener

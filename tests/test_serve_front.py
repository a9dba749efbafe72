"""The process that clients connect to: a real uvicorn with the connection limits and the middleware
that Serve's proxy loads, a small application behind it, and clients on raw sockets."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import cast

import httpx
import pytest
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import WSProtocolType

from serve_app.config import IngressArgs
from serve_app.errors import ApiError
from serve_app.http.arrivals import Arrivals
from serve_app.http.asgi import SseResponse
from serve_app.http.connection import FrontProtocol
from serve_app.http.front import FrontMiddleware
from tests.waiting import until

QUICK = IngressArgs(header_timeout_s=0.4, body_timeout_s=0.4, max_header_bytes=2048)
OK = b"HTTP/1.1 200"
BODY_HEAD = b"POST /echo HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n"


@dataclass
class App:
    """The application behind the layers under test; records the requests that reach it."""

    scopes: list[Scope] = field(default_factory=list)
    num_left: int = 0
    goes_on: asyncio.Event = field(default_factory=asyncio.Event)  # the stream of /two-parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)
        if scope["path"] == "/dies":
            return
        if scope["path"] in ("/serve", "/v1/messages/serve"):
            own_id = dict(scope["headers"])[b"x-request-id"]
            await send(start(429, [(b"retry-after", b"7"), (b"x-request-id", own_id)]))
            await send({"type": "http.response.body", "body": b"Request dropped."})
            return
        if scope["path"].endswith("/cut"):
            await send(start(200, [(b"content-type", b"text/event-stream; charset=utf-8")]))
            event = {"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True}
            await send(event)
            if scope["query_string"] == b"raises":
                raise RuntimeError("a fault of Serve")
            if scope["query_string"] == b"whole":
                await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})
            return
        if scope["path"] == "/endless":
            await self._stream(self._endless(), scope, receive, send)
            return
        if scope["path"] == "/two-parts":
            await self._stream(self._two_parts(), scope, receive, send)
            return
        body = (await receive())["body"]
        size = int(scope["query_string"] or 0)
        await send(start(200, [(b"content-length", b"%d" % (size or len(body)))]))
        await send({"type": "http.response.body", "body": b"x" * size or body})

    async def _endless(self) -> AsyncIterator[bytes]:
        while True:
            await asyncio.sleep(0)
            yield b"data: " + b"x" * 4096 + b"\n\n"

    async def _two_parts(self) -> AsyncIterator[bytes]:
        yield b"x" * 2 * 1024**2
        await self.goes_on.wait()
        yield b"x" * 2 * 1024**2
        await asyncio.Event().wait()

    async def _stream(
        self, chunks: AsyncIterator[bytes], scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Streams until it is cancelled, as Serve's proxy does when the client disconnects."""

        def close() -> None:
            self.num_left += 1

        answer = asyncio.create_task(SseResponse(b"", chunks, close)(scope, receive, send))
        while (await receive())["type"] != "http.disconnect":
            pass
        answer.cancel()


def start(status: int, headers: list[tuple[bytes, bytes]]) -> Message:
    return {"type": "http.response.start", "status": status, "headers": headers}


@dataclass
class Client:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def ask(self, raw: bytes) -> tuple[int, dict[str, str], bytes]:
        """Returns status, headers and body of a response with a content-length."""
        self.writer.write(raw)
        return await self.answer()

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        async with asyncio.timeout(120):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
            body = await self.reader.readexactly(int(headers.get("content-length", 0)))
            return int(head[0].split()[1]), headers, body

    async def is_closed(self) -> bool:
        """Waits until the server closes, and fails if it sends anything before."""
        async with asyncio.timeout(120):
            try:
                return await self.reader.read() == b""
            except ConnectionResetError:
                return True


class Server:
    def __init__(self, app: App, port: int, server: uvicorn.Server) -> None:
        self.app = app
        self._server = server
        self.port = port
        self.clients: list[Client] = []

    async def connect(self, **sizes: int) -> Client:
        sock = socket.socket()
        for name, value in sizes.items():
            sock.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.port))
        client = Client(*await asyncio.open_connection(sock=sock, limit=2**16))
        self.clients.append(client)
        return client

    def num_unread(self) -> int:
        """Returns the number of bytes buffered here for the only client."""
        (protocol,) = self._server.server_state.connections
        return int(cast(FrontProtocol, protocol).transport.get_write_buffer_size())


@asynccontextmanager
async def serving(args: IngressArgs = QUICK, ws: WSProtocolType = "none") -> AsyncIterator[Server]:
    app = App()
    protocol = type("Protocol", (FrontProtocol,), {"args": args})
    listener = socket.create_server(("127.0.0.1", 0))
    # So that the kernel buffers little for the client.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 * 1024)
    front: ASGIApp = FrontMiddleware(app, args)
    config = uvicorn.Config(
        front, http=protocol, log_config=None, access_log=False, ws=ws, lifespan="off"
    )
    server = uvicorn.Server(config)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    await until(lambda: server.started)
    here = Server(app, listener.getsockname()[1], server)
    try:
        yield here
    finally:
        for client in here.clients:
            client.writer.transport.abort()
        server.should_exit = True
        await running


def error_of(body: bytes) -> dict[str, str]:
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return dict(error)


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nhost: a\r\nx-half"])
async def test_a_connection_without_a_whole_header_is_closed_at_the_deadline(sent: bytes) -> None:
    async with serving() as server:
        client = await server.connect()
        client.writer.write(sent)
        if sent:
            status, headers, body = await client.answer()
            assert (status, headers["connection"]) == (408, "close")
            assert headers["x-should-retry"] == "true"
            assert "header" in error_of(body)["message"]
        assert await client.is_closed()
        assert not server.app.scopes


async def test_a_kept_connection_has_the_same_deadline_for_its_next_header() -> None:
    async with serving() as server:
        client = await server.connect()
        for _ in range(2):
            assert (await client.ask(BODY_HEAD % 2 + b"ab"))[0] == 200
        assert (await client.ask(b"GET /half"))[0] == 408
        assert await client.is_closed()


async def test_a_header_that_trickles_in_does_not_move_the_deadline() -> None:
    async with serving() as server:
        client = await server.connect()
        client.writer.write(b"GET / HTTP/1.1\r\n")

        async def trickle() -> None:
            while True:
                client.writer.write(b"x-a: b\r\n")
                await asyncio.sleep(0.05)

        trickling = asyncio.create_task(trickle())
        assert (await client.answer())[0] == 408
        trickling.cancel()


@pytest.mark.parametrize(
    "headers",
    [b"x-long: " + b"x" * 3000 + b"\r\n\r\n", b"x-endless: " + b"x" * 3000, b"a: b\r\n" * 101],
)
async def test_headers_too_long_or_too_many_are_answered_with_431(headers: bytes) -> None:
    async with serving() as server:
        client = await server.connect()
        raw = b"GET / HTTP/1.1\r\nhost: a\r\n" + headers + b"\r\n"
        status, sent, body = await client.ask(raw)
        assert (status, sent["connection"], sent["x-should-retry"]) == (431, "close", "false")
        assert error_of(body)["type"] == "invalid_request_error"
        assert await client.is_closed()
        assert not server.app.scopes


@pytest.mark.parametrize("own", [b"", b"x-request-id: abc\r\n"])
async def test_a_request_id_does_not_count_among_the_headers(own: bytes) -> None:
    async with serving() as server:
        client = await server.connect()
        raw = b"GET /echo HTTP/1.1\r\nhost: a\r\n" + own + b"a: b\r\n" * 99 + b"\r\n"
        assert (await client.ask(raw))[0] == 200
        scope = server.app.scopes[0]
        assert len(scope["headers"]) == 101
        Arrivals(QUICK).check_header(scope)  # as an ingress does
        scope["headers"].append((b"a", b"b"))
        with pytest.raises(ApiError, match="more than 100 headers"):
            Arrivals(QUICK).check_header(scope)


async def test_a_slow_body_is_answered_with_408_and_never_reaches_the_application() -> None:
    async with serving() as server:
        client = await server.connect()
        status, headers, body = await client.ask(BODY_HEAD % 100 + b"{")
        assert (status, error_of(body)["code"]) == (408, "body_timeout")
        assert headers["x-should-retry"] == "true"
        assert await client.is_closed()
        assert not server.app.scopes


async def test_a_body_that_keeps_its_rate_has_the_time_it_needs() -> None:
    async with serving() as server:
        client = await server.connect()
        client.writer.write(BODY_HEAD % (10 * 16384))
        for _ in range(10):
            client.writer.write(b"x" * 16384)
            await asyncio.sleep(0.1)  # twice the deadline of an empty body, in all
        assert (await client.answer())[0] == 200


async def test_the_oldest_unfinished_body_gives_way_to_a_new_request() -> None:
    """Clients that never finish a body cannot lock out others."""
    async with serving(IngressArgs(max_arriving_requests=4)) as server:
        slow = [await server.connect() for _ in range(4)]
        for client in slow:
            client.writer.write(BODY_HEAD % 100 + b"{")
            await asyncio.sleep(0.02)
        honest = await server.connect()
        assert (await honest.ask(BODY_HEAD % 2 + b"ab"))[2] == b"ab"
        status, headers, body = await slow[0].answer()
        assert (status, headers["x-should-retry"], headers["retry-after"]) == (429, "true", "1")
        assert error_of(body)["type"] == "rate_limit_error"


async def test_a_client_that_leaves_while_it_uploads_leaves_no_trace(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving() as server:
        client = await server.connect()
        client.writer.write(BODY_HEAD % 100 + b"{")
        await client.writer.drain()
        client.writer.close()
        other = await server.connect()
        assert (await other.ask(BODY_HEAD % 1 + b"a"))[0] == 200
    assert len(server.app.scopes) == 1
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (b"abc.D_e:f-1", b"abc.D_e:f-1"),
        (b"\xe9", None),
        ("é".encode(), None),
        (b"a b", None),
        (b"x" * 129, None),
        (b"", None),
    ],
)
async def test_a_legal_request_id_reaches_serve_or_one_of_the_front(
    given: bytes, kept: bytes | None
) -> None:
    async with serving() as server:
        client = await server.connect()
        raw = b"GET /echo HTTP/1.1\r\nhost: a\r\nx-request-id: " + given + b"\r\n\r\n"
        assert (await client.ask(raw))[0] == 200
        found = dict(server.app.scopes[0]["headers"])[b"x-request-id"]
        assert found == kept or (kept is None and uuid.UUID(found.decode()).version == 4)


async def test_a_client_gives_serve_no_orders() -> None:
    names = (b"x-request-disconnect-disabled", b"serve-multiplexed-model-id", b"x-session-id")
    async with serving() as server:
        client = await server.connect()
        sent = b"".join(name + b": \xe9\r\n" for name in names)
        await client.ask(b"GET /echo HTTP/1.1\r\nhost: a\r\n" + sent + b"\r\n")
        assert not dict(server.app.scopes[0]["headers"]).keys() & set(names)


async def test_an_error_of_serve_itself_has_the_shape_of_all_others() -> None:
    async with serving() as server:
        client = await server.connect()
        raw = b"GET /serve HTTP/1.1\r\nhost: a\r\nx-request-id: abc\r\n\r\n"
        status, headers, body = await client.ask(raw)
        assert (status, headers["retry-after"], headers["x-request-id"]) == (429, "7", "abc")
        assert headers["x-should-retry"] == "true"
        assert headers["content-type"] == "application/json"
        assert error_of(body)["code"] == "overloaded"


async def test_an_error_at_an_endpoint_of_anthropics_has_its_shape() -> None:
    async with serving() as server:
        client = await server.connect()
        raw = b"GET /v1/messages/serve HTTP/1.1\r\nhost: a\r\nx-request-id: abc\r\n\r\n"
        status, headers, body = await client.ask(raw)
        assert (status, headers["request-id"], headers["x-request-id"]) == (429, "abc", "abc")
        assert json.loads(body)["error"]["type"] == "rate_limit_error"
        assert json.loads(body)["request_id"] == "abc"
        head = b"POST /v1/messages HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % (1 << 40)
        status, headers, body = await client.ask(head)
        assert (status, headers["x-should-retry"]) == (413, "false")
        assert json.loads(body)["type"] == "error"
        assert json.loads(body)["error"]["type"] == "request_too_large"
        assert json.loads(body)["request_id"] == headers["request-id"] == headers["x-request-id"]
        assert uuid.UUID(headers["request-id"])


async def test_a_request_whose_ingress_dies_before_the_answer_may_be_sent_again() -> None:
    async with serving() as server:
        client = await server.connect()
        status, headers, body = await client.ask(b"GET /dies HTTP/1.1\r\nhost: a\r\n\r\n")
        assert (status, headers["x-should-retry"]) == (503, "true")
        assert error_of(body)["code"] == "unavailable"


@pytest.mark.parametrize("way", ["", "?raises"])
@pytest.mark.parametrize("path", ["/v1/completions/cut", "/v1/messages/cut"])
async def test_a_stream_that_is_cut_says_so_and_has_no_end(path: str, way: str) -> None:
    async with serving() as server:
        client = await server.connect()
        raw = b"GET %b%b HTTP/1.1\r\nhost: a\r\nx-request-id: abc\r\n\r\n"
        client.writer.write(raw % (path.encode(), way.encode()))
        chunks = (await client.reader.read()).decode().split("\r\n\r\n", 1)[1].split("\r\n")
    assert chunks[-1] == ""
    assert "0" not in chunks  # the last chunk of a whole body
    first, error, end = "".join(chunks[1::2]).split("\n\n")
    name, data = error.split("\n")
    found = json.loads(data.removeprefix("data: "))
    assert (first, name, end) == ("data: 1", "event: error", "")
    assert "is not complete" in found["error"]["message"]
    if path.startswith("/v1/messages"):
        assert (found["type"], found["request_id"]) == ("error", "abc")
    else:
        assert found["error"]["code"] == "stream_cut"


async def test_a_whole_stream_ends_without_an_error() -> None:
    async with serving() as server, httpx.AsyncClient() as client:
        answer = await client.get(f"http://127.0.0.1:{server.port}/v1/completions/cut?whole")
        assert answer.text == "data: 1\n\ndata: [DONE]\n\n"


async def test_a_stream_that_nobody_reads_ends_at_the_bound(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving(IngressArgs(max_unread_bytes=256 * 1024)) as server:
        client = await server.connect(SO_RCVBUF=16 * 1024)
        client.writer.write(b"GET /endless HTTP/1.1\r\nhost: a\r\n\r\n")
        await client.writer.drain()
        await until(lambda: server.app.num_left == 1)
    assert "client_too_slow" in caplog.text


async def test_a_client_that_stops_reading_for_the_second_time_is_given_up_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bound = 1024**2  # much more than the kernel and the reader buffer
    async with serving(IngressArgs(max_unread_bytes=bound)) as server:
        client = await server.connect(SO_RCVBUF=16 * 1024)
        client.writer.write(b"GET /two-parts HTTP/1.1\r\nhost: a\r\n\r\n")
        await until(lambda: len(server.app.scopes) == 1 and server.num_unread() > bound)
        # Below the bound, but above the low-water mark of the transport.
        while server.num_unread() > bound * 3 // 4:
            await client.reader.read(64 * 1024)
        await asyncio.sleep(1.2)  # the server has checked
        assert server.num_unread() > bound // 4
        server.app.goes_on.set()
        await until(lambda: server.app.num_left == 1)
    assert "client_too_slow" in caplog.text


async def test_a_long_answer_that_is_read_slowly_arrives_whole() -> None:
    args = IngressArgs(max_unread_bytes=64 * 1024, write_timeout_s=3.0)
    async with serving(args) as server:
        client = await server.connect(SO_RCVBUF=16 * 1024)
        client.writer.write(b"GET /echo?3000000 HTTP/1.1\r\nhost: a\r\n\r\n")
        await asyncio.sleep(1.1)  # the server has checked
        assert len((await client.answer())[2]) == 3_000_000


async def test_an_answer_that_nobody_reads_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(IngressArgs(write_timeout_s=0.2)) as server:
        client = await server.connect(SO_RCVBUF=16 * 1024)
        client.writer.write(b"GET /echo?9000000 HTTP/1.1\r\nhost: a\r\n\r\n")
        await until(lambda: "client_too_slow" in caplog.text)

"""Requests that offer to go on in another protocol, at the front that `tests.test_serve_front`
starts: they are answered in HTTP/1.1 with their bodies, and none is left without an answer."""

from __future__ import annotations

import pytest

from serve_app.config import IngressArgs
from tests.test_serve_front import error_of, serving

# As Java's java.net.http.HttpClient sends it to every http:// address.
H2C = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
WEB_SOCKET = b"connection: Upgrade\r\nupgrade: websocket\r\n"
HANDSHAKE = b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"


def request(method: bytes, headers: bytes, body: bytes = b"") -> bytes:
    length = b"content-length: %d\r\n" % len(body) if body else b""
    return method + b" /echo HTTP/1.1\r\nhost: a\r\n" + headers + length + b"\r\n" + body


@pytest.mark.parametrize("offer", [H2C, WEB_SOCKET, WEB_SOCKET + HANDSHAKE])
async def test_a_request_that_offers_another_protocol_keeps_its_body(offer: bytes) -> None:
    async with serving(ws="websockets-sansio") as server:
        client = await server.connect()
        status, _, body = await client.ask(request(b"POST", offer, b"hello"))
        assert (status, body) == (200, b"hello")
        assert b"upgrade" not in dict(server.app.scopes[0]["headers"])
        status, _, body = await client.ask(request(b"POST", b"", b"again"))
        assert (status, body) == (200, b"again")  # the connection is kept


async def test_a_body_that_comes_after_the_offer_is_read() -> None:
    async with serving() as server:
        client = await server.connect()
        sent = request(b"POST", H2C, b"hello")
        client.writer.write(sent[:-5])
        await client.writer.drain()
        status, _, body = await client.ask(sent[-5:])
        assert (status, body) == (200, b"hello")


async def test_a_body_in_chunks_is_read() -> None:
    async with serving() as server:
        client = await server.connect()
        chunks = b"3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n"
        head = request(b"POST", H2C + b"transfer-encoding: chunked\r\n")
        status, _, body = await client.ask(head + chunks)
        assert (status, body) == (200, b"hello")


async def test_many_offers_at_once_are_answered_one_after_the_other() -> None:
    async with serving() as server:
        client = await server.connect()
        client.writer.write(request(b"POST", H2C, b"hello") * 1000)
        for _ in range(1000):
            status, _, body = await client.answer()
            assert (status, body) == (200, b"hello")


@pytest.mark.parametrize(
    "headers",
    [
        WEB_SOCKET + HANDSHAKE + b"x-long: " + b"a" * 9000 + b"\r\n",
        WEB_SOCKET + HANDSHAKE + b"x: a\r\n" * 200,
    ],
)
async def test_a_web_socket_that_its_parser_refuses_is_answered(headers: bytes) -> None:
    async with serving(IngressArgs(), ws="websockets-sansio") as server:
        client = await server.connect()
        status, _, body = await client.ask(request(b"GET", headers))
        assert status == 400
        assert error_of(body)["message"] == "The request for a web socket cannot be read."
        assert await client.is_closed()

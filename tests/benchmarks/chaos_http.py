"""One POST over a raw socket: what came, when, and how it ended. No library between that could
repair or hide an end."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field

HOST = "127.0.0.1"


@dataclass(slots=True)
class Exchange:
    status: int = 0
    body: bytes = b""
    events: list[tuple[float, bytes]] = field(default_factory=list)  # of a stream: when, data
    sent_s: float = 0.0
    done_s: float = 0.0
    is_whole: bool = False  # the last chunk, or so many bytes as were promised, came
    error: str = ""  # of the connection


async def post(
    port: int, path: str, fields: dict[str, object], timeout_s: float, key: str = ""
) -> Exchange:
    """`key`: the API key; "": none."""
    exchange = Exchange(sent_s=time.monotonic())
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(HOST, port, limit=1 << 24)
            try:
                writer.write(_request(path, json.dumps(fields).encode(), key))
                await _read(reader, exchange)
            finally:
                writer.close()
    except (OSError, EOFError, ValueError) as error:  # TimeoutError is an OSError
        exchange.error = repr(error)
    exchange.done_s = time.monotonic()
    return exchange


def _request(path: str, body: bytes, key: str) -> bytes:
    bearer = f"Authorization: Bearer {key}\r\n" if key else ""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n{bearer}"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def _read(reader: asyncio.StreamReader, exchange: Exchange) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
    exchange.status = int(head[0].split(b" ")[1])
    headers = {
        name.strip().lower(): value.strip()
        for name, _, value in (line.partition(b":") for line in head[1:] if line)
    }
    is_stream = headers.get(b"content-type", b"").startswith(b"text/event-stream")
    if b"content-length" in headers:
        exchange.body = await reader.readexactly(int(headers[b"content-length"]))
        exchange.is_whole = True
        return
    assert headers.get(b"transfer-encoding") == b"chunked", headers
    rest = b""
    while (size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16)) > 0:
        data = (await reader.readexactly(size + 2))[:-2]
        exchange.body += data
        if is_stream:
            *events, rest = (rest + data).split(b"\n\n")
            now_s = time.monotonic()
            exchange.events += [(now_s, event) for event in events]
    exchange.is_whole = True

"""HTTP clients of `serve`: raw sockets, several processes, one event loop each.

A client opens its connections, waits for the agreed moment (the monotonic clock is the machine's),
sends all its requests and notes when data came. Nothing is parsed but the marks of events.
"""

from __future__ import annotations

import asyncio
import json
import random
import string
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from tests.benchmarks.children import module

HOST = "127.0.0.1"
START_DELAY_S = 2.0  # for the processes to start and connect
EVENT, LAST, ERROR = b"data: {", b"data: [DONE]", b'"error"'


@dataclass(slots=True)
class Stream:
    """The events of one connection; times by the monotonic clock."""

    sent_s: float = 0.0
    times_s: list[float] = field(default_factory=list)  # of reads that held events
    num_events: int = 0
    is_complete: bool = False
    status: str = ""
    error: str = ""

    def gaps_s(self) -> list[float]:
        return [b - a for a, b in pairwise(self.times_s)]


@dataclass(frozen=True, slots=True)
class Load:
    """A number of equal requests, over models in turn."""

    port: int
    streams: int
    models: tuple[str, ...]
    tokens: int
    prompt_letters: int = 256
    seed: int = 0


class StreamReader(asyncio.Protocol):
    def __init__(self, stream: Stream) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.transport: asyncio.Transport | None = None
        self._stream = stream
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def send(self, request: bytes) -> None:
        assert self.transport is not None
        self._stream.sent_s = time.monotonic()
        self.transport.write(request)

    def close(self) -> None:
        assert self.transport is not None
        self.transport.close()

    def data_received(self, data: bytes) -> None:
        stream = self._stream
        if not stream.status:
            stream.status = data.split(b"\r\n", 1)[0].decode(errors="replace")
        window = self._tail + data
        num = window.count(EVENT) - self._tail.count(EVENT)
        if num:
            stream.num_events += num
            stream.times_s.append(time.monotonic())
        if ERROR in window:
            stream.error = window.decode(errors="replace")[:300]
        stream.is_complete = stream.is_complete or LAST in window
        self._tail = window[-11:]

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


def make_request(model: str, tokens: int, letters: int, draw: random.Random) -> bytes:
    """Returns a request with a prompt of its own: no other request shares its blocks."""
    fields: dict[str, object] = {
        "model": model,
        "prompt": "".join(draw.choices(string.ascii_lowercase, k=letters)),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    body = json.dumps(fields).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def connect(port: int, stream: Stream) -> StreamReader:
    loop = asyncio.get_running_loop()
    _, reader = await loop.create_connection(lambda: StreamReader(stream), HOST, port)
    return reader


async def run_load(load: Load, start_s: float) -> list[Stream]:
    draw = random.Random(load.seed)
    streams = [Stream() for _ in range(load.streams)]
    readers = [await connect(load.port, stream) for stream in streams]
    requests = [
        make_request(load.models[i % len(load.models)], load.tokens, load.prompt_letters, draw)
        for i in range(load.streams)
    ]
    await asyncio.sleep(max(0.0, start_s - time.monotonic()))
    for reader, request in zip(readers, requests, strict=True):
        reader.send(request)
    await asyncio.gather(*(reader.done for reader in readers))
    return streams


def run_in_processes(load: Load, num_processes: int) -> list[Stream]:
    """Runs the load in equal parts, all sent at the same moment."""
    count = min(num_processes, load.streams)
    start_s = time.monotonic() + START_DELAY_S
    children = []
    for part in range(count):
        fields = {
            "port": load.port,
            "streams": len(range(part, load.streams, count)),
            "models": load.models[part % len(load.models) :] + load.models,
            "tokens": load.tokens,
            "prompt_letters": load.prompt_letters,
            "seed": load.seed * 1000 + part,
        }
        command = module("serve_client", json.dumps(fields), str(start_s))
        children.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    streams: list[Stream] = []
    for child in children:
        output, _ = child.communicate(timeout=300)
        if child.returncode != 0:
            raise RuntimeError(f"a client process ended with {child.returncode}")
        streams += [Stream(**fields) for fields in json.loads(output.splitlines()[-1])]
    return streams


def check(streams: Sequence[Stream]) -> None:
    for stream in streams:
        if not stream.is_complete or stream.error or " 200 " not in stream.status:
            raise RuntimeError(f"a stream failed: {stream.status} {stream.error}")


def check_status(streams: Sequence[Stream]) -> None:
    """Raises RuntimeError if a stream that runs was refused, or has failed."""
    for stream in streams:
        if stream.error or (stream.status and " 200 " not in stream.status):
            raise RuntimeError(f"a stream failed: {stream.status} {stream.error}")


def main() -> None:
    fields = json.loads(sys.argv[1])
    load = Load(**(fields | {"models": tuple(fields["models"])}))
    streams = asyncio.run(run_load(load, float(sys.argv[2])))
    names = Stream.__dataclass_fields__
    lines = [{name: getattr(stream, name) for name in names} for stream in streams]
    sys.stdout.write(json.dumps(lines) + "\n")


if __name__ == "__main__":
    main()

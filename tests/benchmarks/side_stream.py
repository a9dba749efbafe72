"""Tokens a second through HTTP with an engine that costs nothing: what the serving path can carry.

64 streams of 100 tokens/s, from the paced engine over the side stream, the ingress's SSE and
Serve's proxy to a client of raw sockets in a process of its own. Every token is one SSE event; the
rate is counted while all streams run, a gap is the time between two reads of one stream.

Serve runs as `loraplex serve` sets it up; `--defaults` measures Serve as it comes.

    python -m tests.benchmarks.side_stream [--streams 64] [--rate 100] [--seconds 20] [--defaults]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from serve_app.cli.launch import SERVE_SETTINGS
from tests.benchmarks.report import emit, emit_machine, spread
from tests.serve_rig import RIG_BASE, Rig, start_rig

FULL_RATE = 0.99  # of the pace: the window's ends cut through a step
WARM_UP_S = 2.0

_PROCESSES = {
    "ray::ProxyActor": "proxy",
    "ray::ServeReplica:api:ingress": "ingress",
    "ray::EngineActor": "engine",
    "ray::ServeReplica:base": "engine_replica",
    "ray::ServeController": "controller",
}


@dataclass(slots=True)
class Stream:
    """What one connection saw."""

    reads: list[tuple[float, int]] = field(default_factory=list)  # when, events until then
    num_events: int = 0
    status: bytes = b""


class Reader(asyncio.Protocol):
    def __init__(self, request: bytes, stream: Stream) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._stream = stream
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        stream = self._stream
        if not stream.status:
            stream.status = data.split(b"\r\n", 1)[0]
        window = self._tail + data
        num = window.count(b"data: {")
        self._tail = window[-6:]
        if num:
            stream.num_events += num
            stream.reads.append((time.monotonic(), stream.num_events))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


async def read_streams(port: int, num_streams: int, num_tokens: int) -> list[Stream]:
    loop = asyncio.get_running_loop()
    body = json.dumps(
        {"model": RIG_BASE, "prompt": "abcdefgh", "max_tokens": num_tokens, "stream": True}
    ).encode()
    request = (
        b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    ) + body
    streams = [Stream() for _ in range(num_streams)]
    readers: list[Reader] = []
    for stream in streams:
        _, reader = await loop.create_connection(
            lambda stream=stream: Reader(request, stream),  # type: ignore[misc]
            "127.0.0.1",
            port,
        )
        readers.append(reader)
    await asyncio.gather(*(reader.done for reader in readers))
    return streams


def run_client(port: int, num_streams: int, num_tokens: int) -> None:
    """In its own process; prints one JSON line."""
    streams = asyncio.run(read_streams(port, num_streams, num_tokens))
    statuses = Counter(stream.status.decode(errors="replace") for stream in streams)
    if any(" 200 " not in status for status in statuses):
        raise SystemExit(f"refused: {dict(statuses)}")
    first = max(stream.reads[0][0] for stream in streams) + WARM_UP_S
    last = min(stream.reads[-1][0] for stream in streams)
    inside = [[read for read in stream.reads if first <= read[0] <= last] for stream in streams]
    num_tokens_read = sum(reads[-1][1] - reads[0][1] for reads in inside)
    span_s = sum(reads[-1][0] - reads[0][0] for reads in inside) / num_streams
    gaps_ms = [
        (after[0] - before[0]) * 1000 for reads in inside for before, after in pairwise(reads)
    ]
    emit(
        tokens_per_s=round(num_tokens_read / span_s, 1),
        window_s=round(last - first, 2),
        gap_ms=spread(gaps_ms, 2),
        # The last event carries finish_reason with the last token.
        complete=sum(stream.num_events == num_tokens for stream in streams),
    )


def cpu_seconds() -> dict[str, float]:
    """Of this session's processes, by their part. Ray names them in their command line."""
    ticks = os.sysconf("SC_CLK_TCK")
    used: dict[str, float] = {}
    for folder in Path("/proc").iterdir():
        try:
            command = (folder / "cmdline").read_bytes().decode(errors="replace")
            part = next((p for name, p in _PROCESSES.items() if command.startswith(name)), None)
            if part is not None:
                fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
                used[part] = used.get(part, 0.0) + (int(fields[11]) + int(fields[12])) / ticks
        except (OSError, IndexError):
            continue  # ended meanwhile, or not a process
    return used


def measure(rig: Rig, num_streams: int, rate: float, seconds: float) -> dict[str, object]:
    num_tokens = int(rate * (seconds + 2 * WARM_UP_S))
    arguments = ["--client", str(rig.port), "--streams", str(num_streams)]
    before, start_s = cpu_seconds(), time.monotonic()
    client = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.benchmarks.side_stream",
            *arguments,
            "--tokens",
            str(num_tokens),
        ],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    wall_s = time.monotonic() - start_s
    cores = {
        part: round((used - before.get(part, 0.0)) / wall_s, 3)
        for part, used in cpu_seconds().items()
    }
    figures: dict[str, object] = json.loads(client.stdout.splitlines()[-1])
    return figures | {"cores_used": cores}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rate", type=float, default=100.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--defaults", action="store_true")
    parser.add_argument("--tokens", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--client", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client is not None:
        run_client(args.client, args.streams, args.tokens)
        return
    if not args.defaults and not os.environ.keys() >= SERVE_SETTINGS.keys():
        # Ray reads them when it is imported, which has happened.
        command = [sys.executable, "-m", "tests.benchmarks.side_stream", *sys.argv[1:]]
        os.execve(sys.executable, command, SERVE_SETTINGS | os.environ)
    emit_machine("side_stream")
    target = args.streams * args.rate
    with start_rig(rate=args.rate) as rig:
        figures = measure(rig, args.streams, args.rate, args.seconds)
    tokens_per_s = figures["tokens_per_s"]
    assert isinstance(tokens_per_s, float)
    is_full = tokens_per_s >= FULL_RATE * target and figures["complete"] == args.streams
    emit(
        settings="defaults" if args.defaults else "launcher",
        target=target,
        streams=args.streams,
        **figures,
        **{"pass": is_full},
    )


if __name__ == "__main__":
    main()

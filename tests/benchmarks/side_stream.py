"""Tokens a second through HTTP with an engine that costs nothing: what the serving path can carry.

64 streams of 100 tokens/s, from the paced engine over the side stream, the ingress's SSE and
Serve's proxy to a client of raw sockets in a process of its own. Every token is one SSE event; the
rate is counted while all streams run, a gap is the time between two reads of one stream.

Serve runs as `loraplex serve` sets it up; `--defaults` measures Serve as it comes. `--keys N`
compares: N rounds without keys and N with a key that has limits, whose use is recorded, beside a
scrape of the metrics every five seconds; the last line has the ratios of both.

    python -m tests.benchmarks.side_stream [--streams 64] [--rate 100] [--seconds 20] [--defaults]
        [--keys N] [--out FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from serve_app.cli.launch import SERVE_SETTINGS
from serve_app.config import ADMIN_TOKEN
from serve_app.tenancy.usage import SEND_INTERVAL_S
from tests.benchmarks.keyed import admin_headers, make_key, recorded
from tests.benchmarks.report import Report, emit, spread
from tests.benchmarks.watch import repeating
from tests.serve_rig import RIG_BASE, RIG_TOKEN, Rig, start_rig

FULL_RATE = 0.99  # of the pace: the window's ends cut through a step
WARM_UP_S = 2.0
SCRAPE_INTERVAL_S = 5.0

_PROCESSES = {
    "ray::ProxyActor": "proxy",
    "ray::ServeReplica:api:ingress": "ingress",
    "ray::EngineActor": "engine",
    "ray::ServeReplica:base": "engine_replica",
    "ray::ServeController": "controller",
}


@dataclass(slots=True)
class Stream:
    """The events of one connection."""

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


async def read_streams(port: int, num_streams: int, num_tokens: int, key: str) -> list[Stream]:
    loop = asyncio.get_running_loop()
    body = json.dumps(
        {"model": RIG_BASE, "prompt": "abcdefgh", "max_tokens": num_tokens, "stream": True}
    ).encode()
    bearer = f"Authorization: Bearer {key}\r\n".encode() if key else b""
    request = (
        b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        b"%bContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (bearer, len(body))
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


def run_client(port: int, num_streams: int, num_tokens: int, key: str) -> None:
    """Runs in its own process; prints one JSON line."""
    streams = asyncio.run(read_streams(port, num_streams, num_tokens, key))
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
    """Returns those of the session's processes by part: Ray names them in the command line."""
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


def measure(
    rig: Rig, num_streams: int, rate: float, seconds: float, key: str = ""
) -> dict[str, object]:
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
            *("--key", key),
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


def measure_with_key(args: argparse.Namespace) -> dict[str, object]:
    """Returns the figures with a key, its limits, its use and a scrape every five seconds."""
    os.environ[ADMIN_TOKEN] = RIG_TOKEN
    with start_rig(rate=args.rate, has_keys=True) as rig:
        limits = {"rpm_limit": 10**6, "tpm_limit": 10**9, "tokens_per_day": 10**12}
        key_id, key = make_key(rig.url, max_parallel_requests=1000, **limits)

        def scrape() -> None:
            httpx.get(f"{rig.url}/metrics", headers=admin_headers(), timeout=30)

        with repeating(scrape, SCRAPE_INTERVAL_S):
            figures = measure(rig, args.streams, args.rate, args.seconds, key)
        time.sleep(2 * SEND_INTERVAL_S)
        return figures | {"recorded": recorded(rig.url, key_id)["requests"]}


def compare(args: argparse.Namespace, report: Report) -> None:
    """Measures in turn without keys and with them; the side that begins changes."""
    found: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    for number in range(args.keys):
        for has_keys in (number % 2 == 1, number % 2 == 0):
            if has_keys:
                figures = measure_with_key(args)
            else:
                with start_rig(rate=args.rate) as rig:
                    figures = measure(rig, args.streams, args.rate, args.seconds)
            found[has_keys].append(figures)
            load = round(os.getloadavg()[0], 2)
            report.emit(round=number, keys=has_keys, streams=args.streams, **figures, load=load)
    ratios = {
        "tokens_per_s": _ratio(found, lambda one: one["tokens_per_s"]),
        "gap_p50": _ratio(found, lambda one: one["gap_ms"]["p50"]),
        "ingress_cores": _ratio(found, lambda one: one["cores_used"]["ingress"]),
    }
    is_full = all(one["complete"] == args.streams for one in (*found[False], *found[True]))
    passed = is_full and ratios["tokens_per_s"] >= 0.98
    report.emit(keys_to_none=ratios, rounds=args.keys, **{"pass": passed})


def _ratio(
    found: dict[bool, list[dict[str, Any]]], value: Callable[[dict[str, Any]], float]
) -> float:
    """Returns the median with keys to that without."""
    medians = {has_keys: statistics.median(map(value, lines)) for has_keys, lines in found.items()}
    return round(medians[True] / medians[False], 4)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--keys", type=int, default=0, help="rounds with keys beside none")
    parser.add_argument("--out", type=Path, help="a file that the lines are added to")
    parser.add_argument("--key", default="", help=argparse.SUPPRESS)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rate", type=float, default=100.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--defaults", action="store_true")
    parser.add_argument("--tokens", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--client", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client is not None:
        run_client(args.client, args.streams, args.tokens, args.key)
        return
    if not args.defaults and not os.environ.keys() >= SERVE_SETTINGS.keys():
        # Ray reads them when it is imported, which has happened.
        command = [sys.executable, "-m", "tests.benchmarks.side_stream", *sys.argv[1:]]
        os.execve(sys.executable, command, SERVE_SETTINGS | os.environ)
    report = Report(args.out)
    report.emit_machine("side_stream")
    if args.keys:
        compare(args, report)
        return
    target = args.streams * args.rate
    with start_rig(rate=args.rate) as rig:
        figures = measure(rig, args.streams, args.rate, args.seconds)
    tokens_per_s = figures["tokens_per_s"]
    assert isinstance(tokens_per_s, float)
    is_full = tokens_per_s >= FULL_RATE * target and figures["complete"] == args.streams
    report.emit(
        settings="defaults" if args.defaults else "launcher",
        target=target,
        streams=args.streams,
        **figures,
        **{"pass": is_full},
    )


if __name__ == "__main__":
    main()

"""Limits of keys over two ingresses: ten times the limit is offered over HTTP, as JSON lines.

A key of 600 requests per minute and a key of 12,000 tokens per minute, each for a minute, each
again with the manager killed in the middle of it. Real Serve and its proxy, the paced engine. The
window of a minute begins WARM_UP_S after the first request, when the burst of an idle key is spent.
A machine that is slower than the offered rate is offered less, as `offered_per_s` reports.
An admission counts at the time when its request was sent; its tokens are those that its answer
reports.

    python -m tests.benchmarks.limits_http [--seconds 60] [--out FILE] [--cases requests tokens]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from serve_app.config import ADMIN_TOKEN, TenancyArgs
from tests.benchmarks.keyed import make_key
from tests.benchmarks.report import Report
from tests.serve_rig import (
    RIG_BASE,
    RIG_TOKEN,
    Rig,
    deploy,
    processes,
    rig_args,
    running_serve,
    wait_ready,
)

NUM_INGRESSES = 2
PACE = 1000.0  # tokens per second of a stream
WARM_UP_S = 3.0
TAIL_S = 2.0
REQUESTS_PER_MINUTE = 600
TOKENS_PER_MINUTE = 12_000
FACTOR = 10  # offered, of the limit
CONNECTIONS = 32
MAX_PROMPT, MAX_OUTPUT = 48, 32  # tokens, drawn evenly from 1 on
CASES = ("requests", "tokens")


@dataclass(slots=True)
class Outcome:
    """The answers to all requests of a case."""

    statuses: Counter[int] = field(default_factory=Counter)
    admitted: list[tuple[float, int]] = field(default_factory=list)  # when sent, tokens
    refused_s: list[float] = field(default_factory=list)  # durations
    num_broken: int = 0  # connections


class Connection:
    """Keeps one connection to the server open between requests."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, headers: str, body: dict[str, object]) -> tuple[int, bytes]:
        """Returns the status and the body. Raises OSError and EOFError."""
        try:
            if self._streams is None:
                self._streams = await asyncio.open_connection("127.0.0.1", self._port)
            reader, writer = self._streams
            data = json.dumps(body).encode()
            writer.write(f"{headers}content-length: {len(data)}\r\n\r\n".encode() + data)
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
            content = await reader.readexactly(length)
        except (OSError, EOFError):
            self.close()
            raise
        if b"connection: close" in head:
            self.close()
        return int(head.split(b" ", 2)[1]), content

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


async def offer(
    port: int, key: str, case: str, per_s: float, seconds: float, kill_s: float | None
) -> tuple[Outcome, float]:
    """Sends `per_s` requests, or fewer if all connections are waiting for answers. Returns the
    outcome, and when the first request was sent."""
    outcome, draw = Outcome(), random.Random(7)
    headers = (
        "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
        f"authorization: Bearer {key}\r\ncontent-type: application/json\r\n"
    )
    begun_s = due_s = time.monotonic()

    async def send() -> None:
        nonlocal due_s
        connection = Connection(port)
        while True:
            # A connection that was late does not make up for it: a burst is no rate.
            due_s = max(due_s + 1 / per_s, time.monotonic())
            if due_s > begun_s + seconds:
                break
            await asyncio.sleep(due_s - time.monotonic())
            body: dict[str, object] = {"model": RIG_BASE, "prompt": [1, 2], "max_tokens": 2}
            if case == "tokens":
                body["prompt"] = [1] * draw.randint(1, MAX_PROMPT)
                body["max_tokens"] = draw.randint(1, MAX_OUTPUT)
            sent_s = time.monotonic()
            try:
                status, content = await connection.post(headers, body)
            except (OSError, EOFError):
                outcome.num_broken += 1
                continue
            outcome.statuses[status] += 1
            if status == 200:
                outcome.admitted.append((sent_s, json.loads(content)["usage"]["total_tokens"]))
            else:
                outcome.refused_s.append(time.monotonic() - sent_s)
        connection.close()

    async def kill() -> None:
        if kill_s is not None:
            await asyncio.sleep(kill_s)
            (manager,) = processes("ServeReplica:api:manager")
            os.kill(manager, signal.SIGKILL)

    await asyncio.gather(kill(), *(send() for _ in range(CONNECTIONS)))
    return outcome, begun_s


def measure(rig: Rig, case: str, *, kills: bool, seconds: float) -> dict[str, object]:
    if case == "requests":
        limit, per_s = REQUESTS_PER_MINUTE, FACTOR * REQUESTS_PER_MINUTE / 60
        fields = {"rpm_limit": limit}
    else:
        mean_tokens = (MAX_PROMPT + 1) / 2 + (MAX_OUTPUT + 1) / 2
        limit, per_s = TOKENS_PER_MINUTE, FACTOR * TOKENS_PER_MINUTE / 60 / mean_tokens
        fields = {"tpm_limit": limit}
    key = make_key(rig.url, **fields)[1]
    kill_s = WARM_UP_S + seconds / 2 if kills else None
    outcome, begun_s = asyncio.run(
        offer(rig.port, key, case, per_s, WARM_UP_S + seconds + TAIL_S, kill_s)
    )
    from_s = begun_s + WARM_UP_S
    inside = [tokens for sent_s, tokens in outcome.admitted if from_s <= sent_s < from_s + seconds]
    admitted = len(inside) if case == "requests" else sum(inside)
    expected = limit * seconds / 60
    refused = sorted(outcome.refused_s)
    return {
        "case": case,
        "manager_killed": kills,
        "limit_per_minute": limit,
        "offered_per_s": round(sum(outcome.statuses.values()) / (WARM_UP_S + seconds + TAIL_S), 1),
        "seconds": seconds,
        "admitted": admitted,
        "error_percent": round(100 * (admitted / expected - 1), 2),
        "statuses": dict(outcome.statuses),
        "broken": outcome.num_broken,
        "refused_p50_ms": round(1000 * refused[len(refused) // 2], 1) if refused else None,
        "load_average": round(os.getloadavg()[0], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--out", type=Path, help="a file that the lines are added to")
    options = parser.parse_args()
    report = Report(options.out)
    report.emit_machine("limits_http", ingresses=NUM_INGRESSES)
    os.environ[ADMIN_TOKEN] = RIG_TOKEN
    with running_serve() as port, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tenancy = TenancyArgs(enabled=True, database_url=f"sqlite:///{folder / 'keys.db'}")
        args = rig_args(PACE, RIG_BASE, ingresses=NUM_INGRESSES)
        rig = deploy(port, args.model_copy(update={"tenancy": tenancy}), folder / "registry")
        wait_ready(rig)
        for case in options.cases:
            for kills in (False, True):
                report.emit(**measure(rig, case, kills=kills, seconds=options.seconds))


if __name__ == "__main__":
    main()

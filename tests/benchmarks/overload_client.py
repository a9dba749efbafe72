"""Clients of `overload`: requests that come whether or not the server keeps up, from processes of
their own, on raw sockets.

A flow is a tenant that asks for a model at a rate (open loop, exponential gaps) or, without a rate,
with a number of workers (closed loop: the next request when the last one ended). What becomes of
every request is kept. Nothing is parsed but the head and the marks of events.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace

from serve_app.config import ADMIN_TOKEN
from tests.benchmarks.children import module
from tests.benchmarks.keyed import key_of
from tests.benchmarks.serve_client import ERROR, EVENT, HOST, LAST, START_DELAY_S, make_request

_BACK_OFF_S = 0.2  # of a closed loop that was refused
_LATE_S = 90.0  # after the end, for the last answers


@dataclass(frozen=True, slots=True)
class Flow:
    tenant: str
    model: str
    rate: float = 0.0  # requests a second; 0: closed loop
    workers: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    port: int
    seconds: float
    tokens: int  # of every answer
    letters: int  # of every prompt
    flows: tuple[Flow, ...]
    seed: int = 0
    delay_s: float = 0.0  # after the others


@dataclass(slots=True)
class Outcome:
    """Times by the machine's monotonic clock; 0: it never came to that."""

    tenant: str
    model: str
    sent_s: float
    status: int = 0
    head_s: float = 0.0
    first_s: float = 0.0  # event
    done_s: float = 0.0
    is_whole: bool = False
    retry_after: str = ""
    replica: str = ""
    timing: dict[str, float] = field(default_factory=dict)  # seconds; what the server tells

    @property
    def is_served(self) -> bool:
        return self.status == 200 and self.is_whole

    @property
    def is_shed(self) -> bool:
        return self.status in (429, 503)

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.sent_s


class _Reader(asyncio.Protocol):
    def __init__(self, outcome: Outcome) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._outcome = outcome
        self._head = b""
        self._tail = b""
        self._has_failed = False

    def data_received(self, data: bytes) -> None:
        outcome = self._outcome
        if not outcome.head_s:
            self._head += data
            head, mark, data = self._head.partition(b"\r\n\r\n")
            if not mark:
                return
            outcome.head_s = time.monotonic()
            read_head(head.decode("latin-1"), outcome)
        window = self._tail + data
        if not outcome.first_s and EVENT in window and outcome.status == 200:
            outcome.first_s = time.monotonic()
        self._has_failed = self._has_failed or ERROR in window
        outcome.is_whole = (outcome.is_whole or LAST in window) and not self._has_failed
        self._tail = window[-len(LAST) :]

    def connection_lost(self, exc: Exception | None) -> None:
        self._outcome.done_s = time.monotonic()
        if not self.done.done():
            self.done.set_result(None)


def read_head(head: str, outcome: Outcome) -> None:
    status, *lines = head.split("\r\n")
    outcome.status = int(status.split(" ")[1])
    headers = {name.lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)}
    outcome.retry_after = headers.get("retry-after", "")
    outcome.replica = headers.get("x-loraplex-replica", "")
    for part in filter(None, headers.get("server-timing", "").split(", ")):
        name, _, milliseconds = part.partition(";dur=")
        outcome.timing[name] = float(milliseconds) / 1000


async def ask(load: Load, flow: Flow, draw: random.Random) -> Outcome:
    request = make_request(flow.model, load.tokens, load.letters, draw)
    line, rest = request.split(b"\r\n", 1)
    # Without the admin token, or a key that may read the administration, no reasons come.
    token = key_of(flow.tenant) or os.environ.get(ADMIN_TOKEN, "")
    extra = (
        f"x-tenant-id: {flow.tenant}\r\nx-loraplex-explain: 1\r\nauthorization: Bearer {token}\r\n"
    ).encode()
    outcome = Outcome(flow.tenant, flow.model, time.monotonic())
    try:
        transport, reader = await asyncio.get_running_loop().create_connection(
            lambda: _Reader(outcome), HOST, load.port
        )
    except OSError:
        outcome.done_s = time.monotonic()
        return outcome
    transport.write(line + b"\r\n" + extra + rest)
    try:
        await reader.done
    finally:
        transport.close()
    return outcome


async def run_load(load: Load, start_s: float) -> list[Outcome]:
    outcomes: list[Outcome] = []
    tasks: set[asyncio.Task[Outcome]] = set()
    start_s += load.delay_s
    end_s = start_s + load.seconds
    loop = asyncio.get_running_loop()
    draws = [random.Random(f"{load.seed} {i}") for i in range(len(load.flows))]

    async def one(flow: Flow, draw: random.Random) -> Outcome:
        outcome = await ask(load, flow, draw)
        outcomes.append(outcome)
        return outcome

    async def open_loop(flow: Flow, draw: random.Random) -> None:
        due_s = start_s + draw.expovariate(flow.rate)
        while due_s < end_s:
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            task = loop.create_task(one(flow, draw))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            due_s += draw.expovariate(flow.rate)

    async def closed_loop(flow: Flow, draw: random.Random) -> None:
        await asyncio.sleep(max(0.0, start_s - time.monotonic()))
        while time.monotonic() < end_s:
            outcome = await one(flow, draw)
            if not outcome.is_served:
                await asyncio.sleep(_BACK_OFF_S)

    sources = []
    for flow, draw in zip(load.flows, draws, strict=True):
        if flow.rate:
            sources.append(open_loop(flow, draw))
        sources += [closed_loop(flow, draw) for _ in range(flow.workers)]
    await asyncio.gather(*sources)
    if tasks:
        _, late = await asyncio.wait(tasks, timeout=_LATE_S)
        for task in late:
            task.cancel()
    return outcomes


class Clients:
    """Processes that send a load from one moment on."""

    def __init__(self, loads: Sequence[Load]) -> None:
        self.start_s = time.monotonic() + START_DELAY_S
        self.children = [
            subprocess.Popen(
                module("overload_client", json.dumps(asdict(load)), str(self.start_s)),
                stdout=subprocess.PIPE,
                text=True,
            )
            for load in loads
        ]

    def outcomes(self) -> list[Outcome]:
        """Waits for all; by the time of sending."""
        found: list[Outcome] = []
        for child in self.children:
            output, _ = child.communicate(timeout=900)
            if child.returncode != 0:
                raise RuntimeError(f"a client process ended with {child.returncode}")
            found += [Outcome(**fields) for fields in json.loads(output.splitlines()[-1])]
        return sorted(found, key=lambda outcome: outcome.sent_s)


def split(load: Load, count: int) -> list[Load]:
    """Splits the load into equal parts, for as many processes."""

    def part(flow: Flow, number: int) -> Flow:
        workers = len(range(number, flow.workers, count))
        return Flow(flow.tenant, flow.model, flow.rate / count, workers)

    return [
        replace(
            load,
            flows=tuple(part(flow, number) for flow in load.flows),
            seed=load.seed * 100 + number,
        )
        for number in range(count)
    ]


def send(loads: Iterable[Load]) -> list[Outcome]:
    return Clients(list(loads)).outcomes()


def main() -> None:
    fields = json.loads(sys.argv[1])
    flows = tuple(Flow(**flow) for flow in fields.pop("flows"))
    outcomes = asyncio.run(run_load(Load(**fields, flows=flows), float(sys.argv[2])))
    sys.stdout.write(json.dumps([asdict(outcome) for outcome in outcomes]) + "\n")


if __name__ == "__main__":
    main()

"""The faults of `chaos`: processes or nodes are killed or stopped at even times."""

from __future__ import annotations

import argparse
import os
import random
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil

from tests.benchmarks.keyed import admin_headers
from tests.benchmarks.report import Report
from tests.benchmarks.serve_home import write_serve_file
from tests.demo_server import serving
from tests.postgres import Postgres
from tests.serve_rig import processes

ENGINE, INGRESS, CONTROLLER = "ray::EngineActor", "ray::ServeReplica:api:ingress", "ServeController"
MANAGER = "ray::ServeReplica:api:manager"
FOLLOWER = "engine.parallel.follower"
PROCESSES = {
    "engine": ENGINE,
    "ingress": INGRESS,
    "controller": CONTROLLER,
    "manager": MANAGER,
    "database": MANAGER,  # with PostgreSQL, at once
    "sigstop": ENGINE,
    "rank": FOLLOWER,  # and, in turns, the first rank
}
STOPPED_S = 60.0
DATABASE_AWAY_S = 5.0
REPLACED_LIMIT_S = 600.0  # an engine's start needs minutes beside other work


def num_engines(url: str) -> int:
    """Returns the number of engines that answer an ingress."""
    try:
        text = httpx.get(f"{url}/metrics", headers=admin_headers(), timeout=30).text
    except httpx.HTTPError:
        return 0
    return sum(line.startswith("vllm:num_requests_running{") for line in text.splitlines())


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def wait(condition: Callable[[], bool]) -> float:
    began_s = time.monotonic()
    while not condition():
        if time.monotonic() - began_s > REPLACED_LIMIT_S:
            raise TimeoutError("what was killed was not replaced")
        time.sleep(0.1)
    return time.monotonic() - began_s


class Faults(ABC):
    """One after another, at even times; how long until what was lost was replaced."""

    def __init__(self, url: str, args: argparse.Namespace, report: Report) -> None:
        self.replaced_s: list[float] = []
        self._url, self._args, self._report = url, args, report
        self._draw = random.Random(args.seed)

    def run(self) -> None:
        period_s = 60.0 * self._args.minutes / self._args.kills
        began_s = time.monotonic()
        for number in range(self._args.kills):
            due_s = began_s + period_s * (number + self._draw.uniform(0.1, 0.4))
            time.sleep(max(0.0, due_s - time.monotonic()))
            struck_s = time.monotonic()
            what = self._strike()
            self.replaced_s.append(time.monotonic() - struck_s)
            took_s = round(self.replaced_s[-1], 2)
            target = self._args.target
            self._report.emit(kill=number, target=target, at_s=struck_s, replaced_s=took_s, **what)
        time.sleep(max(0.0, began_s + 60.0 * self._args.minutes - time.monotonic()))

    @abstractmethod
    def _strike(self) -> dict[str, object]:
        """Returns when all is there again; what there is to tell of it."""


class ProcessFaults(Faults):
    """`process_id`: of the server, above all of its processes. `database`: killed by the target
    of this name."""

    def __init__(
        self,
        process_id: int,
        url: str,
        args: argparse.Namespace,
        report: Report,
        database: Postgres | None,
    ) -> None:
        super().__init__(url, args, report)
        self._process_id = process_id
        self._database = database

    def _strike(self) -> dict[str, object]:
        target, name = self._args.target, PROCESSES[self._args.target]
        if target == "rank" and len(self.replaced_s) % 2:
            name = ENGINE
        victims = processes(name, self._process_id)
        victim = self._draw.choice(victims)
        if self._database is not None:
            self._database.kill()
        os.kill(victim, signal.SIGSTOP if target == "sigstop" else signal.SIGKILL)
        if target == "sigstop":
            self._wait_while_stopped(victim)
        if self._database is not None:
            time.sleep(DATABASE_AWAY_S)
            self._database.start()
        wait(lambda: self._is_replaced(name, victim, len(victims)))
        return {"process": name}

    def _wait_while_stopped(self, victim: int) -> None:
        """Serve's health check may end it before."""
        until_s = time.monotonic() + STOPPED_S
        while time.monotonic() < until_s and psutil.pid_exists(victim):
            time.sleep(0.1)
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGCONT)

    def _is_replaced(self, name: str, victim: int, count: int) -> bool:
        now = processes(name, self._process_id)
        if len(now) < count or (victim in now and self._args.target != "sigstop"):
            return False
        if name in (ENGINE, FOLLOWER):
            return num_engines(self._url) >= self._args.replicas
        return is_ready(self._url)


@contextmanager
def process_platform(
    args: argparse.Namespace,
    arguments: Mapping[str, object],
    home: Path,
    port: int,
    report: Report,
    database: Postgres | None = None,
) -> Iterator[Faults]:
    """`loraplex serve`; `arguments`: of its application; `database`: of its keys, to be killed."""
    url = f"http://127.0.0.1:{port}"
    front = "--haproxy" if args.haproxy else "--no-haproxy"
    with serving(home, write_serve_file(home, port, arguments), url, front) as server:
        yield ProcessFaults(server.process.pid, url, args, report, database)

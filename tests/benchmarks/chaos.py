"""Processes of a running server are killed, or stopped, while judges read every token of a mixed
load: streams, whole answers, several choices, stop strings, seeds, penalties, log-probabilities,
five adapters and their base.

    python -m tests.benchmarks.chaos --out FILE [--kills 10 --minutes 5]
        [--target engine | ingress | controller | sigstop] [--base demo | tiny] [--replicas 3]

Every answer is compared, token by token, with the one that the same request had before the first
kill. `engine`: nothing but `ok`, for prompt and tokens so far go to another replica. `ingress`:
answers that the killed one was writing are cut or fail, and say so. `controller`: nothing but `ok`.
`sigstop`: an engine's process stands still until Serve replaces it, or for a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil

from registry.cache import Cache
from serve_app.commands.store import open_registry
from serve_app.demo.prepare import ADAPTER_NAMES, ADAPTERS_DIR, BASE_NAME
from serve_app.register import register_adapter
from tests.benchmarks import flips
from tests.benchmarks.children import module
from tests.benchmarks.report import Report, percentile, print_table
from tests.benchmarks.serve_base import BASE as TINY
from tests.benchmarks.serve_home import write_serve_file
from tests.demo_server import DemoServer, run_cli, serving
from tests.serve_rig import free_port

ENGINE, INGRESS, CONTROLLER = "ray::EngineActor", "ray::ServeReplica:api:ingress", "ServeController"
TARGETS = {"engine": ENGINE, "ingress": INGRESS, "controller": CONTROLLER, "sigstop": ENGINE}
NUM_ADAPTERS = 5
STOPPED_S = 60.0
REPLACED_LIMIT_S = 120.0
COUNTERS = ("loraplex_requests_migrated", "loraplex_requests_lost", "loraplex_requests_quarantined")


def prepare_demo(home: Path) -> list[str]:
    """The demo's three adapters and two louder copies."""
    os.environ["LORAPLEX_HOME"] = str(home)
    run_cli(home, "demo")
    registry, cache, names = open_registry(None), Cache(home / "cache"), list(ADAPTER_NAMES)
    for name in ADAPTER_NAMES[: NUM_ADAPTERS - len(ADAPTER_NAMES)]:
        folder = home / "made" / f"loud-{name}"
        shutil.copytree(ADAPTERS_DIR / name, folder)
        config = json.loads((folder / "adapter_config.json").read_text())
        config["lora_alpha"] *= 1.5
        (folder / "adapter_config.json").write_text(json.dumps(config))
        register_adapter(registry, folder, folder.name, BASE_NAME, cache=cache, probe="never")
        names.append(folder.name)
    return [BASE_NAME, *(f"{BASE_NAME}:{name}" for name in names)]


def prepare_tiny(home: Path) -> list[str]:
    names = flips.prepare(home, None, NUM_ADAPTERS)
    return [TINY, *(f"{TINY}:{name}" for name in names)]


def write_config(home: Path, port: int, args: argparse.Namespace) -> Path:
    engine = {
        "device": "cpu",
        "dtype": "float32",
        "num_threads": 1,
        "max_model_len": 512,
        "kv_cache_bytes": "64MiB",
        "adapter_pool_bytes": "64MiB",
    }
    model = {
        "name": BASE_NAME if args.base == "demo" else TINY,
        "replicas": args.replicas,
        "engine": engine,
    }
    arguments = {"ingress": {"replicas": args.ingresses}, "models": [model]}
    return write_serve_file(home, port, arguments)


def pids(server: DemoServer, name: str) -> list[int]:
    found = []
    for child in psutil.Process(server.process.pid).children(recursive=True):
        with suppress(psutil.Error):  # it ended this moment
            if name in " ".join(child.cmdline()) and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child.pid)
    return found


def num_engines(server: DemoServer) -> int:
    """That answer an ingress."""
    try:
        text = httpx.get(f"{server.url}/metrics", timeout=5).text
    except httpx.HTTPError:
        return 0
    return sum(line.startswith("vllm:num_requests_running{") for line in text.splitlines())


def is_ready(server: DemoServer) -> bool:
    try:
        return httpx.get(f"{server.url}/ready", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def wait(condition: Callable[[], bool]) -> float:
    began_s = time.monotonic()
    while not condition():
        if time.monotonic() - began_s > REPLACED_LIMIT_S:
            raise TimeoutError("what was killed was not replaced")
        time.sleep(0.1)
    return time.monotonic() - began_s


class Judges:
    """The clients' process."""

    def __init__(self, port: int, wish: dict[str, object]) -> None:
        command = [*module("chaos_client"), str(port), json.dumps(wish)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def read(self) -> dict[str, object]:
        assert self._process.stdout is not None
        text = self._process.stdout.readline()
        if not text:
            raise RuntimeError(f"the clients ended with {self._process.wait()}")
        line: dict[str, object] = json.loads(text)
        return line

    def finish(self) -> dict[str, object]:
        assert self._process.stdin is not None
        self._process.stdin.write("enough\n")
        self._process.stdin.flush()
        line = self.read()
        self._process.wait()
        return line

    def kill(self) -> None:
        self._process.kill()


class Faults:
    """One process after another, at even times; how long until it was replaced."""

    def __init__(self, server: DemoServer, args: argparse.Namespace, report: Report) -> None:
        self.replaced_s: list[float] = []
        self._server, self._args, self._report = server, args, report
        self._draw = random.Random(args.seed)

    def run(self) -> None:
        period_s = 60.0 * self._args.minutes / self._args.kills
        began_s = time.monotonic()
        for number in range(self._args.kills):
            due_s = began_s + period_s * (number + self._draw.uniform(0.1, 0.4))
            time.sleep(max(0.0, due_s - time.monotonic()))
            self._strike(number)
        time.sleep(max(0.0, began_s + 60.0 * self._args.minutes - time.monotonic()))

    def _strike(self, number: int) -> None:
        target = self._args.target
        victims = pids(self._server, TARGETS[target])
        victim = self._draw.choice(victims)
        os.kill(victim, signal.SIGSTOP if target == "sigstop" else signal.SIGKILL)
        began_s = time.monotonic()
        if target == "sigstop":
            self._wait_while_stopped(victim)
        wait(lambda: self._is_replaced(victim, len(victims)))
        self.replaced_s.append(time.monotonic() - began_s)
        self._report.emit(
            kill=number, target=target, at_s=began_s, replaced_s=round(self.replaced_s[-1], 2)
        )

    def _wait_while_stopped(self, victim: int) -> None:
        """Serve's health check may end it before."""
        until_s = time.monotonic() + STOPPED_S
        while time.monotonic() < until_s and psutil.pid_exists(victim):
            time.sleep(0.1)
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGCONT)

    def _is_replaced(self, victim: int, count: int) -> bool:
        now = pids(self._server, TARGETS[self._args.target])
        if len(now) < count or (victim in now and self._args.target != "sigstop"):
            return False
        if TARGETS[self._args.target] == ENGINE:
            return num_engines(self._server) >= count
        return is_ready(self._server)


@contextmanager
def platform(args: argparse.Namespace) -> Iterator[tuple[DemoServer, int, Sequence[str]]]:
    with tempfile.TemporaryDirectory(prefix="lpx-chaos-") as folder:
        home, port = Path(folder), free_port()
        models = prepare_demo(home) if args.base == "demo" else prepare_tiny(home)
        config = write_config(home, port, args)
        with serving(home, config, f"http://127.0.0.1:{port}") as server:
            wait(lambda: num_engines(server) == args.replicas)
            yield server, port, models


def counters(server: DemoServer) -> dict[str, float]:
    """Of the ingress that answers; with several of them, a part."""
    text = httpx.get(f"{server.url}/metrics", timeout=30).text
    return {
        line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith(COUNTERS) and "_total{" in line
    }


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="file that gets every line, too")
    parser.add_argument("--target", choices=tuple(TARGETS), default="engine")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--base", choices=("demo", "tiny"), default="demo")
    parser.add_argument("--replicas", type=int, default=3, help="engines")
    parser.add_argument("--ingresses", type=int, help="1, or 2 where ingresses are killed")
    parser.add_argument("--clients", type=int, default=6, help="requests at a time")
    parser.add_argument("--tokens", type=int, default=48, help="the longest answer")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.ingresses is None:
        args.ingresses = 2 if args.target in ("ingress", "controller") else 1
    return args


def main() -> None:
    args = parse_args()
    report = Report(args.out)
    report.emit_machine("chaos", arguments=sys.argv[1:])
    with platform(args) as (server, port, models):
        wish = {
            "models": list(models),
            "tokens": args.tokens,
            "clients": args.clients,
            "can_chat": args.base == "demo",
        }
        judges = Judges(port, wish)
        try:
            report.emit(**judges.read())
            faults = Faults(server, args, report)
            faults.run()
            result = judges.finish()
        finally:
            judges.kill()
        line = {
            "target": args.target,
            "kills": args.kills,
            "replicas": args.replicas,
            "ingresses": args.ingresses,
            "replaced_s": [round(one, 2) for one in faults.replaced_s],
            "replaced_p50_s": round(percentile(faults.replaced_s, 50), 2),
            "load_average": os.getloadavg()[0],
            "counters": counters(server),
            **result,
        }
        report.emit(**line)
    names = ("submitted", "ok", "failed", "cut", "truncated", "lost", "doubled", "different")
    print_table(("target", "kills", *names), [(args.target, args.kills, *(line[n] for n in names))])


if __name__ == "__main__":
    main()

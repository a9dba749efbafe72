"""`loraplex demo` and `loraplex serve` as a user runs them, with a home and a port of their own."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from serve_app.cli.demo.prepare import ADAPTER_NAMES, BASE_NAME
from serve_app.network import is_loopback
from tests.ports import free_port

ROOT = Path(__file__).parent.parent
LORAPLEX = Path(sys.executable).parent / "loraplex"
BASE = BASE_NAME
ADAPTERS = ADAPTER_NAMES
DATABASE = "mlflow.db"  # of the default registry
READY_S = 600.0  # beside other work


@dataclass(frozen=True, slots=True)
class DemoServer:
    url: str
    home: Path
    process: subprocess.Popen[bytes]

    def metric(self, name: str) -> float:
        """The sum of a family's samples over all its labels. Asks again while it has none: an
        engine that does not answer within two seconds is left out."""
        deadline = time.monotonic() + 180
        while True:
            text = httpx.get(f"{self.url}/metrics").text
            values = [
                float(line.rsplit(" ", 1)[1])
                for line in text.splitlines()
                if line.split("{")[0].split(" ")[0] == name
            ]
            if values:
                return sum(values)
            assert time.monotonic() < deadline, f"no metric {name}"
            time.sleep(0.2)


def open_ports(server: DemoServer) -> list[str]:
    """Addresses at which processes of this server listen for other machines, with their names."""
    below = {}
    for one in psutil.Process(server.process.pid).children(True):
        with suppress(psutil.Error):  # it ended this moment
            below[one.pid] = one.name()
    return [
        f"{below[one.pid]} at {one.laddr.ip}:{one.laddr.port}"
        for one in psutil.net_connections("tcp")
        if one.status == psutil.CONN_LISTEN
        and one.pid in below
        and not is_loopback(one.laddr.ip.removeprefix("::ffff:"))
    ]


def environment(home: Path) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "MLFLOW_"))}
    return clean | {"LORAPLEX_HOME": str(home)}


def run_cli(home: Path, *arguments: str, timeout_s: float = 900.0) -> str:
    done = subprocess.run(
        [str(LORAPLEX), *arguments],
        env=environment(home),
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, f"{arguments}: {done.stdout}\n{done.stderr}"
    return done.stdout


def write_config(source: Path, target: Path, **engine: object) -> str:
    """A copy of a shipped config on a free port, some engine settings changed; its URL."""
    content = yaml.safe_load(source.read_text())
    port = free_port()
    content["http_options"]["port"] = port
    args = content["applications"][0]["args"]
    args["fairness"] = {"max_queue_s": 600}  # a slow machine is no overload
    for model in args["models"]:
        model["engine"] = model["engine"] | engine
    target.write_text(yaml.safe_dump(content))
    return f"http://127.0.0.1:{port}"


def home_beside(home: Path, folder: Path) -> Path:
    """The same files and a copy of the registry; a home has one server, and the shared one is
    running, perhaps for the tests of another process."""
    other = folder / "home"
    other.mkdir()
    for path in home.iterdir():
        if path.name not in ("logs", "serve.lock", DATABASE):
            (other / path.name).symlink_to(path)
    with (
        closing(sqlite3.connect(home / DATABASE)) as source,
        closing(sqlite3.connect(other / DATABASE)) as target,
    ):
        source.backup(target)
    return other


@contextmanager
def serving(home: Path, config: Path, url: str, *options: str) -> Iterator[DemoServer]:
    """Ends it as Ctrl-C does, and sees that it went away."""
    process = subprocess.Popen(
        [str(LORAPLEX), "serve", str(config), *options],
        cwd=ROOT,
        env=environment(home),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        _wait_ready(process, url)
        yield DemoServer(url, home, process)
    finally:
        _end(process)


def check_end(server: DemoServer) -> None:
    """Ends it as Ctrl-C does, and sees that all of its processes went away."""
    tree = psutil.Process(server.process.pid).children(recursive=True)
    assert len(tree) > 5
    _end(server.process)
    assert server.process.returncode == 0
    _, alive = psutil.wait_procs(tree, timeout=300)
    assert not alive
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{server.url}/live", timeout=2)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGINT)
    try:
        process.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        process.kill()
        raise


def _wait_ready(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + READY_S
    while True:
        if process.poll() is not None:
            output = process.communicate()[0].decode(errors="replace")
            raise AssertionError(f"loraplex serve ended with {process.returncode}:\n{output}")
        try:
            if httpx.get(f"{url}/ready", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        assert time.monotonic() < deadline, "not ready"
        time.sleep(0.2)

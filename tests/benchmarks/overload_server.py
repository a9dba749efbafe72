"""The server of `overload`: its home, its configuration, and the memory of its processes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from serve_app.cli import launch
from serve_app.cli.demo.prepare import ADAPTER_NAMES, BASE_NAME
from serve_app.cli.demo.prepare import prepare as prepare_demo
from tests.benchmarks.keyed import TENANCY
from tests.benchmarks.serve_base import BASE, prepare_home
from tests.benchmarks.serve_home import write_serve_file
from tests.benchmarks.serve_sides import serving
from tests.benchmarks.shapes import SHAPES
from tests.benchmarks.watch import repeating

ROOT = Path(__file__).parents[2]
_SAMPLE_S = 0.5
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")
# Ray names its processes in their command lines.
_PARTS = {
    "ray::ServeReplica:api:ingress": "ingress",
    "ray::EngineActor": "engine",
    "ray::ServeReplica:": "engine_replica",  # the manager is one of them
    "ray::ProxyActor": "proxy",
    "ray::HAProxy": "proxy",
    "haproxy": "proxy",
    "ray::ServeController": "controller",
}


@dataclass(frozen=True, slots=True)
class Served:
    """The models that clients can request."""

    base: str
    adapters: tuple[str, ...]

    def model(self, number: int) -> str:
        return f"{self.base}:{self.adapters[number]}"


@dataclass(frozen=True, slots=True)
class Setting:
    is_paced: bool
    replicas: int
    rows: int  # of each
    pace: int  # tokens a second of a row of a paced engine
    max_queue_s: float
    num_adapters: int
    has_keys: bool = False


def prepare(home: Path, setting: Setting) -> Served:
    os.environ["LORAPLEX_HOME"] = str(home)
    if not setting.is_paced:
        prepare_demo(home)
        return Served(BASE_NAME, tuple(ADAPTER_NAMES))
    names = prepare_home(home, SHAPES["tiny"], setting.num_adapters, has_weights=True, device="cpu")
    return Served(BASE, tuple(names))


def write_config(home: Path, served: Served, setting: Setting, port: int) -> Path:
    engine: dict[str, object] = {"device": "cpu", "num_threads": 1, "max_num_seqs": setting.rows}
    if setting.is_paced:
        engine["seed"] = setting.pace
    else:
        engine |= {"max_model_len": 512, "kv_cache_bytes": "256MiB", "dtype": "float32"}
        engine |= {"adapter_pool_bytes": "64MiB"}
    model = {
        "name": served.base,
        "replicas": setting.replicas,
        "engine": engine,
        "graceful_shutdown_timeout_s": 2,
    }
    app = "tests.benchmarks.paced_app:build" if setting.is_paced else "serve_app.app:build"
    arguments: dict[str, object] = {
        # Its clients name tenants that the file does not.
        "ingress": {"graceful_shutdown_timeout_s": 2, "trusted_gateway": "the benchmark"},
        "fairness": {"max_queue_s": setting.max_queue_s},
        "models": [model],
    }
    if setting.has_keys:
        arguments["tenancy"] = TENANCY
    return write_serve_file(home, port, arguments, import_path=app)


@contextmanager
def server(home: Path, config: Path, port: int, *, haproxy: bool) -> Iterator[launch.Child]:
    paths = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep)
    extra = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    url = f"http://127.0.0.1:{port}"
    with serving(config, home / "serve.log", url, extra, haproxy) as child:
        yield child


@dataclass(frozen=True, slots=True)
class Use:
    """The use of the machine by all processes of one part of the server."""

    rss_bytes: float = 0.0
    cpu_s: float = 0.0  # since their start


@dataclass(slots=True)
class Watched:
    """While a load runs."""

    health_s: list[float] = field(default_factory=list)  # what each answer took
    num_unhealthy: int = 0
    seconds: float = 0.0
    uses: dict[str, list[Use]] = field(default_factory=dict)  # by part, one a look


@contextmanager
def watching(port: int, child: launch.Child) -> Iterator[Watched]:
    """Asks for its health and looks at its processes, twice a second."""
    seen = Watched()

    def look() -> None:
        for part, use in use_of(child).items():
            seen.uses.setdefault(part, []).append(use)

    def ask() -> None:
        began_s = time.monotonic()
        seen.num_unhealthy += client.get("/health").status_code != 200
        seen.health_s.append(time.monotonic() - began_s)
        look()

    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
        began_s = time.monotonic()
        look()
        try:
            with repeating(ask, _SAMPLE_S):
                yield seen
        finally:
            seen.seconds = time.monotonic() - began_s
            look()


def use_of(child: launch.Child) -> dict[str, Use]:
    uses: dict[str, Use] = {}
    for pid in launch.session_processes(child.process.pid):
        folder = Path("/proc", str(pid))
        try:
            command = (folder / "cmdline").read_bytes().decode(errors="replace")
            part = next((p for name, p in _PARTS.items() if command.startswith(name)), None)
            if part is not None:
                pages = int((folder / "statm").read_text().split()[1])
                times = (folder / "stat").read_text().rsplit(")", 1)[1].split()[11:13]
                cpu_s = sum(map(int, times)) / _TICKS
                known = uses.get(part, Use())
                uses[part] = Use(known.rss_bytes + pages * _PAGE_BYTES, known.cpu_s + cpu_s)
        except OSError:
            continue  # ended meanwhile
    return uses

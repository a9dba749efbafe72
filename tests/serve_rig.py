"""The whole serving path on one machine with the paced engine: Ray, Serve, both applications.

Apart from any other Ray here: own folder, free ports, loopback, authentication switched off in
words (its default depends on what ran before).
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import ray
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from ray._private.node import Node
from ray.serve.config import HTTPOptions

from registry.catalog import Catalog
from serve_app.app import build_with
from serve_app.cli.launch import SERVE_SETTINGS
from serve_app.cli.serve_child import start_ray
from serve_app.config import (
    ADMIN_TOKEN,
    FRONT_LIMITS,
    KEY_PEPPER,
    WEBHOOK_SECRET,
    EngineArgs,
    IngressArgs,
    MigrationArgs,
    ModelArgs,
    PlatformArgs,
    RegistryArgs,
    RouterArgs,
    TenancyArgs,
)
from serve_app.control.base_plan import APP_PREFIX, is_application_of
from serve_app.platform_view import Sources
from tests.fakes_engine import HELD_TOKENS, HOLD
from tests.fakes_registry import FolderRegistry
from tests.ports import free_port
from tests.waiting import eventually

RIG_BASE = "base"
RIG_ADAPTER = "pirate"
RIG_TOKEN = "token of the rig"
INGRESS = "ray::ServeReplica:api:ingress"
FRONT_TIMEOUT_S = 3.0  # of a header and of a body
_NICENESS = "RAY_worker_niceness"
_PROXY_PERIOD = "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S"


@dataclass(frozen=True, slots=True)
class Rig:
    port: int
    registry: FolderRegistry
    # The ingresses and applications of the tests before, which leave while the new ones start.
    old_ingresses: frozenset[int] = frozenset()
    old_applications: frozenset[str] = frozenset()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def running_serve() -> Iterator[int]:
    """Ray and Serve, nothing deployed. The port of the HTTP proxy."""
    os.environ["RAY_AUTH_MODE"] = "disabled"
    hook = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
    os.environ[hook] = SERVE_SETTINGS[hook]
    limits = IngressArgs(header_timeout_s=FRONT_TIMEOUT_S, body_timeout_s=FRONT_TIMEOUT_S)
    # Ray's processes inherit these; other tests, and the servers that they start, must not.
    inherited = {
        ADMIN_TOKEN: RIG_TOKEN,
        WEBHOOK_SECRET: "of the tests",
        KEY_PEPPER: "the pepper of the rig, without a home",
        FRONT_LIMITS: limits.model_dump_json(),
        # As `loraplex serve`: at Ray's own 15 they would starve beside other tests.
        _NICENESS: SERVE_SETTINGS[_NICENESS],
        _PROXY_PERIOD: SERVE_SETTINGS[_PROXY_PERIOD],
    }
    # Short, and not pytest's own: the path of a unix socket must stay below 108 characters.
    folder = tempfile.mkdtemp(prefix="lpx-", dir="/tmp")
    port = free_port()
    before = {name: os.environ[name] for name in inherited if name in os.environ}
    os.environ |= inherited
    # The logs of workers are not printed here, and looking for news in hundreds costs 80 s.
    start_log_monitor, Node.start_log_monitor = Node.start_log_monitor, lambda self: None
    try:
        start_ray(
            num_cpus=2,
            num_gpus=0,
            log_to_driver=False,
            object_store_memory=128 * 1024**2,
            _temp_dir=folder,
            _node_ip_address="127.0.0.1",
        )
    finally:
        Node.start_log_monitor = start_log_monitor
        for name in inherited:
            del os.environ[name]
        os.environ |= before
    try:
        _start_serve(port)
        yield port
    finally:
        serve.shutdown()  # type: ignore[no-untyped-call]
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def _start_serve(port: int) -> None:
    """Serve waits a minute for its proxy. Its imports take longer where the disk is cold and other
    tests have the cores: a second start connects to what runs by then."""
    options = HTTPOptions(host="127.0.0.1", port=port)
    try:
        serve.start(proxy_location="HeadOnly", http_options=options)
    except TimeoutError:
        eventually(lambda: _is_serving(port), timeout_s=300)
        serve.start(proxy_location="HeadOnly", http_options=options)


def _is_serving(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/-/healthz").status_code == 200
    except httpx.HTTPError:
        return False


def rig_args(
    rate: float,
    *bases: str,
    replicas: int = 1,
    router: RouterArgs | None = None,
    max_ongoing_requests: int = 80,
    ingresses: int = 1,
    migration: MigrationArgs | None = None,
    stall_timeout_s: float = 60.0,
) -> PlatformArgs:
    """The paced engine takes its pace from the seed."""
    engine = EngineArgs(seed=int(rate))
    models = tuple(
        ModelArgs(
            name=base,
            engine=engine,
            replicas=replicas,
            router=router or RouterArgs(),
            migration=migration or MigrationArgs(),
            graceful_shutdown_timeout_s=1,
            health_check_period_s=1,
            stall_timeout_s=stall_timeout_s,
            max_ongoing_requests=max_ongoing_requests,
            max_queued_requests=80,
        )
        for base in bases
    )
    return PlatformArgs(
        models=models,
        registry=RegistryArgs(poll_interval_s=0.2),
        ingress=IngressArgs(
            replicas=ingresses,
            graceful_shutdown_timeout_s=1,
            max_body_bytes=1024**2,
            metrics_max_age_s=0,
        ),
    )


def deploy(port: int, args: PlatformArgs, folder: Path, catalog: Catalog | None = None) -> Rig:
    """The `api` application over a registry in `folder`; returns at once, see `wait_ready`."""
    registry = FolderRegistry(folder)
    if catalog is None:
        base = registry.add_base(RIG_BASE)
        catalog = Catalog((base,), (registry.add_adapter(RIG_ADAPTER, base),))
    registry.write(catalog)
    ingresses = frozenset(processes(INGRESS))
    old = frozenset(app for app in serve.status().applications if app.startswith(APP_PREFIX))
    serve.run(build_with(args, rig_sources(folder)), name="api", route_prefix="/")
    bases = catalog.bases
    kept = {app for app in old for one in bases if is_application_of(app, one.name, one.digest)}
    return Rig(port, registry, ingresses, old - kept)


def end_application() -> None:
    """Deletes what `deploy` has started, and the application of each base."""
    if ray.is_initialized():
        for name in serve.status().applications:
            serve.delete(name)


def rig_sources(folder: Path) -> Sources:
    return Sources(partial(FolderRegistry, folder), "tests.fakes_engine:open_paced_engine")


def run_on_cpu(port: int, registry: FolderRegistry, args: PlatformArgs, **engine: Any) -> Rig:
    """Serves the registry's real files by the CPU engine instead of the paced one. `engine`: its
    settings."""
    settings = EngineArgs(device="cpu", **engine)
    models = tuple(one.model_copy(update={"engine": settings}) for one in args.models)
    sources = Sources(partial(FolderRegistry, registry.folder), "engine.factory:open_engine")
    served = build_with(args.model_copy(update={"models": models}), sources)
    serve.run(served, name="api", route_prefix="/")
    rig = Rig(port, registry)
    wait_ready(rig)
    return rig


def wait_ready(rig: Rig, timeout_s: float = 300.0) -> None:
    deadline = time.monotonic() + timeout_s
    while httpx.get(f"{rig.url}/ready").status_code != 200:
        if time.monotonic() > deadline:
            raise TimeoutError("the rig is not ready")
        time.sleep(0.05)
    eventually(lambda: rig.old_ingresses.isdisjoint(processes(INGRESS)))
    eventually(lambda: rig.old_applications.isdisjoint(serve.status().applications))


@contextmanager
def held(rig: Rig, name: str = RIG_BASE, at: int = HELD_TOKENS) -> Iterator[None]:
    """Requests for the base cannot end meanwhile, if they want more than `at` tokens: what a test
    does to them comes in time, however slow the machine is."""
    base = next(one for one in rig.registry.snapshot().bases if one.name == name)
    file = rig.registry.folder / base.digest / HOLD
    file.write_text(str(at))
    try:
        yield
    finally:
        file.unlink()


def scrape(client: httpx.Client) -> str:
    """The metrics, of an answer that has those of an engine and of the manager: without a process
    that does not answer within two seconds, counters would seem to be 0."""
    deadline = time.monotonic() + 180
    while True:
        text = client.get("/metrics").text
        if "vllm:num_requests_running{" in text and "loraplex_registry_up" in text:
            return text
        assert time.monotonic() < deadline, text
        time.sleep(0.05)


def metric(client: httpx.Client, name: str, **labels: str) -> float:
    """The sum of the samples with these labels."""
    text = scrape(client)
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def num_connected(client: httpx.Client) -> int:
    """Returns how many engines of the base the ingress sends requests to."""
    headers = {"authorization": f"Bearer {RIG_TOKEN}"}
    body = {"model": RIG_BASE, "prompt": "abc"}
    answer = client.post("/admin/route", headers=headers, json=body).json()
    return sum(one["is_connected"] for one in answer["replicas"])


@contextmanager
def start_rig(rate: float, *, has_keys: bool = False) -> Iterator[Rig]:
    """`has_keys`: requests need one; RIG_TOKEN makes them."""
    with running_serve() as port, tempfile.TemporaryDirectory() as folder:
        args = rig_args(rate, RIG_BASE)
        if has_keys:
            database = f"sqlite:///{folder}/keys.db"
            tenancy = TenancyArgs(enabled=True, database_url=database)
            args = args.model_copy(update={"tenancy": tenancy})
        rig = deploy(port, args, Path(folder))
        wait_ready(rig)
        yield rig


def processes(name: str, root: int | None = None) -> list[int]:
    """Ids of the processes below `root`, or below this one, with this in their command lines."""
    found = []
    for child in psutil.Process(root).children(recursive=True):
        with suppress(psutil.Error):  # it ended this moment
            is_alive = child.status() != psutil.STATUS_ZOMBIE
            if is_alive and name in " ".join(child.cmdline()):
                found.append(child.pid)
    return found

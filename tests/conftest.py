"""Fixtures that the whole session shares, made by the first test that asks, the markers that follow
from them, and how processes share the tests (pytest-xdist, see the Makefile).

The fixtures import what they start: Ray, torch and MLflow take each pytest eight seconds.
"""

from __future__ import annotations

import fcntl
import gc
import os
import time
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path

import httpx
import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

# The markers of tests that use these fixtures.
_MARKERS = {"serve_port": pytest.mark.serve, "demo_home": pytest.mark.slow}
# Files that need more than about five seconds, the longest first: `make quick` leaves them out, and
# processes that share the tests begin with them.
_SLOW_FILES = (
    "test_end_to_end",
    "test_notebooks",
    "test_adversary",
    "test_interpreter",
    "test_kernel_warm_up",
    "test_serve_haproxy",
    "test_serve_warm",
    "test_registry_plain",
    "test_engine_model",
    "test_engine_windows",
    "test_engine_families",
    "test_engine_speculated_tokens",
    "test_engine_draft_gate",
    "test_fp8",
    "test_int4",
    "test_int4_compiles",
    "test_engine_parity",
    "test_serve_register",
    "test_registry_server",
    "test_registry_postgres",
    "test_registry_client",
    "test_engine_effect",
    "test_serve_cached_registry",
    "test_serve_effect",
    "test_serve_hostile_registry",
    "test_request_path",
    "test_engine_interleavings",
    "test_engine_resumed",
    "test_benchmarks",
    "test_control_plane_orders",
    "test_import_names",
    "test_tenancy_oidc",
    "test_serve_haproxy_errors",
    "test_benchmark_soak",
    "test_hopper_attention_compiles",
    "test_benchmark_tensor_parallel",
    "test_engine_gguf",
    "test_engine_moved_scales",
    "test_engine_compressed_tensors",
    "test_engine_gptq_awq",
    "test_engine_ranks",
    "test_engine_tensor_parallel",
    "test_engine_ranks_quantized",
    "test_lora_saved_modules",
    "test_engine_adapter_kinds",
    "test_serve_generation",
    "test_lora_lycoris",
    "test_serve_front",
    "test_serve_dialects",
    "test_serve_cli",
    "test_engine_speculation",
    "test_serve_limits",
    "test_serve_stream",
    "test_benchmark_simulator",
    "test_serve_text_pool",
    "test_engine_grammars",
    "test_registry_listing",
    "test_engine_alora",
    "test_engine_prefix_digests",
    "test_tenancy_usage",
    "test_tenancy_http",
    "test_lora_low_rank",
    "test_registry_artifacts",
    "test_engine_grammar_costs",
    "test_serve_observe",
    "test_engine_scheduler",
    "test_benchmark_adapter_kinds",
    "test_benchmark_windowed_decode",
    "test_engine_adapter_combinations",
    "test_tenancy_keys",
    "test_engine_fit",
    "test_serve_fair_queue",
    "test_demo_tools",
    "test_engine_bitsandbytes",
    "test_lora_fuzz",
    "test_engine_fuzz",
)
# Files whose tests deploy on one Ray Serve, hence in one process. With its start, and the pauses in
# which it waits, this is the longest part of all.
_SHARED_SERVE = (
    "test_console_browser",
    "test_console_pages",
    "test_serve_adapter_combinations_http",
    "test_serve_adapter_text_http",
    "test_serve_adapters",
    "test_serve_app",
    "test_serve_attend",
    "test_serve_bases",
    "test_serve_canary_http",
    "test_serve_dialects_http",
    "test_serve_fairness_http",
    "test_serve_migration",
    "test_serve_process_loss",
    "test_serve_ranks",
    "test_serve_redeploy",
    "test_serve_registry",
    "test_serve_routing",
    "test_serve_routing_router",
    "test_serve_scaling_on_serve",
    "test_tenancy_on_serve",
)
# Files of which each test is long and starts all that it needs.
_APART = ("test_interpreter", "test_notebooks")
# Files beside the shared Serve that start servers, or wait for most of their time.
_SERVERS = (
    "test_end_to_end",
    "test_notebooks",
    "test_adversary",
    "test_serve_launch",
    "test_serve_haproxy",
    "test_serve_haproxy_errors",
    "test_serve_cached_registry",
    "test_serve_effect",
    "test_serve_front",
    "test_serve_generation",
    "test_serve_hostile_registry",
    "test_serve_stream",
    "test_registry_postgres",
    "test_registry_server",
    "test_engine_ranks",
    "test_benchmark_soak",
)
# Of test_serve_launch only two tests are long, and these carry the marker `serve`.
_FIRST = (*_SHARED_SERVE, *_SLOW_FILES[:4], "test_serve_launch", *_SLOW_FILES[4:])
# Hypothesis would fail an example of more than 200 ms, which shares a core with others here.
hypothesis.settings.register_profile("shared", deadline=None)
hypothesis.settings.load_profile("shared")
# Each client of httpx, hence each `httpx.get`, would read the authorities' certificates anew: 40 ms
# of a core, for requests without TLS, too.
httpx._transports.default.create_ssl_context = cache(httpx.create_ssl_context)
# The limits of requests that name none: 5 s by themselves, in which a server that shares its cores
# with other tests may do nothing.
for _phase in ("connect", "read", "write", "pool"):
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, _phase, 120.0)
# tests/startup/sitecustomize.py, for the processes that tests start, workers of pytest-xdist too.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, (str(Path(__file__).parent / "startup"), os.environ.get("PYTHONPATH")))
)
_ORDER = {stem: place for place, stem in enumerate(_FIRST)}
# Until all tests are collected: among the objects of so many imports, which stay, collections of
# garbage took a quarter of each process's nine seconds.
gc.disable()


_SHARED = "the shared Serve"
# A file in the folder that processes share, once the shared Serve runs.
_SERVE_RUNS = "serve-runs"


def _fills_pauses(worker: str) -> bool:
    """Returns True for pytest's processes beyond the number of cores. Servers spend half of their
    tests waiting: such a process runs other tests meanwhile, and leaves the cores to servers."""
    return int(worker.removeprefix("gw")) >= len(os.sched_getaffinity(0))


def _shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


class SharedTests(LoadScopeScheduling):
    """A file's tests run in order in one process; a process that is free takes the next file."""

    def _assign_work_unit(self, node: WorkerController) -> None:
        fills_pauses = _fills_pauses(node.gateway.id)
        for scope in self.workqueue:
            is_server = scope == _SHARED or Path(scope.partition("::")[0]).stem in _SERVERS
            if is_server != fills_pauses:
                self.workqueue.move_to_end(scope, last=False)
                break
        super()._assign_work_unit(node)

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        stem = Path(file).stem
        if stem in _SHARED_SERVE:
            return _SHARED
        return nodeid if stem in _APART else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> SharedTests | None:
    if config.option.dist == "worksteal":  # by `tests.gpu`, whose tests share no server
        return None
    config.option.loadscopereorder = False  # keeps the order of `pytest_collection_modifyitems`
    return SharedTests(config, log)  # type: ignore[no-untyped-call]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the longest files first and marks what `make quick` leaves out: slow files, and tests
    that share a server or the demo."""
    items.sort(key=lambda item: _ORDER.get(item.path.stem, len(_ORDER)))
    for item in items:
        if item.path.stem in _SLOW_FILES:
            item.add_marker(pytest.mark.slow)
        fixtures = getattr(item, "fixturenames", ())
        if "serve_port" in fixtures and item.path.stem not in _SHARED_SERVE:
            raise pytest.UsageError(f"{item.path.stem} uses serve_port: name it in _SHARED_SERVE")
        for fixture in fixtures:
            if fixture in _MARKERS:
                item.add_marker(_MARKERS[fixture])


@pytest.fixture(scope="session", autouse=True)
def _patience(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Lets a process that fills pauses begin when the shared Serve runs. Its imports took the disk
    of a new machine, which has no package in memory yet, and Ray's start passed its limit of 30 s.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None or not _fills_pauses(worker):
        return
    os.nice(10)
    is_started = any("serve_port" in getattr(i, "fixturenames", ()) for i in request.session.items)
    marker, deadline_s = _shared_folder(tmp_path_factory) / _SERVE_RUNS, time.monotonic() + 120
    while is_started and not marker.exists() and time.monotonic() < deadline_s:
        time.sleep(0.2)


def pytest_collection_finish() -> None:
    """Exempts what is imported and collected by now from each later collection of garbage."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, None, None]:
    """Ends the application of the last test of the shared Serve: polling its registry five times a
    second, it would take a quarter of a core for the rest of the session."""
    yield
    is_last = nextitem is None or nextitem.path.stem not in _SHARED_SERVE
    if is_last and "serve_port" in getattr(item, "fixturenames", ()):
        from tests.serve_rig import end_application

        end_application()


@pytest.fixture(scope="session")
def serve_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a running Serve's HTTP proxy on 127.0.0.1, without an application."""
    from tests.serve_rig import running_serve

    with running_serve() as port:
        (_shared_folder(tmp_path_factory) / _SERVE_RUNS).touch()
        yield port


@pytest.fixture(scope="session")
def demo_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home in which the demo is prepared and registered, for all processes of this session."""
    from tests.demo_server import run_cli

    shared = _shared_folder(tmp_path_factory)
    folder, is_prepared = shared / "demo-home", shared / "demo-home-is-prepared"
    with (shared / "demo-home.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not is_prepared.exists():
            run_cli(folder, "demo")
            is_prepared.touch()
    return folder

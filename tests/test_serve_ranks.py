"""Replicas of two ranks each on Ray Serve: a rank is killed under load, and no request fails."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from registry.catalog import Catalog
from tests.fakes_registry import FolderRegistry
from tests.serve_folders import make_adapter_folder, make_base_folder
from tests.serve_rig import Rig, end_application, metric, processes, rig_args, run_on_cpu
from tests.waiting import eventually

pytestmark = pytest.mark.serve

BASE, ADAPTER = "ranked-base", "pirate"
REPLICAS = 2
STREAMS, TOKENS = 6, 80
PROMPT = [5, 90, 33, 71, 12]
FIRST, OTHER = "ray::EngineActor", "engine.parallel.follower"
MOVED = "loraplex_requests_migrated_total"


@pytest.fixture(scope="module")
def rig(serve_port: int, tmp_path_factory: pytest.TempPathFactory) -> Rig:
    folder = tmp_path_factory.mktemp("ranks")
    registry = FolderRegistry(folder)
    base = registry.add_base(BASE, has_files=False)
    make_base_folder(folder / base.digest)
    adapter = registry.add_adapter(ADAPTER, base, 1, aliases=("champion",), has_files=False)
    make_adapter_folder(folder / adapter.digest, rank=5, b_scale=0.3)
    registry.write(Catalog((base,), (adapter,)))
    args = rig_args(200, BASE, replicas=REPLICAS)
    settings = {"tensor_parallel_size": 2, "num_threads": 1, "kv_cache_bytes": 4 * 1024**2}
    return run_on_cpu(serve_port, registry, args, **settings)


@pytest.fixture
def client(rig: Rig) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=rig.url, timeout=120) as connection:
        _wait_for_replicas(connection)
        yield connection


def _wait_for_replicas(client: httpx.Client) -> None:
    """Waits until each replica has both of its ranks and answers."""
    wanted = "vllm:num_requests_running{"
    eventually(
        lambda: (
            [len(processes(name)) for name in (FIRST, OTHER)] == [REPLICAS, REPLICAS]
            and client.get("/health").status_code == 200
            and client.get("/metrics").text.count(wanted) == REPLICAS
        )
    )


def _ask(client: httpx.Client, index: int) -> list[int]:
    body = {
        "model": f"{BASE}:{ADAPTER}" if index % 2 else BASE,
        "prompt": [*PROMPT, 20 + index],
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    token_ids: list[int] = response.json()["choices"][0]["token_ids"]
    return token_ids


@pytest.mark.parametrize("rank", [OTHER, FIRST])
def test_no_request_fails_when_a_rank_is_killed(client: httpx.Client, rank: str) -> None:
    undisturbed = [_ask(client, i) for i in range(STREAMS)]
    moved, is_over = metric(client, MOVED, result="ok", reason="death"), threading.Event()

    def ask_on(index: int) -> None:
        while not is_over.is_set():
            assert _ask(client, index) == undisturbed[index]

    def has_moved_requests() -> bool:
        """Kills once more while the replica was idle: the router's draws may leave it without a
        request."""
        eventually(lambda: metric(client, "vllm:num_requests_running") > STREAMS // 2)
        before = {name: set(processes(name)) for name in (FIRST, OTHER)}
        os.kill(processes(rank)[0], signal.SIGKILL)
        # The other rank of the replica ends, too, and a new pair takes its place.
        for name, pids in before.items():
            eventually(lambda name=name, pids=pids: len(pids - set(processes(name))) == 1)
        _wait_for_replicas(client)
        return metric(client, MOVED, result="ok", reason="death") > moved

    with ThreadPoolExecutor(STREAMS) as pool:
        clients = [pool.submit(ask_on, i) for i in range(STREAMS)]
        try:
            eventually(has_moved_requests, 600.0)
        finally:
            is_over.set()
        for one in clients:
            one.result()
    assert metric(client, "loraplex_requests_lost_total") == 0


def test_all_ranks_end_with_their_application(client: httpx.Client) -> None:
    assert len(processes(OTHER)) == REPLICAS
    end_application()
    eventually(lambda: not processes(OTHER) and not processes(FIRST))

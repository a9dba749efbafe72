"""Routing from HTTP to three paced engines: adapters stay on few engines, dry run and decision
agree, the headers' parts sum to the time to first token."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from serve_app.cli import main as cli
from serve_app.cli.commands.common import console
from serve_app.config import ADMIN_TOKEN, RouterArgs
from tests.serve_rig import (
    RIG_BASE,
    RIG_TOKEN,
    Rig,
    deploy,
    held,
    metric,
    processes,
    rig_args,
    wait_ready,
)
from tests.waiting import eventually

pytestmark = pytest.mark.serve

RATE = 100.0
MAX_ONGOING = 8
REPLICA = "ray::ServeReplica:base-"
# So many that they have not all the same home, which is drawn with the ids of the replicas.
ADAPTERS = tuple(f"adapter{number}" for number in range(15))


@pytest.fixture(scope="module")
def rig(serve_port: int, tmp_path_factory: pytest.TempPathFactory) -> Rig:
    router = RouterArgs(options={"target_usage": 0.1})  # a paced engine is never busy
    args = rig_args(RATE, RIG_BASE, replicas=3, router=router, max_ongoing_requests=MAX_ONGOING)
    running = deploy(serve_port, args, tmp_path_factory.mktemp("registry"))
    known = running.registry.snapshot()
    added = [running.registry.add_adapter(name, known.bases[0]) for name in ADAPTERS]
    running.registry.write(replace(known, adapters=(*known.adapters, *added)))
    wait_ready(running)
    with _client(running) as client:
        eventually(lambda: len(_connected(client)) == 3)
        eventually(lambda: _ask(client, ADAPTERS[-1]).status_code == 200)
    return running


@pytest.fixture
def client(rig: Rig) -> Iterator[httpx.Client]:
    with _client(rig) as connection:
        yield connection


def _client(rig: Rig) -> httpx.Client:
    headers = {"authorization": f"Bearer {RIG_TOKEN}", "x-loraplex-explain": "1"}
    return httpx.Client(base_url=rig.url, timeout=120, headers=headers)


def _ask(client: httpx.Client, model: str = RIG_BASE, **fields: object) -> httpx.Response:
    body = {"model": model, "prompt": "abcdef", "max_tokens": 3} | fields
    return client.post("/v1/completions", json=body)


def _route(client: httpx.Client, model: str = RIG_BASE, **fields: object) -> dict[str, object]:
    body = {"model": model, "prompt": "abcdef", "max_tokens": 3} | fields
    answer = client.post("/admin/route", json=body)
    assert answer.status_code == 200, answer.text
    told: dict[str, object] = answer.json()
    return told


def _replicas(told: dict[str, object]) -> list[dict[str, object]]:
    return told["replicas"]  # type: ignore[return-value]


def _connected(client: httpx.Client) -> list[str]:
    lines = _replicas(_route(client))
    return [str(line["replica"]) for line in lines if line["is_connected"]]


def _shown(client: httpx.Client) -> set[str]:
    """The engines with metrics."""
    families = text_string_to_metric_families(client.get("/metrics").text)
    running = (one for one in families if one.name == "vllm:num_requests_running")
    return {sample.labels["engine"] for one in running for sample in one.samples}


def _listed(client: httpx.Client) -> set[str]:
    """The engines in the list of adapters."""
    lines = client.get("/admin/adapters").json()["adapters"]
    return {engine["engine"] for line in lines for engine in line["engines"]}


def _where(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return response.headers["x-loraplex-replica"]


def _timing(response: httpx.Response) -> dict[str, float]:
    found = re.findall(r"([\w-]+);dur=(-?[\d.]+)", response.headers["server-timing"])
    return {name: float(value) for name, value in found}


def test_every_adapter_stays_on_one_engine_and_engines_share_them(client: httpx.Client) -> None:
    places = {name: Counter(_where(_ask(client, name)) for _ in range(6)) for name in ADAPTERS}
    assert all(len(counts) == 1 for counts in places.values()), places
    assert len({next(iter(counts)) for counts in places.values()}) > 1


@pytest.mark.parametrize("model", [ADAPTERS[0], f"{RIG_BASE}:{ADAPTERS[1]}"])
def test_the_dry_run_says_what_the_decision_will_be(client: httpx.Client, model: str) -> None:
    told = _route(client, model)
    first, *others = _replicas(told)
    assert (told["policy"], told["tokens"], len(others)) == ("expected_ttft", 6, 2)
    response = _ask(client, model)
    assert _where(response) == first["replica"]
    assert response.headers["x-loraplex-router"] == f"expected_ttft; reason={first['reason']}"
    expected: dict[str, float] = first["expected_ms"]  # type: ignore[assignment]
    timing = _timing(response)
    assert timing["expected-adapter"] == pytest.approx(expected["adapter"], abs=1)
    chat = {"model": model, "messages": [{"role": "user", "content": "hello"}]}
    answer = client.post("/admin/route", json=chat)
    assert answer.status_code == 200
    assert _replicas(answer.json())[0]["replica"] == first["replica"]


def test_the_parts_sum_to_the_time_to_first_token(client: httpx.Client) -> None:
    for stream in (True, False):
        began_s = time.perf_counter()
        response = _ask(client, ADAPTERS[2], stream=stream)
        whole_ms = 1000 * (time.perf_counter() - began_s)
        timing = _timing(response)
        total = timing.pop("total")
        parts = [value for name, value in timing.items() if not name.startswith("expected")]
        assert len(parts) == 7
        assert sum(parts) == pytest.approx(total, abs=0.1)
        assert min(parts) > -0.5
        assert 0 < total < whole_ms


def test_nothing_is_explained_unasked(client: httpx.Client) -> None:
    response = client.post(
        "/v1/completions",
        json={"model": RIG_BASE, "prompt": "abc"},
        headers={"x-loraplex-explain": "0"},
    )
    assert response.status_code == 200
    assert "server-timing" not in response.headers


@pytest.mark.parametrize("token", ["", "Bearer wrong"])
def test_nothing_is_explained_without_the_admin_token(client: httpx.Client, token: str) -> None:
    response = client.post(
        "/v1/completions",
        json={"model": RIG_BASE, "prompt": "abc"},
        headers={"authorization": token},
    )
    assert response.status_code == 200
    assert response.headers["x-loraplex-explain"] == "needs the admin token"
    assert not response.headers.keys() & {
        *("server-timing", "x-loraplex-replica", "x-loraplex-router")
    }


def test_a_session_stays_where_it_was(client: httpx.Client) -> None:
    told = {_where(_ask(client, user="someone")) for _ in range(6)}
    assert len(told) == 1


def test_a_full_engine_is_passed_over(rig: Rig, client: httpx.Client) -> None:
    """Runs as many requests as all engines accept: no engine exceeds its limit, and full engines
    return their figures and adapters."""
    num_requests = 3 * MAX_ONGOING

    def placed() -> list[int]:
        lines = _replicas(_route(client, ADAPTERS[3]))
        return [int(str(line["sequences"])) for line in lines]

    with ThreadPoolExecutor(num_requests) as pool:
        with held(rig):
            asked = [
                pool.submit(_ask, client, ADAPTERS[3], max_tokens=60) for _ in range(num_requests)
            ]
            eventually(lambda: placed() == [MAX_ONGOING] * 3)
            eventually(lambda: len(_shown(client)) == 3)
            eventually(lambda: len(_listed(client)) == 3)
        counts = Counter(_where(one.result()) for one in asked)
    assert list(counts.values()) == [MAX_ONGOING] * 3


def test_a_replica_that_hangs_hides_only_its_own_figures(client: httpx.Client) -> None:
    eventually(lambda: len(_shown(client)) == len(_listed(client)) == 3)
    stopped = processes(REPLICA)[0]
    os.kill(stopped, signal.SIGSTOP)
    try:
        # Each list may lack another engine for once, which did not answer in time.
        eventually(lambda: len(_shown(client)) == 2 and _shown(client) == _listed(client))
    finally:
        os.kill(stopped, signal.SIGCONT)
    eventually(lambda: len(_shown(client)) == 3)


def test_decisions_are_remembered_and_counted(client: httpx.Client) -> None:
    where = _where(_ask(client, ADAPTERS[4]))
    (newest, *_) = client.get("/admin/decisions").json()["decisions"]
    assert newest["replica_id"] == where
    assert newest["is_accepted"]
    assert newest["first_token_s"] >= newest["chosen_s"]
    before = metric(client, "loraplex_router_affinity_hits_total", model_name=RIG_BASE)
    decided = metric(client, "loraplex_router_decisions_total", model_name=RIG_BASE)
    assert decided > 0
    _ask(client, ADAPTERS[4])
    assert metric(client, "loraplex_router_affinity_hits_total", model_name=RIG_BASE) == before + 1
    assert metric(client, "loraplex_router_decisions_total", model_name=RIG_BASE) == decided + 1


@pytest.mark.parametrize("body", [b"no json", b'{"prompt": "abc"}', b'{"model": "nobody"}'])
def test_a_wrong_body_is_refused(client: httpx.Client, body: bytes) -> None:
    assert client.post("/admin/route", content=body).status_code in (400, 404)


def test_only_an_operator_asks_where(rig: Rig) -> None:
    body = {"model": RIG_BASE, "prompt": "abc"}
    assert httpx.post(f"{rig.url}/admin/route", json=body).status_code == 401
    assert httpx.get(f"{rig.url}/admin/decisions").status_code == 401


def test_the_command_shows_the_dry_run(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(ADMIN_TOKEN, RIG_TOKEN)
    monkeypatch.setattr(console, "width", 200)
    with pytest.raises(SystemExit) as ended:
        cli.main(["route", ADAPTERS[0], "hello", "--url", rig.url])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert "expected_ttft" in told
    assert "device" in told


def test_a_hot_adapter_gets_more_homes(
    client: httpx.Client,
) -> None:
    name = ADAPTERS[5]
    place = _where(_ask(client, name))
    is_enough = threading.Event()

    def ask_on() -> None:
        while not is_enough.is_set():
            _where(_ask(client, name, max_tokens=50, n=16))

    def places() -> set[str]:
        lines = _replicas(_route(client, name))
        return {str(one["replica"]) for one in lines if one["adapter_tier"] == "device"}

    eventually(lambda: places() == {place})  # as soon as the engine's report is there
    with ThreadPoolExecutor(MAX_ONGOING - 2) as pool:
        asking = [pool.submit(ask_on) for _ in range(MAX_ONGOING - 2)]
        try:
            eventually(lambda: len(places()) > 1)
        finally:
            is_enough.set()
    assert all(one.exception() is None for one in asking)

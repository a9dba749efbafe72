"""Bases that come and go while the server runs, over HTTP, with the paced engine: added and removed
by an operator, asleep when idle, woken by a request.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import httpx
import pytest
import ray
from ray import serve

from registry.catalog import Catalog
from serve_app.cli import main as cli
from serve_app.config import ADMIN_TOKEN
from tests import waiting
from tests.fakes_engine import REFUSED
from tests.fakes_registry import FolderRegistry
from tests.serve_rig import RIG_BASE, RIG_TOKEN, Rig, deploy, held, metric, rig_args, wait_ready

pytestmark = pytest.mark.serve

SECOND = "second"
NAPPER = "napper"  # sleeps soon
NAP = {"idle_timeout_s": 0.3}
ENGINE = {"seed": 200}
LIMITS = {"graceful_shutdown_timeout_s": 5, "health_check_period_s": 1}


@pytest.fixture(scope="module")
def rig(serve_port: int, tmp_path_factory: pytest.TempPathFactory) -> Rig:
    folder = tmp_path_factory.mktemp("registry")
    registry = FolderRegistry(folder)
    bases = tuple(registry.add_base(name) for name in (RIG_BASE, SECOND, NAPPER))
    running = deploy(serve_port, rig_args(200.0, RIG_BASE), folder, Catalog(bases))
    wait_ready(running)
    return running


@pytest.fixture
def client(rig: Rig) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=rig.url, timeout=240) as connection:
        yield connection


@pytest.fixture
def admin(rig: Rig) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {RIG_TOKEN}"}
    with httpx.Client(base_url=f"{rig.url}/admin", timeout=240, headers=headers) as connection:
        yield connection


eventually = partial(waiting.eventually, timeout_s=240.0)


def ask(client: httpx.Client, model: str, **fields: object) -> httpx.Response:
    body = {"model": model, "prompt": "abc", "max_tokens": 5} | fields
    return client.post("/v1/completions", json=body)


def line(admin: httpx.Client, name: str) -> dict[str, object] | None:
    lines = admin.get("/bases").json()["bases"]
    return next((one for one in lines if one["name"] == name), None)


def state(admin: httpx.Client, name: str) -> object:
    found = line(admin, name)
    return None if found is None else found["state"]


def add(admin: httpx.Client, name: str, **settings: object) -> None:
    body = {"name": name, "engine": ENGINE, **LIMITS, **settings}
    answer = admin.post("/bases", json=body)
    assert answer.status_code == 202, answer.text


def is_stopped(name: str) -> bool:
    """True if there is no application, hence no process and no memory of its engines."""
    apps = serve.status().applications
    return not any(app.startswith(f"base--{name}--") for app in apps)


@pytest.fixture
def napper(admin: httpx.Client) -> str:
    """A base that sleeps soon; the first test that uses it has it started."""
    if line(admin, NAPPER) is None:
        add(admin, NAPPER, **NAP)
        eventually(lambda: line(admin, NAPPER) is not None)
    return NAPPER


Commands = Callable[..., str]


@pytest.fixture
def commands(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Commands:
    """Runs `loraplex bases ...`; returns its output or its error."""
    monkeypatch.setenv(ADMIN_TOKEN, RIG_TOKEN)

    def run(*words: str) -> str:
        with pytest.raises(SystemExit) as ended:
            cli.main(["bases", *words, "--url", rig.url])
        printed = capsys.readouterr()
        return printed.out if not ended.value.code else printed.err

    return run


def sleeps(admin: httpx.Client, name: str) -> bool:
    return state(admin, name) == "asleep" and is_stopped(name)


# Added and removed


def test_a_base_comes_and_goes_while_another_streams(
    rig: Rig, client: httpx.Client, admin: httpx.Client, commands: Commands
) -> None:
    assert ask(client, SECOND).status_code == 404
    body = {"model": RIG_BASE, "prompt": "abcd", "max_tokens": 2400, "stream": True}
    with (
        ThreadPoolExecutor(1) as pool,
        httpx.Client(base_url=rig.url, timeout=240) as other,
        client.stream("POST", "/v1/completions", json=body) as stream,
    ):
        seed = ("--engine", "seed=200", "--engine", "kv_cache_dtype=fp8")
        assert "is running" in commands("add", SECOND, *seed, "--idle-timeout", "600", "--wait")
        lines = [line(admin, name) or {} for name in (RIG_BASE, SECOND)]
        assert [found["kv_cache_dtype"] for found in lines] == ["auto", "fp8"]
        settings = ("quantization", "lora_dtype", "tensor_parallel_size")
        assert [lines[0][setting] for setting in settings] == ["none", "auto", 1]
        assert other.get("/ready").status_code == 200
        assert ask(other, SECOND).status_code == 200
        found = line(admin, SECOND)
        assert found is not None
        assert (found["source"], found["idle_timeout_s"]) == ("registry", 600)
        with held(rig, SECOND):
            in_flight = pool.submit(ask, other, SECOND, max_tokens=800)
            running = partial(metric, client, "vllm:num_requests_running", model_name=SECOND)
            eventually(lambda: running() == 1)
            eventually(lambda: (line(admin, SECOND) or {}).get("idle_s") == 0)
            assert commands("remove", SECOND) == f"{SECOND} is drained and removed\n"
            eventually(lambda: ask(other, SECOND).status_code == 404)
            eventually(lambda: state(admin, SECOND) == "draining")
        assert in_flight.result().json()["usage"]["completion_tokens"] == 800
        assert (
            "".join(
                json.loads(text[6:])["choices"][0]["text"]
                for text in stream.iter_lines()
                if text.startswith("data: {")
            )
            == "abcd" * 600
        )
    eventually(lambda: line(admin, SECOND) is None)


def test_a_base_that_shares_its_files_names_the_base_that_stays(
    rig: Rig, client: httpx.Client, admin: httpx.Client, commands: Commands
) -> None:
    before = rig.registry.snapshot()
    twin = replace(next(one for one in before.bases if one.name == RIG_BASE), name="twin")
    rig.registry.write(replace(before, bases=(*before.bases, twin)))
    assert "started" in commands("add", "twin")
    assert f"same as those of '{RIG_BASE}'" in str((line(admin, "twin") or {})["message"])
    stays = f"Its files stay served as {RIG_BASE}, which also answers requests for twin\n"
    removed = commands("remove", "twin", "--wait")
    assert removed.startswith("twin is removed after ")
    assert removed.endswith(stays)
    assert line(admin, "twin") is None
    assert ask(client, "twin").status_code == 200
    assert "started" in commands("add", "twin")
    answer = admin.delete("/bases/twin")
    assert answer.json() == {"name": "twin", "still_served_as": RIG_BASE}
    rig.registry.write(before)
    eventually(lambda: ask(client, "twin").status_code == 404)


def test_what_cannot_be_served_is_refused_in_words(admin: httpx.Client, commands: Commands) -> None:
    def refusal(answer: httpx.Response) -> tuple[int, str]:
        return answer.status_code, answer.json()["error"]["message"]

    wrong = admin.post("/bases", json={"name": SECOND, "engine": {"block_size": 0}})
    assert wrong.status_code == 400
    assert wrong.json()["error"]["param"] == "engine.block_size"
    own = {"name": SECOND, "router": {"policy": "os:system"}}
    status, words = refusal(admin.post("/bases", json=own))
    assert (status, "only the configuration file" in words) == (400, True)
    status, words = refusal(admin.post("/bases", json={"name": "nobody"}))
    assert status == 404
    assert words.endswith("register it first: loraplex register base FOLDER --name nobody")
    status, words = refusal(admin.post("/bases", json={"name": RIG_BASE}))
    assert (status, "configuration file" in words) == (409, True)
    status, words = refusal(admin.delete(f"/bases/{RIG_BASE}"))
    assert (status, "configuration file" in words) == (409, True)
    assert "engine.seed" in commands("add", SECOND, "--engine", "seed=quick")
    assert refusal(admin.delete("/bases/nobody"))[0] == 404
    assert refusal(admin.post("/bases/nobody/sleep"))[0] == 404


def test_a_wrong_setting_is_told_and_disturbs_nobody(
    rig: Rig, client: httpx.Client, admin: httpx.Client
) -> None:
    rig.registry.set_setting(SECOND, "serve", '{"replicas": 0}')
    eventually(lambda: state(admin, SECOND) == "failed")
    found = line(admin, SECOND)
    assert found is not None
    assert "replicas" in str(found["message"])
    assert ask(client, RIG_BASE).status_code == 200
    assert client.get("/ready").status_code == 200
    rig.registry.set_setting(SECOND, "serve", None)
    eventually(lambda: line(admin, SECOND) is None)


# Sleep


def test_an_idle_base_sleeps_and_a_request_wakes_it(
    client: httpx.Client, admin: httpx.Client, napper: str
) -> None:
    eventually(lambda: sleeps(admin, napper))
    assert client.get("/ready").status_code == client.get("/health").status_code == 200
    assert napper in {model["id"] for model in client.get("/v1/models").json()["data"]}
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: ask(client, napper), range(8)))
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.json()["choices"][0]["text"] for answer in answers} == {"abcab"}
    samples = {
        f'loraplex_base_cold_starts_total{{base="{napper}"}} 1.0',
        f'loraplex_base_state{{base="{RIG_BASE}",state="running"}} 1.0',
        f'loraplex_base_start_seconds_count{{base="{napper}"}} 2.0',
    }
    eventually(lambda: samples <= set(client.get("/metrics").text.splitlines()))
    eventually(lambda: state(admin, napper) == "asleep")


def test_no_request_fails_while_a_base_falls_asleep_and_wakes_again_and_again(
    rig: Rig, client: httpx.Client, admin: httpx.Client, napper: str
) -> None:
    with httpx.Client(base_url=rig.url, timeout=240) as own:
        statuses = []
        for pause_s in (0.4, 0.8, 1.2, 1.6):  # at every moment of falling asleep
            statuses.append(ask(own, napper).status_code)
            time.sleep(pause_s)
    assert statuses == [200] * 4


def test_a_base_that_refuses_cold_starts_says_when_to_come_back(
    client: httpx.Client, admin: httpx.Client, napper: str
) -> None:
    add(admin, napper, **NAP, cold_start="refuse")
    eventually(lambda: (line(admin, napper) or {}).get("cold_start") == "refuse")
    eventually(lambda: sleeps(admin, napper))
    refused = ask(client, napper)
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    eventually(lambda: ask(client, napper).status_code == 200)
    add(admin, napper, **NAP)
    eventually(lambda: (line(admin, napper) or {}).get("cold_start") == "wait")


async def leave_during_its_start(rig: Rig, admin: httpx.Client, name: str) -> None:
    async with httpx.AsyncClient(base_url=rig.url, timeout=240) as own:
        asking = own.post("/v1/completions", json={"model": name, "prompt": "abc"})
        waiting = asyncio.create_task(asking)
        await asyncio.to_thread(eventually, lambda: state(admin, name) != "asleep")
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting


def test_a_waiting_client_that_leaves_is_forgotten_at_once(
    rig: Rig, client: httpx.Client, admin: httpx.Client, napper: str
) -> None:
    eventually(lambda: sleeps(admin, napper))
    starts = partial(metric, client, "loraplex_base_start_seconds_count", base=napper)
    before = starts()
    with held(rig, napper):  # the request cannot end before its client leaves
        asyncio.run(leave_during_its_start(rig, admin, napper))
    eventually(lambda: "loraplex_client_disconnects_total " in client.get("/metrics").text)
    eventually(lambda: starts() == before + 1)
    eventually(lambda: state(admin, napper) == "asleep")  # no request is counted as open


def test_an_operator_puts_a_base_to_sleep_and_wakes_it(
    rig: Rig, client: httpx.Client, commands: Commands
) -> None:
    assert "is asleep" in commands("sleep", RIG_BASE, "--wait")
    assert client.get("/ready").status_code == 200
    assert "asleep" in commands("list")
    assert "is running" in commands("wake", RIG_BASE, "--wait")
    assert ask(client, RIG_BASE).status_code == 200


def test_a_manager_that_died_knows_what_was_added_and_what_sleeps(
    rig: Rig, client: httpx.Client, admin: httpx.Client, napper: str
) -> None:
    """Next to a tag whose number no machine can hold."""
    eventually(lambda: sleeps(admin, napper))
    size = '{"engine": {"kv_cache_bytes": "' + "9" * 400 + '"}}'
    rig.registry.set_setting(SECOND, "serve", size)
    eventually(lambda: state(admin, SECOND) == "failed")
    manager = next(
        actor["name"]
        for actor in ray.util.list_named_actors(all_namespaces=True)
        if "api#manager" in actor["name"]
    )
    ray.kill(ray.get_actor(manager, namespace="serve"), no_restart=True)
    assert ask(client, RIG_BASE).status_code == 200

    def is_back() -> bool:
        try:
            answer = admin.get("/bases", timeout=5)
        except httpx.TimeoutException:
            return False
        return {one["name"] for one in answer.json().get("bases", ())} >= {RIG_BASE, napper}

    eventually(is_back)
    eventually(lambda: state(admin, SECOND) == "failed")
    found = line(admin, SECOND)
    assert found is not None
    assert "kv_cache_bytes" in str(found["message"])
    rig.registry.set_setting(SECOND, "serve", None)
    eventually(lambda: line(admin, SECOND) is None)
    assert sleeps(admin, napper)
    assert ask(client, napper).status_code == 200


def test_a_base_that_does_not_wake_says_why(
    rig: Rig, client: httpx.Client, admin: httpx.Client, napper: str
) -> None:
    eventually(lambda: sleeps(admin, napper))
    base = next(one for one in rig.registry.snapshot().bases if one.name == napper)
    mark = rig.registry.folder / base.digest / REFUSED
    mark.touch()
    answer = ask(client, napper)
    mark.unlink()
    assert answer.status_code == 503
    assert "layer 3 of the base holds NaN" in answer.json()["error"]["message"]
    assert "Traceback" not in answer.text
    assert ask(client, RIG_BASE).status_code == 200
    assert client.get("/health").status_code == 200

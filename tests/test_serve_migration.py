"""Engines that are killed by process id, drained and poisoned under real Serve: clients see only a
pause."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import httpx
import pytest
from ray import serve

from serve_app.config import RouterArgs
from serve_app.control.deployments import base_application
from serve_app.platform_view import BaseSpec
from tests.fakes_engine import HANG, POISON_TOKEN
from tests.serve_rig import (
    RIG_ADAPTER,
    RIG_BASE,
    RIG_TOKEN,
    Rig,
    deploy,
    held,
    metric,
    num_connected,
    processes,
    rig_args,
    rig_sources,
    wait_ready,
)
from tests.waiting import eventually

pytestmark = pytest.mark.serve

RATE = 30.0
REPLICAS = 3
PROMPT = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_+*/=()<>[]{}"
TOKENS = 100
# In turn, so that every engine has requests: draws between equal ones may leave one without.
ROUTER = RouterArgs(policy="round_robin")
ARGS = rig_args(RATE, RIG_BASE, replicas=REPLICAS, router=ROUTER, stall_timeout_s=4.0)
ENGINE = "ray::EngineActor"
MOVED = "loraplex_requests_migrated_total"


@pytest.fixture(scope="module")
def rig(serve_port: int, tmp_path_factory: pytest.TempPathFactory) -> Rig:
    folder = tmp_path_factory.mktemp("registry")
    running = deploy(serve_port, ARGS, folder)
    wait_ready(running)
    return running


@pytest.fixture
def client(rig: Rig) -> Iterator[httpx.Client]:
    limits = httpx.Limits(max_connections=100)
    with httpx.Client(base_url=rig.url, timeout=180, limits=limits) as connection:
        wait_for_replicas(connection)
        yield connection


@pytest.fixture(scope="module")
def undisturbed(rig: Rig) -> list[ReceivedAnswer]:
    """The answers of engines to which nothing happens."""
    limits = httpx.Limits(max_connections=100)
    with httpx.Client(base_url=rig.url, timeout=180, limits=limits) as connection:
        wait_for_replicas(connection)
        return ask_all(connection, BODIES)


@dataclass
class ReceivedAnswer:
    """An answer as a client reads it, streamed or whole."""

    texts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[str]] = field(default_factory=dict)
    usage: object = None

    def add(self, body: dict[str, object]) -> None:
        for choice in body["choices"]:  # type: ignore[attr-defined]
            index = choice["index"]
            self.texts[index] = self.texts.get(index, "") + choice["text"]
            self.token_ids.setdefault(index, []).extend(choice.get("token_ids") or [])
            if choice["logprobs"] is not None:
                self.logprobs.setdefault(index, []).extend(choice["logprobs"]["tokens"])
            if choice["finish_reason"] is not None:
                assert index not in self.reasons
                self.reasons[index] = choice["finish_reason"]
        self.usage = body.get("usage") or self.usage


def body(**fields: object) -> dict[str, object]:
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    common = {"model": RIG_BASE, "prompt": PROMPT, "max_tokens": TOKENS, "return_token_ids": True}
    return common | (streamed if fields.pop("stream", True) else {}) | fields


BODIES = [
    body(),
    body(stream=False),
    body(model=RIG_ADAPTER),
    body(n=2),
    body(n=3, stream=False, model=RIG_ADAPTER),
    body(prompt=[PROMPT, PROMPT[::-1]]),
    body(logprobs=1),
    body(logprobs=1, stream=False),
    # One of these is in the middle of its stop string when the engine dies.
    *(body(stop=PROMPT[first : first + 10]) for first in range(5, 75, 10)),
]


def admin(client: httpx.Client, path: str) -> dict[str, object]:
    headers = {"authorization": f"Bearer {RIG_TOKEN}"}
    answer: dict[str, object] = client.get(path, headers=headers).json()
    return answer


def ask(client: httpx.Client, fields: dict[str, object]) -> ReceivedAnswer:
    answer = ReceivedAnswer()
    response = client.post("/v1/completions", json=fields)
    assert response.status_code == 200, response.text
    if not fields.get("stream"):
        answer.add(response.json())
        return answer
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    assert "event: error" not in response.text, response.text[-500:]
    assert lines.pop() == "[DONE]"
    chunks = [json.loads(line) for line in lines]
    assert len({chunk["id"] for chunk in chunks}) == 1
    for chunk in chunks:
        answer.add(chunk)
    return answer


def ask_all(client: httpx.Client, bodies: Sequence[dict[str, object]]) -> list[ReceivedAnswer]:
    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(lambda fields: ask(client, fields), bodies))


def wait_for_replicas(client: httpx.Client) -> None:
    eventually(lambda: len(processes(ENGINE)) == REPLICAS)
    eventually(lambda: client.get("/health").status_code == 200)
    eventually(lambda: num_connected(client) == REPLICAS)
    # A metric of each engine: it answers.
    wanted = "vllm:num_requests_running{"
    eventually(
        lambda: (
            sum(line.startswith(wanted) for line in client.get("/metrics").text.splitlines())
            == REPLICAS
        )
    )


def test_all_answers_are_the_same_when_an_engine_is_killed(
    rig: Rig, client: httpx.Client, undisturbed: list[ReceivedAnswer]
) -> None:
    with ThreadPoolExecutor(1) as pool:
        with held(rig):
            running = pool.submit(ask_all, client, BODIES)
            eventually(lambda: metric(client, "vllm:num_requests_running") >= len(BODIES))
            os.kill(processes(ENGINE)[0], signal.SIGKILL)
        disturbed = running.result()
    assert disturbed == undisturbed
    assert metric(client, MOVED, result="ok", reason="death") > 0
    assert metric(client, "loraplex_requests_lost_total") == 0
    eventually(lambda: metric(client, "loraplex_open_engine_requests") == 0)


def test_all_answers_are_the_same_when_a_step_hangs_and_its_engine_is_replaced(
    rig: Rig, client: httpx.Client, undisturbed: list[ReceivedAnswer]
) -> None:
    before, moved = set(processes(ENGINE)), metric(client, MOVED, result="ok", reason="silence")
    (base,) = rig.registry.snapshot().bases
    statuses = set()
    with ThreadPoolExecutor(1) as pool:
        hang = rig.registry.folder / base.digest / HANG
        with held(rig):
            running = pool.submit(ask_all, client, BODIES)
            eventually(lambda: metric(client, "vllm:num_requests_running") >= len(BODIES))
            hang.touch()
            eventually(lambda: not hang.exists())
        while not running.done():
            statuses.add(client.get("/health").status_code)
        assert running.result() == undisturbed
    assert metric(client, MOVED, result="ok", reason="silence") > moved
    assert metric(client, "loraplex_requests_lost_total") == 0
    # 503 from the moment the ingress gives the engine up until Serve has replaced it; where Serve's
    # health check, with the same limit of 10 s, comes first, there is no such moment.
    assert statuses <= {200, 503}
    eventually(lambda: len(before - set(processes(ENGINE))) == 1)
    wait_for_replicas(client)


def test_a_rolling_update_moves_every_request(
    rig: Rig, client: httpx.Client, undisturbed: list[ReceivedAnswer]
) -> None:
    """Serve stops the replicas in turn, without waiting for their requests to end."""
    (base,) = rig.registry.snapshot().bases
    lines = admin(client, "/admin/bases")["bases"]
    assert isinstance(lines, list)
    spec = BaseSpec(base, ARGS.models[0], "cpu", lines[0]["application"])
    update = base_application(spec, rig_sources(rig.registry.folder))
    before = set(processes(ENGINE))
    with ThreadPoolExecutor(1) as pool:
        updated = pool.submit(serve.run, update, name=spec.app_name, route_prefix=None)
        while not updated.done():
            assert ask_all(client, BODIES) == undisturbed
        updated.result()
    eventually(lambda: before.isdisjoint(processes(ENGINE)))
    assert metric(client, MOVED, result="ok", reason="drain") > 0
    assert metric(client, "loraplex_requests_lost_total") == 0


def test_a_poison_costs_few_engines_and_nobody_else_an_answer(
    client: httpx.Client, undisturbed: list[ReceivedAnswer]
) -> None:
    before = set(processes(ENGINE))
    poison = body(prompt=[POISON_TOKEN, 1, 2], stream=False)
    with ThreadPoolExecutor(2) as pool:
        others = pool.submit(ask_all, client, BODIES)
        refused = client.post("/v1/completions", json=poison)
        assert others.result() == undisturbed
    assert (refused.status_code, refused.json()["error"]["code"]) == (422, "request_quarantined")
    assert len(before - set(processes(ENGINE))) <= 3
    wait_for_replicas(client)
    there = processes(ENGINE)
    again = client.post("/v1/completions", json=poison | {"seed": 5})
    assert again.status_code == 422
    assert processes(ENGINE) == there

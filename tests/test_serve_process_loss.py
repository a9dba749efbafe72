"""An ingress replica, Serve's controller and its proxy are killed by process id while clients
read."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.serve_rig import (
    INGRESS,
    RIG_ADAPTER,
    RIG_BASE,
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

RATE = 30.0
TOKENS = 90
STREAMS = 12
CONTROLLER, PROXY = "ServeController", "ray::ProxyActor"
BODY = {"prompt": "abcdefghij", "max_tokens": TOKENS, "stream": True}
WHOLE = "abcdefghij" * (TOKENS // 10)


@pytest.fixture(scope="module")
def rig(serve_port: int, tmp_path_factory: pytest.TempPathFactory) -> Rig:
    args = rig_args(RATE, RIG_BASE, replicas=2, ingresses=2)
    running = deploy(serve_port, args, tmp_path_factory.mktemp("registry"))
    wait_ready(running)
    return running


@pytest.fixture
def client(rig: Rig) -> Iterator[httpx.Client]:
    # Each request on a connection of its own: the proxy spreads them over the ingresses.
    limits = httpx.Limits(max_connections=100, max_keepalive_connections=0)
    with httpx.Client(base_url=rig.url, timeout=180, limits=limits) as connection:
        eventually(lambda: len(processes(INGRESS)) == 2)
        eventually(lambda: is_ready_everywhere(connection))
        yield connection


def is_ready_everywhere(client: httpx.Client) -> bool:
    """Waits until both ingresses answer, whichever the proxy chooses."""
    return all(client.get("/ready").status_code == 200 for _ in range(10))


def read_stream(client: httpx.Client, index: int, begun: list[int] | None = None) -> str:
    """Returns the text; "cut" if the stream ended with an error event and the connection broke,
    which a client can distinguish from an end. `begun`: gets the index with the first token."""
    model = RIG_ADAPTER if index % 2 else RIG_BASE
    text, is_done, code = "", False, None
    try:
        with client.stream("POST", "/v1/completions", json=BODY | {"model": model}) as response:
            assert response.status_code == 200
            for line in response.iter_lines():
                is_done = is_done or line == "data: [DONE]"
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        code = event["error"]["code"]
                        continue
                    if begun is not None and not text:
                        begun.append(index)
                    text += event["choices"][0]["text"]
    except httpx.RemoteProtocolError:
        assert code == "stream_cut"
        return "cut"
    assert is_done, "a stream ended as if it were whole"
    return text


def kill_amid(rig: Rig, client: httpx.Client, name: str) -> list[str]:
    """Reads all streams, and kills a process when the last of them has begun."""
    begun: list[int] = []
    with ThreadPoolExecutor(STREAMS) as pool:
        with held(rig):
            answers = [pool.submit(read_stream, client, index, begun) for index in range(STREAMS)]
            eventually(lambda: len(begun) == STREAMS)
            os.kill(processes(name)[0], signal.SIGKILL)
        return [answer.result() for answer in answers]


def num_lists(client: httpx.Client) -> float:
    return metric(client, "loraplex_http_answers_total", route="/v1/models", status="200")


def test_each_scrape_tells_the_sum_over_all_ingresses(client: httpx.Client) -> None:
    before = num_lists(client)
    for _ in range(20):
        assert client.get("/v1/models").status_code == 200
    eventually(lambda: num_lists(client) == before + 20)
    assert [num_lists(client) for _ in range(10)] == [before + 20] * 10
    assert "ingress=" not in client.get("/metrics").text


def test_only_the_streams_of_a_killed_ingress_break_and_its_requests_are_aborted(
    rig: Rig,
    client: httpx.Client,
) -> None:
    with ThreadPoolExecutor(1) as pool:
        warm = pool.submit(read_stream, client, 1)
        assert warm.result() == WHOLE
    shown = num_lists(client)
    answers = kill_amid(rig, client, INGRESS)
    assert set(answers) == {WHOLE, "cut"}
    eventually(lambda: metric(client, "vllm:num_requests_running") == 0)
    assert read_stream(client, 1) == WHOLE
    assert num_lists(client) == shown  # also what the killed one had counted
    eventually(lambda: len(processes(INGRESS)) == 2)
    eventually(lambda: is_ready_everywhere(client))
    assert {num_lists(client) for _ in range(10)} == {shown}


def test_without_its_controller_serve_goes_on(rig: Rig, client: httpx.Client) -> None:
    before = processes(CONTROLLER)
    assert kill_amid(rig, client, CONTROLLER) == [WHOLE] * STREAMS
    eventually(lambda: bool(processes(CONTROLLER)) and processes(CONTROLLER) != before)
    with ThreadPoolExecutor(STREAMS) as pool:
        answers = pool.map(lambda index: read_stream(client, index), range(STREAMS))
        assert list(answers) == [WHOLE] * STREAMS


def test_another_proxy_takes_the_place_of_a_killed_one(rig: Rig, client: httpx.Client) -> None:
    [before] = processes(PROXY)
    os.kill(before, signal.SIGKILL)
    eventually(lambda: accepts_connections(client))
    assert before not in processes(PROXY)
    # The requests that the killed one had forwarded are not held for ever.
    eventually(lambda: metric(client, "vllm:num_requests_running") == 0)
    assert read_stream(client, 1) == WHOLE


def accepts_connections(client: httpx.Client) -> bool:
    try:
        return client.get("/ready").status_code == 200
    except httpx.TransportError:
        return False

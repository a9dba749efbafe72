"""Both Serve applications as they run, over HTTP, with the paced engine: routes, streams, refusals,
clients that leave, an engine that dies, a registry that moves.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest
from ray import serve

from registry.catalog import Catalog
from serve_app.config import MigrationArgs
from serve_app.control.base_status import ReplicaCounts, count_replicas, read_status
from tests.fakes_engine import CRASH_TOKEN, REFUSED
from tests.fakes_registry import UNREADABLE
from tests.serve_rig import (
    FRONT_TIMEOUT_S,
    RIG_ADAPTER,
    RIG_BASE,
    Rig,
    deploy,
    held,
    metric,
    processes,
    rig_args,
    scrape,
    wait_ready,
)
from tests.waiting import eventually, until

pytestmark = pytest.mark.serve

RATE = 200.0
MANY_POLLS = 12
MODELS = (RIG_BASE, RIG_ADAPTER, f"{RIG_BASE}:{RIG_ADAPTER}", f"{RIG_BASE}@1:{RIG_ADAPTER}@1")


@pytest.fixture(scope="module")
def rig(serve_port: int, tmp_path_factory: pytest.TempPathFactory) -> Rig:
    folder = tmp_path_factory.mktemp("registry")
    running = deploy(serve_port, rig_args(RATE, RIG_BASE, migration=MigrationArgs(limit=0)), folder)
    wait_ready(running)
    return running


@pytest.fixture
def client(rig: Rig) -> Iterator[httpx.Client]:
    limits = httpx.Limits(max_connections=300)
    with httpx.Client(base_url=rig.url, timeout=120, limits=limits) as connection:
        yield connection


def completion(**fields: object) -> dict[str, object]:
    return {"model": RIG_BASE, "prompt": "abc", "max_tokens": 7} | fields


def events(text: str) -> list[dict[str, object]]:
    """The JSON of every data line; the stream must end with [DONE]."""
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def text_of(chunks: list[dict[str, object]]) -> str:
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])  # type: ignore[attr-defined]


def is_idle(client: httpx.Client) -> bool:
    return metric(client, "vllm:num_requests_running") == 0


def error_of(response: httpx.Response) -> dict[str, object]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "Traceback" not in response.text
    return dict(error)


# Routes and shapes


@pytest.mark.parametrize(
    "path", ["/live", "/health", "/ready", "/metrics", "/v1/models", f"/v1/models/{RIG_BASE}"]
)
def test_operators_routes_answer_get_and_head(client: httpx.Client, path: str) -> None:
    assert client.get(path).status_code == 200
    head = client.head(path)
    assert (head.status_code, head.text) == (200, "")


def test_every_process_counts_the_failures_of_its_background_tasks(client: httpx.Client) -> None:
    loops = {"ingress": "report", "manager": "watcher", "replica": "watch-engine"}
    loops["engine"] = "heartbeat"

    def are_counted() -> bool:
        lines = client.get("/metrics").text.splitlines()
        counts = [line for line in lines if line.startswith("loraplex_task_failures_total{")]
        return all(
            any(f'process="{process}"' in line and f'task="{task}"' in line for line in counts)
            for process, task in loops.items()
        )

    eventually(are_counted)


def test_the_fleet_reads_what_serve_s_status_says(rig: Rig) -> None:
    found = read_status().applications
    assert found == serve.status().applications
    (base,) = found.keys() - {"api"}
    assert found["api"].status == "RUNNING"
    assert count_replicas(found[base]) == ReplicaCounts(1, 1, 0)


def test_models_are_listed_with_their_parents(client: httpx.Client) -> None:
    data = client.get("/v1/models").json()["data"]
    assert [(model["id"], model["parent"]) for model in data] == [
        (RIG_BASE, None),
        (RIG_ADAPTER, RIG_BASE),
    ]
    assert data[0]["max_model_len"] == 4096


@pytest.mark.parametrize("model", MODELS)
def test_every_spelling_of_a_model_is_found_and_answers(client: httpx.Client, model: str) -> None:
    assert client.get(f"/v1/models/{model}").json()["id"] == model
    answer = client.post("/v1/completions", json=completion(model=model)).json()
    assert (answer["model"], answer["choices"][0]["text"]) == (model, "abcabca")


def test_a_chat_runs_through_the_bases_template(client: httpx.Client) -> None:
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": RIG_ADAPTER, "messages": messages, "max_tokens": 8}
    answer = client.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] == "<user>hi"
    assert answer["usage"]["prompt_tokens"] == len("<user>hi\n<assistant>")


def test_a_stream_says_the_same_as_a_whole_answer(client: httpx.Client) -> None:
    whole = client.post("/v1/completions", json=completion(max_tokens=30)).json()
    body = completion(max_tokens=30, stream=True, stream_options={"include_usage": True})
    response = client.post("/v1/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = events(response.text)
    assert text_of(chunks) == whole["choices"][0]["text"]
    assert chunks[-1]["usage"] == whole["usage"]
    assert chunks[-1]["choices"] == []


def test_several_prompts_and_choices_of_one_request_all_come_back(client: httpx.Client) -> None:
    """Parallel handle calls inside one HTTP request would hang in Serve's router."""
    prompts = [f"{chr(97 + i)}z" for i in range(8)]
    body = completion(prompt=prompts, n=3, max_tokens=4)
    choices = client.post("/v1/completions", json=body).json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(24))
    assert [choice["text"] for choice in choices] == [p * 2 for p in prompts for _ in range(3)]


def test_a_stop_string_ends_the_choice_in_the_engine_too(client: httpx.Client) -> None:
    body = completion(prompt="abcdefgh", max_tokens=4000, stop="fg")
    choice = client.post("/v1/completions", json=body).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("abcde", "stop")
    eventually(lambda: is_idle(client))


def test_text_becomes_ids_and_text_again(client: httpx.Client) -> None:
    tokenized = client.post("/tokenize", json={"prompt": "abc"}).json()
    assert tokenized["count"] == 3
    answer = client.post("/detokenize", json={"tokens": tokenized["tokens"]}).json()
    assert answer == {"prompt": "abc"}
    assert client.get("/tokenizer_info").json()["eos_token"] == "<eos>"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/models/unknown", 404),
        ("GET", "/v1/completions", 405),
        ("PUT", "/tokenize", 405),
        ("GET", "/redoc", 404),
    ],
)
def test_a_wrong_path_or_method_has_the_error_shape(
    client: httpx.Client, method: str, path: str, status: int
) -> None:
    response = client.request(method, path)
    assert response.status_code == status
    assert response.headers["x-should-retry"] == "false"
    error_of(response)


@pytest.mark.parametrize(
    ("content", "content_type", "status"),
    [
        (b"{", "application/json", 400),
        (b"[1]", "application/json", 400),
        (b'{"model": "base", "prompt": "a", "n": 1e9}', "application/json", 400),
        (b"model=base", "application/x-www-form-urlencoded", 415),
        (b'"' + b"x" * (1 << 20) + b'"', "application/json", 413),
    ],
)
def test_a_bad_body_has_the_error_shape(
    client: httpx.Client, content: bytes, content_type: str, status: int
) -> None:
    headers = {"content-type": content_type}
    response = client.post("/v1/completions", content=content, headers=headers)
    assert response.status_code == status
    error_of(response)


def test_a_compressed_body_is_refused(client: httpx.Client) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    response = client.post("/v1/completions", content=gzip.compress(b"{}"), headers=headers)
    assert response.status_code == 415
    assert "its content-encoding is 'gzip'" in error_of(response)["message"]
    for value, status in (("identity", 400), ("identity, identity", 400), ("identity, br", 415)):
        headers["content-encoding"] = value
        answer = client.post("/v1/completions", content=b"{}", headers=headers)
        assert answer.status_code == status
    twice = [("content-type", "application/json"), ("content-encoding", "identity")]
    twice.append(("content-encoding", "gzip"))
    assert client.post("/v1/completions", content=b"{}", headers=twice).status_code == 415


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ({"model": "unknown"}, 404, "model_not_found"),
        ({"model": f"{RIG_BASE}:unknown"}, 404, "model_not_found"),
        ({"model": f"{RIG_BASE}@7"}, 404, "model_not_found"),
        ({"model": "meta-llama/Llama-3.1-8B-Instruct"}, 404, "model_not_found"),
        ({"max_tokens": 70_000}, 400, "context_length_exceeded"),
        ({"prompt": [[1, 2], [9_999_999]]}, 400, "invalid_value"),
        ({"temperature": "hot"}, 400, "invalid_value"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_keeps_its_status_streamed_or_not(
    client: httpx.Client, fields: dict[str, object], status: int, code: str, stream: bool
) -> None:
    response = client.post("/v1/completions", json=completion(stream=stream, **fields))
    assert (response.status_code, error_of(response)["code"]) == (status, code)


def test_the_clients_request_id_is_echoed_once_and_need_not_be_unique(
    client: httpx.Client,
) -> None:
    def ask(i: int) -> httpx.Response:
        body = completion(prompt=f"{chr(97 + i)}!", max_tokens=20)
        return client.post("/v1/completions", json=body, headers={"x-request-id": "same"})

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(16)))
    assert {tuple(a.headers.get_list("x-request-id")) for a in answers} == {("same",)}
    assert [a.json()["choices"][0]["text"] for a in answers] == [
        f"{chr(97 + i)}!" * 10 for i in range(16)
    ]
    assert len({answer.json()["id"] for answer in answers}) == 16
    assert client.get("/live").headers["x-request-id"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answers_id_is_made_of_the_bodys_request_id(client: httpx.Client, stream: bool) -> None:
    body = completion(request_id="mine-1", stream=stream)
    headers = {"x-request-id": "of-the-header"}
    response = client.post("/v1/completions", json=body, headers=headers)
    answers = events(response.text) if stream else [response.json()]
    assert {answer["id"] for answer in answers} == {"cmpl-mine-1"}
    assert response.headers.get_list("x-request-id") == ["of-the-header"]


# Clients that leave, and too many of them


def test_a_client_that_leaves_a_stream_ends_its_request(rig: Rig, client: httpx.Client) -> None:
    name = "vllm:request_success_total"
    before = metric(client, name, finished_reason="abort")
    body = completion(max_tokens=4000, stream=True, n=2)
    with held(rig):
        with client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()  # httpx closes the connection when nothing holds it
            next(lines)
            eventually(lambda: not is_idle(client))
        eventually(lambda: is_idle(client))
        eventually(lambda: metric(client, name, finished_reason="abort") == before + 2)


def give_up_waiting(rig: Rig, client: httpx.Client) -> None:
    """Closes the connection of a request without a stream as soon as the engine runs it."""
    content = json.dumps(completion(max_tokens=4000)).encode()
    with socket.create_connection(("127.0.0.1", rig.port)) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(content) + content
        )
        eventually(lambda: not is_idle(client))


def test_a_client_that_gives_up_waiting_ends_its_request(rig: Rig, client: httpx.Client) -> None:
    with held(rig):
        give_up_waiting(rig, client)
        eventually(lambda: is_idle(client))
        eventually(lambda: metric(client, "loraplex_open_engine_requests") == 0)


async def test_too_many_requests_are_told_to_come_back(rig: Rig, client: httpx.Client) -> None:
    """160 may run or wait at once; none of them ends before another is refused."""
    refused: list[httpx.Response] = []
    body = completion(max_tokens=4000, stream=True)

    async def ask(connection: httpx.AsyncClient) -> None:
        async with connection.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code == 200:
                await asyncio.Event().wait()
            await response.aread()
            refused.append(response)

    limits = httpx.Limits(max_connections=300)
    async with httpx.AsyncClient(base_url=rig.url, timeout=180, limits=limits) as connection:
        with held(rig):
            tasks = [asyncio.create_task(ask(connection)) for _ in range(240)]
            await until(lambda: bool(refused))
            assert len(refused) <= 240 - 160
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    answer = refused[0]
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) >= 1
    assert error_of(answer)["code"] == "overloaded"
    eventually(lambda: is_idle(client))


# Clients that mean harm


async def test_a_thousand_unfinished_bodies_stop_nobody_and_are_gone_at_the_deadline(
    rig: Rig, client: httpx.Client
) -> None:
    """A thousand bodies that never end, and a connection that sends nothing."""
    silent, silent_writer = await asyncio.open_connection("127.0.0.1", rig.port)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{"
    slow = []
    for _ in range(1001):
        slow.append(await asyncio.open_connection("127.0.0.1", rig.port))
        slow[-1][1].write(head)  # at once: a connection without a header has a deadline of its own
    answer = await asyncio.to_thread(client.post, "/v1/completions", json=completion())
    assert answer.status_code == 200
    for reader, writer in slow:
        async with asyncio.timeout(60 * FRONT_TIMEOUT_S):
            refusal = await reader.read()  # to the end of the connection
        assert refusal.startswith(b"HTTP/1.1 408 ")
        assert b"x-should-retry: true" in refusal
        writer.close()
    async with asyncio.timeout(60 * FRONT_TIMEOUT_S):
        assert await silent.read() == b""
    silent_writer.close()


async def test_a_long_header_costs_the_proxy_no_memory(rig: Rig, client: httpx.Client) -> None:
    (proxy,) = processes("ray::ProxyActor")
    before = psutil.Process(proxy).memory_info().rss
    for _ in range(4):
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
        with suppress(ConnectionError):
            writer.write(b"GET /live HTTP/1.1\r\nx-long: " + b"x" * 32 * 1024**2)
            await writer.drain()
        with suppress(ConnectionError):
            await reader.read()
        writer.close()
    assert psutil.Process(proxy).memory_info().rss - before < 32 * 1024**2
    assert client.get("/live", headers={"x-long": "x" * 64 * 1024}).status_code == 431


def test_a_request_id_that_is_no_ascii_gives_way_to_another(client: httpx.Client) -> None:
    for illegal in ("é".encode("latin-1"), b"x" * 10_000):
        answer = client.post(
            "/v1/completions", json=completion(), headers={b"x-request-id": illegal}
        )
        assert answer.status_code == 200
        assert answer.headers["x-request-id"].isascii()
        assert len(answer.headers["x-request-id"]) <= 128


def test_a_client_that_leaves_is_counted_however_it_leaves(rig: Rig, client: httpx.Client) -> None:
    before = metric(client, "loraplex_client_disconnects_total")
    body = completion(max_tokens=4000)
    with held(rig):
        with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
            lines = response.iter_lines()  # httpx closes the connection when nothing holds it
            next(lines)
            eventually(lambda: not is_idle(client))
        eventually(lambda: is_idle(client))
        give_up_waiting(rig, client)
        eventually(lambda: metric(client, "loraplex_client_disconnects_total") == before + 2)
    assert client.post("/v1/completions", json=completion(stream=True)).status_code == 200
    assert metric(client, "loraplex_client_disconnects_total") == before + 2


def test_a_stream_that_nobody_reads_frees_its_rows(rig: Rig, client: httpx.Client) -> None:
    body = completion(max_tokens=4000, stream=True, n=16, prompt="x" * 64, logprobs=5)
    content = json.dumps(body).encode()
    # The engine has sent more than all buffers hold, but none of its tokens is the last.
    with held(rig, at=3900), socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", rig.port))
        slow.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(content) + content
        )
        eventually(lambda: not is_idle(client))
        before = metric(client, "vllm:request_success_total", finished_reason="length")
        eventually(lambda: is_idle(client))
    assert metric(client, "vllm:request_success_total", finished_reason="length") == before


# A registry that moves


def test_an_adapter_whose_files_are_away_fails_alone_and_comes_back(
    rig: Rig, client: httpx.Client
) -> None:
    known = rig.registry.snapshot()
    late = rig.registry.add_adapter("late", known.bases[0], has_files=False)
    rig.registry.write(Catalog(known.bases, (*known.adapters, late)))
    eventually(lambda: client.get("/v1/models/late").status_code == 200)
    refused = client.post("/v1/completions", json=completion(model="late", stream=True))
    assert refused.status_code == 503
    assert client.post("/v1/completions", json=completion()).status_code == 200
    (rig.registry.folder / late.digest).mkdir()
    assert client.post("/v1/completions", json=completion(model="late")).status_code == 200


def test_an_adapter_that_the_engine_refuses_is_not_read_again_at_once(
    rig: Rig, client: httpx.Client
) -> None:
    known = rig.registry.snapshot()
    bad, other = (rig.registry.add_adapter(name, known.bases[0]) for name in ("bad", "other"))
    tries = rig.registry.folder / bad.digest / REFUSED
    tries.touch()
    rig.registry.write(Catalog(known.bases, (*known.adapters, bad, other)))
    eventually(lambda: client.get("/v1/models/bad").status_code == 200)
    answers = [client.post("/v1/completions", json=completion(model="bad")) for _ in range(5)]
    assert {answer.status_code for answer in answers} == {422}  # which clients do not retry
    assert {error_of(answer)["code"] for answer in answers} == {"adapter_unsupported"}
    assert all("layer 3 holds NaN" in str(error_of(answer)["message"]) for answer in answers)
    assert not any("retry-after" in answer.headers for answer in answers)
    assert tries.read_text() == "read\n"
    assert client.post("/v1/completions", json=completion(model="other")).status_code == 200
    eventually(lambda: metric(client, "loraplex_quarantined_versions", stage="load") == 1)
    assert metric(client, "loraplex_quarantined_versions", stage="fetch") == 0
    tries.unlink()

    def is_taken_back() -> bool:
        answer = client.post("/v1/completions", json=completion(model="bad"))
        return answer.status_code == 200

    eventually(is_taken_back)
    eventually(lambda: metric(client, "loraplex_quarantined_versions", stage="load") == 0)


def test_what_is_known_is_served_while_the_registry_is_down(rig: Rig, client: httpx.Client) -> None:
    catalog = rig.registry.folder / "catalog.json"
    content = catalog.read_bytes()
    catalog.unlink()
    unknown = completion(model="unknown")
    eventually(lambda: client.post("/v1/completions", json=unknown).status_code == 503)
    assert client.post("/v1/completions", json=completion()).status_code == 200
    assert client.get("/ready").status_code == 200
    catalog.write_bytes(content)
    eventually(lambda: client.post("/v1/completions", json=unknown).status_code == 404)


def test_a_registry_that_stays_away_for_many_polls_takes_nothing_known_away(
    rig: Rig, client: httpx.Client
) -> None:
    """Polls are counted, for ten minutes are a hundred of them or a thousand."""
    known = rig.registry.snapshot()
    cold = rig.registry.add_adapter("cold", known.bases[0], has_files=False)
    warm = rig.registry.add_adapter("warm", known.bases[0])
    rig.registry.write(Catalog(known.bases, (*known.adapters, cold, warm)))
    eventually(lambda: client.get("/v1/models/cold").status_code == 200)
    listed = client.get("/v1/models").json()["data"]
    (rig.registry.folder / "catalog.json").rename(rig.registry.folder / "catalog.away")
    last = rig.registry.num_vain_polls + MANY_POLLS
    while rig.registry.num_vain_polls < last:
        for model in (*MODELS, "warm"):
            answer = client.post("/v1/completions", json=completion(model=model))
            assert answer.status_code == 200
        for streamed in (False, True):
            body = completion(model="cold", stream=streamed)
            refused = client.post("/v1/completions", json=body)
            assert refused.status_code == 503
            assert error_of(refused)["code"] == "registry_unavailable"
            assert int(refused.headers["retry-after"]) >= 1
        assert client.get("/ready").status_code == 200
        assert client.get("/health").status_code == 200
    assert client.get("/v1/models").json()["data"] == listed
    (rig.registry.folder / cold.digest).mkdir()
    (rig.registry.folder / "catalog.away").rename(rig.registry.folder / "catalog.json")
    assert client.post("/v1/completions", json=completion(model="cold")).status_code == 200
    unknown = completion(model="unknown")
    eventually(lambda: client.post("/v1/completions", json=unknown).status_code == 404)


def test_an_adapter_for_which_the_disk_has_no_room_fails_alone(
    rig: Rig, client: httpx.Client
) -> None:
    known = rig.registry.snapshot()
    large = rig.registry.add_adapter("large", known.bases[0])
    no_room = rig.registry.folder / f"{large.digest}.full"
    no_room.touch()
    rig.registry.write(Catalog(known.bases, (*known.adapters, large)))
    eventually(lambda: client.get("/v1/models/large").status_code == 200)
    for _ in range(2):
        refused = client.post("/v1/completions", json=completion(model="large"))
        assert refused.status_code == 503
        assert error_of(refused)["code"] == "cache_full"
        assert int(refused.headers["retry-after"]) >= 1
        assert client.post("/v1/completions", json=completion()).status_code == 200
    no_room.unlink()
    assert client.post("/v1/completions", json=completion(model="large")).status_code == 200


@pytest.mark.parametrize("text", ["", "full"])
def test_a_disk_that_fails_takes_no_metric_of_an_engine_away(
    rig: Rig, client: httpx.Client, text: str
) -> None:
    unreadable = rig.registry.folder / UNREADABLE
    unreadable.write_text(text)
    eventually(lambda: "loraplex_cache_bytes{" not in scrape(client))  # which has an engine's
    unreadable.unlink()
    eventually(lambda: "loraplex_cache_bytes{" in scrape(client))


# An engine that dies


def test_without_migration_an_engine_that_dies_ends_the_stream_and_is_replaced(
    client: httpx.Client,
) -> None:
    prompt = [CRASH_TOKEN, 1, 2]
    response = client.post("/v1/completions", json=completion(prompt=prompt, stream=True))
    assert response.status_code == 200
    assert "event: error" in response.text
    assert events(response.text)[-1]["error"]["code"] == "engine_unavailable"  # type: ignore[index]
    eventually(lambda: client.get("/health").status_code == 503)
    refused = client.post("/v1/completions", json=completion())
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    eventually(lambda: client.get("/ready").status_code == 200, 120.0)
    assert client.post("/v1/completions", json=completion()).status_code == 200


# A new version of the base


def test_a_new_version_of_a_base_takes_over_without_a_failed_request(
    rig: Rig, client: httpx.Client, tmp_path: Path
) -> None:
    known = rig.registry.snapshot()
    second = rig.registry.add_base(RIG_BASE, version=2)
    rig.registry.write(Catalog((*known.bases, second), ()))
    statuses: set[int] = set()

    def has_taken_over() -> bool:
        # A request during the hand-over goes to the version that its name means at that moment.
        statuses.add(client.post("/v1/completions", json=completion()).status_code)
        models = client.get("/v1/models").json()["data"]
        explicit = client.post("/v1/completions", json=completion(model=f"{RIG_BASE}@1"))
        return [model["root"] for model in models] == [f"{RIG_BASE}@2"] and (
            explicit.status_code == 404
        )

    eventually(has_taken_over, 120.0)
    assert client.post("/v1/completions", json=completion()).status_code == 200
    assert statuses == {200}

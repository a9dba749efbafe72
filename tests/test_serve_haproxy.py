"""The whole server behind HAProxy, with two bases: what clients of the Python proxy see, they see
here too."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
import yaml

from tests.demo_server import (
    ADAPTERS,
    BASE,
    ROOT,
    DemoServer,
    check_end,
    home_beside,
    open_ports,
    run_cli,
    serving,
    write_config,
)

pytestmark = pytest.mark.serve
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def server(demo_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoServer]:
    folder = tmp_path_factory.mktemp("haproxy")
    config = folder / "two_bases.yaml"
    url = write_config(ROOT / "configs" / "two_bases.yaml", config, device="cpu")
    content = yaml.safe_load(config.read_text())
    content["applications"][0]["args"]["ingress"] = {"body_timeout_s": 2}
    config.write_text(yaml.safe_dump(content))
    home = home_beside(demo_home, folder)
    run_cli(home, "demo", "--two-bases")
    with serving(home, config, url, "--haproxy") as running:
        yield running


@pytest.fixture
def api(server: DemoServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def test_a_stream_has_the_words_of_the_whole_answer(api: openai.OpenAI) -> None:
    asked = {"model": f"{BASE}:pirate", "messages": MESSAGES, "temperature": 0, "max_tokens": 20}
    whole = api.chat.completions.create(**asked).choices[0].message.content  # type: ignore[call-overload]
    chunks = api.chat.completions.create(**asked, stream=True)  # type: ignore[call-overload]
    parts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(parts) == whole
    assert len(parts) > 10  # they came one by one


def test_a_server_on_loopback_opens_no_port_to_other_machines(server: DemoServer) -> None:
    assert open_ports(server) == []


def test_refusals_keep_their_status_and_body(api: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="unknown"):
        api.chat.completions.create(model="unknown", messages=MESSAGES)  # type: ignore[arg-type]
    with pytest.raises(openai.BadRequestError, match="temperature"):
        api.chat.completions.create(model=BASE, messages=MESSAGES, temperature=-1)  # type: ignore[arg-type]


def test_a_client_that_leaves_frees_its_place(server: DemoServer) -> None:
    body = {"model": BASE, "prompt": "Once", "stream": True, "max_tokens": 1500}
    body |= {"ignore_eos": True}
    with (
        httpx.Client(timeout=180) as http,
        http.stream("POST", f"{server.url}/v1/completions", json=body) as answer,
    ):
        assert answer.status_code == 200
        lines = answer.iter_lines()  # httpx closes the connection when nothing holds the iterator
        next(lines)
        wait_for_running(server, 1)
    wait_for_running(server, 0)


def test_a_slow_body_is_answered_with_408(server: DemoServer) -> None:
    port = int(server.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=120) as slow:
        slow.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/json\r\ncontent-length: 100\r\n\r\n{"
        )
        assert slow.recv(4096).startswith(b"HTTP/1.1 408 ")


def test_what_serve_cannot_decode_or_forward_is_no_failure_of_the_server(
    server: DemoServer,
) -> None:
    with httpx.Client(base_url=server.url, timeout=180) as http:
        answer = http.get("/live", headers={b"x-request-id": "é".encode("latin-1")})
        assert answer.status_code == 200
        assert answer.headers["x-request-id"].isascii()
        for headers in ({"x-long": "x" * 64_000}, {f"x-{i}": "" for i in range(110)}):
            assert 400 <= http.get("/live", headers=headers).status_code < 500
        assert http.get("/v1/models", headers={"host": "evil.example"}).status_code == 403


def test_two_bases_behind_one_endpoint(server: DemoServer) -> None:
    with httpx.Client(base_url=server.url, timeout=120) as http:
        listed = {model["id"] for model in http.get("/v1/models").json()["data"]}
        assert {BASE, "tiny-qwen3", *ADAPTERS} == listed
        body = {"prompt": "Hello", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        texts = set()
        for name in (BASE, "tiny-qwen3"):
            answer = http.post("/v1/completions", json=body | {"model": name}).json()
            assert answer["usage"]["completion_tokens"] == 5
            texts.add(answer["choices"][0]["text"])
        assert len(texts) == 2
        wrong = http.post("/v1/completions", json=body | {"model": "tiny-qwen3:pirate"})
        assert wrong.status_code == 404


def test_ctrl_c_leaves_nothing_running(server: DemoServer) -> None:
    """The last test of its server, which it ends."""
    check_end(server)


def wait_for_running(server: DemoServer, count: int) -> None:
    """The metric follows the engine by a message."""
    deadline = time.monotonic() + 180
    while (found := server.metric("vllm:num_requests_running")) != count:
        assert time.monotonic() < deadline, f"{found} run, not {count}"
        time.sleep(0.1)

"""The whole server behind HAProxy: what clients of the Python proxy see, they see here too."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.demo_server import ROOT, DemoServer, open_ports, serving, write_config

pytestmark = pytest.mark.serve
MODEL = "smollm2-135m-instruct"
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def server(demo_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoServer]:
    config = tmp_path_factory.mktemp("config") / "quickstart.yaml"
    url = write_config(ROOT / "configs" / "quickstart.yaml", config, dtype="float32", device="cpu")
    with serving(demo_home, config, url, "--haproxy") as running:
        yield running


@pytest.fixture
def api(server: DemoServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def test_a_stream_has_the_words_of_the_whole_answer(api: openai.OpenAI) -> None:
    asked = {"model": f"{MODEL}:pirate", "messages": MESSAGES, "temperature": 0, "max_tokens": 20}
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
        api.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=-1)  # type: ignore[arg-type]


def test_a_client_that_leaves_frees_its_place(server: DemoServer) -> None:
    body = {"model": MODEL, "prompt": "Once", "stream": True, "max_tokens": 1500}
    body |= {"ignore_eos": True}
    with (
        httpx.Client(timeout=60) as http,
        http.stream("POST", f"{server.url}/v1/completions", json=body) as answer,
    ):
        assert answer.status_code == 200
        next(answer.iter_lines())
        wait_for_running(server, 1)
    wait_for_running(server, 0)


def wait_for_running(server: DemoServer, count: int) -> None:
    """The metric follows the engine by a message."""
    deadline = time.monotonic() + 60
    while (found := server.metric("vllm:num_requests_running")) != count:
        assert time.monotonic() < deadline, f"{found} run, not {count}"
        time.sleep(0.1)

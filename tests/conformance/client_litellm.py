"""litellm: its client, and its proxy in front of the server."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import litellm
import pytest
from openai import OpenAI

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
READY_S = 300.0


@pytest.fixture(params=["openai", "hosted_vllm"])
def ask(request, base_url, model):
    def call(function=litellm.completion, **fields):
        return function(
            model=f"{request.param}/{model}",
            api_base=base_url,
            api_key="none",
            temperature=0,
            max_tokens=48,
            messages=MESSAGES,
            **fields,
        )

    return call


def test_completion(ask):
    assert "Paris" in ask().choices[0].message.content


def test_stream(ask):
    parts = [chunk.choices[0].delta.content or "" for chunk in ask(stream=True)]
    assert "Paris" in "".join(parts)


async def test_async(ask):
    assert "Paris" in (await ask(litellm.acompletion)).choices[0].message.content


def test_tool_call(ask):
    call = ask(tools=[TOOL], tool_choice="required").choices[0].message.tool_calls[0]
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")


@pytest.fixture(scope="module")
def proxy(base_url, model, tmp_path_factory):
    """The proxy with one model; its address and its key, without which it does not start."""
    key = f"sk-{secrets.token_hex(16)}"
    folder = tmp_path_factory.mktemp("proxy")
    params = {"model": f"openai/{model}", "api_base": base_url, "api_key": "none"}
    config = folder / "config.json"  # JSON is YAML
    settings = {
        "model_list": [{"model_name": "m", "litellm_params": params}],
        "general_settings": {"master_key": key},
    }
    config.write_text(json.dumps(settings))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(Path(sys.executable).with_name("litellm")), "--config", str(config)]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    log = folder / "log"
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=os.environ, cwd=folder)
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + READY_S
        while True:
            assert process.poll() is None, log.read_text()[-2000:]
            assert time.monotonic() < deadline, log.read_text()[-2000:]
            try:
                if httpx.get(f"{address}/health/liveliness", timeout=5).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.5)
        yield address, key
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture
def behind(proxy):
    address, key = proxy
    return OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0)


@pytest.mark.parametrize("stream", [False, True])
def test_proxy(behind, stream):
    answer = behind.chat.completions.create(
        model="m", messages=MESSAGES, max_tokens=32, temperature=0, stream=stream
    )
    if stream:
        text = "".join(c.choices[0].delta.content or "" for c in answer if c.choices)
    else:
        text = answer.choices[0].message.content
    assert "Paris" in text


def test_proxy_passes_tools_on(behind):
    answer = behind.chat.completions.create(
        model="m", messages=MESSAGES, tools=[TOOL], tool_choice="required", max_tokens=48
    )
    call = answer.choices[0].message.tool_calls[0]
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")


def test_proxy_passes_responses_on(behind):
    answer = behind.responses.create(
        model="m", input="What is the capital of France?", max_output_tokens=32, temperature=0
    )
    assert "Paris" in answer.output_text

"""/v1/responses and /v1/messages over HTTP, on the CPU engine with a random base, the hardest
adversary of demanded forms."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel

from registry.catalog import Catalog
from tests.fakes_registry import FolderRegistry
from tests.serve_folders import make_adapter_folder, make_base_folder
from tests.serve_rig import Rig, metric, rig_args, run_on_cpu
from tests.test_serve_dialects import FLAT_TOOLS, INPUT_TOOLS, check_anthropic, events_of
from tests.test_serve_tools import CHATML
from tests.waiting import eventually

BASE = "dialect-base"
GREEDY = {"temperature": 0}
USER = [{"role": "user", "content": "hello"}]
# The random base would think until its limit.
SILENT: Any = {"effort": "none"}
NO_THINKING = {"type": "disabled"}
# Larger than a body that the ingress itself reads.
LONG = {"client_metadata": {"k": "x" * 20_000}}


class Point(BaseModel):
    x: bool
    kind: Literal["a", "b"]


@pytest.fixture(scope="module")
def rig(serve_port: int, tmp_path_factory: pytest.TempPathFactory) -> Rig:
    folder = tmp_path_factory.mktemp("dialects")
    registry = FolderRegistry(folder)
    base = registry.add_base(BASE, has_files=False)
    base_folder = make_base_folder(folder / base.digest)
    config = json.loads((base_folder / "config.json").read_text())
    config |= {"max_position_embeddings": 2048}
    (base_folder / "config.json").write_text(json.dumps(config))
    (base_folder / "chat_template.jinja").write_text(CHATML)
    adapter = registry.add_adapter("pirate", base, 1, aliases=("champion",), has_files=False)
    make_adapter_folder(folder / adapter.digest)
    registry.write(Catalog((base,), (adapter,)))
    return run_on_cpu(serve_port, registry, rig_args(200, BASE), kv_cache_bytes=8 * 1024**2)


@pytest.fixture
def client(rig: Rig) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{rig.url}/v1", api_key="none", max_retries=0) as connection:
        yield connection


@pytest.fixture
def http(rig: Rig) -> Iterator[httpx.Client]:
    headers = {"x-api-key": "none", "anthropic-version": "2023-06-01"}
    with httpx.Client(base_url=rig.url, timeout=180, headers=headers) as connection:
        yield connection


def message(http: httpx.Client, **fields: object) -> dict[str, Any]:
    body = {"model": BASE, "messages": USER, "max_tokens": 16, **GREEDY, **fields}
    answer = http.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    return check_anthropic(answer.json(), "Message")


def message_events(http: httpx.Client, **fields: object) -> list[dict[str, Any]]:
    body = {"model": BASE, "messages": USER, "max_tokens": 16, "stream": True, **GREEDY, **fields}
    answer = http.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return events_of(answer.content)


@pytest.mark.parametrize("model", [BASE, f"{BASE}:pirate"])
def test_all_endpoints_give_one_answer(
    client: openai.OpenAI, http: httpx.Client, model: str
) -> None:
    options: Any = {"temperature": 0, "extra_body": {"ignore_eos": True}}
    chat = client.chat.completions.create(model=model, messages=USER, max_tokens=16, **options)
    text, usage = chat.choices[0].message.content, chat.usage
    assert usage is not None
    whole = client.responses.create(model=model, input="hello", max_output_tokens=16, **options)
    assert whole.output_text == text
    assert whole.status == "incomplete"
    assert whole.usage is not None
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (usage.prompt_tokens, 16)
    with client.responses.stream(
        model=model, input="hello", max_output_tokens=16, **options
    ) as stream:
        parts = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert "".join(parts) == text
    body = message(http, model=model, ignore_eos=True)
    assert body["content"] == [{"type": "text", "text": text}]
    assert body["stop_reason"] == "max_tokens"
    events = message_events(http, model=model, ignore_eos=True)
    deltas = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(deltas) == text
    assert all(check_anthropic(e) for e in events if e["type"] != "ping")


def test_a_long_body_is_read_by_a_worker(client: openai.OpenAI, http: httpx.Client) -> None:
    short = client.responses.create(model=BASE, input="hello", max_output_tokens=8, **GREEDY)
    long = client.responses.create(
        model=BASE, input="hello", max_output_tokens=8, extra_body=LONG, **GREEDY
    )
    assert long.output_text == short.output_text
    assert message(http, **LONG)["content"] == message(http)["content"]


def test_a_count_of_tokens_equals_the_usage(http: httpx.Client) -> None:
    prompt = {"model": BASE, "messages": USER, "system": "Be brief.", "tools": INPUT_TOOLS}
    answer = http.post("/v1/messages/count_tokens", json=prompt)
    assert answer.status_code == 200, answer.text
    for _ in range(2):  # the second finds the prompt in the cache
        assert answer.json() == {"input_tokens": message(http, **prompt)["usage"]["input_tokens"]}


def test_parsed_answers_have_the_schema(client: openai.OpenAI, http: httpx.Client) -> None:
    answer = client.responses.parse(
        model=BASE, input="hello", text_format=Point, max_output_tokens=400, reasoning=SILENT
    )
    assert isinstance(answer.output_parsed, Point)
    schema = {**Point.model_json_schema(), "additionalProperties": False}
    form = {"format": {"type": "json_schema", "schema": schema}}
    body = message(http, output_config=form, max_tokens=400, thinking=NO_THINKING)
    Point.model_validate_json(body["content"][0]["text"])


def test_demanded_calls_arrive_whole_and_in_events(
    client: openai.OpenAI, http: httpx.Client
) -> None:
    choice: Any = {"type": "function", "name": "now"}
    tools: Any = FLAT_TOOLS
    answer = client.responses.create(
        model=BASE, input="time?", tools=tools, tool_choice=choice, reasoning=SILENT
    )
    (call,) = answer.output
    assert call.type == "function_call"
    assert (call.name, call.arguments) == ("now", "{}")
    history: Any = [
        {"role": "user", "content": "time?"},
        call.model_dump(exclude_none=True),
        {"type": "function_call_output", "call_id": call.call_id, "output": "12:00"},
    ]
    again = client.responses.create(model=BASE, input=history, tools=tools, max_output_tokens=4)
    assert again.usage is not None
    assert again.usage.input_tokens > (answer.usage.input_tokens if answer.usage else 0)
    named = {"type": "tool", "name": "now"}
    options = {"tools": INPUT_TOOLS, "tool_choice": named, "thinking": NO_THINKING}
    body = message(http, max_tokens=200, **options)
    (block,) = body["content"]
    assert (block["type"], block["name"], block["input"]) == ("tool_use", "now", {})
    assert body["stop_reason"] == "tool_use"
    events = message_events(http, max_tokens=200, **options)
    kinds = [event["type"] for event in events]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 1
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    results = [
        *USER,
        {"role": "assistant", "content": body["content"]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": block["id"], "content": "12:00"}],
        },
    ]
    assert message(http, messages=results, tools=INPUT_TOOLS)["role"] == "assistant"


def test_thinking_is_a_block_and_an_item_of_its_own(
    client: openai.OpenAI, http: httpx.Client
) -> None:
    answer = client.responses.create(
        model=BASE, input="hello", reasoning={"effort": "high"}, max_output_tokens=12, **GREEDY
    )
    (item,) = answer.output
    assert item.type == "reasoning"
    assert answer.usage is not None
    assert answer.usage.output_tokens_details.reasoning_tokens == answer.usage.output_tokens
    body = message(http, thinking={"type": "adaptive"}, max_tokens=12)
    assert [block["type"] for block in body["content"]] == ["thinking"]
    again = [*USER, {"role": "assistant", "content": body["content"]}, *USER]
    message(http, messages=again)


def test_errors_of_responses_are_those_of_the_client(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="nothing", input="hello")
    with pytest.raises(openai.NotFoundError, match="is not stored"):
        client.responses.retrieve("resp_1")
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=BASE, input="x" * 5000)
    assert caught.value.param == "input"
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=BASE, input="x", previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"
    tool: Any = {"type": "function", "name": "f", "parameters": {"type": "array"}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=BASE, input="x", tools=[tool])
    assert caught.value.param == "tools.0.parameters.type"


def error_of(answer: httpx.Response, status: int, kind: str) -> str:
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert body["type"] == "error"
    assert body["error"]["type"] == kind
    assert answer.headers["x-should-retry"] == "false"
    ids = body["request_id"], answer.headers["request-id"], answer.headers["x-request-id"]
    assert len(set(ids)) == 1, ids
    text: str = body["error"]["message"]
    return text


def test_errors_of_messages_have_anthropics_shape(http: httpx.Client) -> None:
    body = {"model": BASE, "messages": USER, "max_tokens": 16}

    def post(path: str = "/v1/messages", **fields: object) -> httpx.Response:
        return http.post(path, json={**body, **fields})

    answer = post(model="nothing")
    error_of(answer, 404, "not_found_error")
    invalid = "invalid_request_error"
    assert "max_tokens" in error_of(post(max_tokens=0), 400, invalid)
    assert "messages.0" in error_of(post(messages=[5]), 400, invalid)
    error_of(post("/v1/messages/count_tokens", system=5), 400, invalid)
    error_of(post("/v1/messages/count_tokens", model="nothing"), 404, "not_found_error")
    error_of(http.post("/v1/messages", content=b"{"), 415, invalid)
    json_type = {"content-type": "application/json"}
    error_of(http.post("/v1/messages", content=b"{", headers=json_type), 400, invalid)
    error_of(http.get("/v1/messages"), 405, invalid)
    error_of(http.get("/v1/messages/batches"), 404, "not_found_error")
    long = post(messages=[{"role": "user", "content": "x" * 5000}])
    assert "maximum context length" in error_of(long, 400, invalid)


def test_a_stop_sequence_is_named(http: httpx.Client) -> None:
    text = message(http, ignore_eos=True)["content"][0]["text"]
    body = message(http, ignore_eos=True, stop_sequences=[text[3:5]])
    found = text.index(text[3:5])
    assert "".join(block["text"] for block in body["content"]) == text[:found]
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", text[3:5])


def test_requests_are_counted_by_their_endpoint(http: httpx.Client) -> None:
    def num_answers() -> float:
        labels = {"route": "/v1/messages", "status": "200"}
        return metric(http, "loraplex_http_answers_total", **labels)

    before = num_answers()
    message(http)
    eventually(lambda: num_answers() == before + 1)

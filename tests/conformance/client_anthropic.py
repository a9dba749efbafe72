"""anthropic: messages, streams, tools, tool results and count_tokens."""

from __future__ import annotations

import anthropic
import pytest

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
TOOL = {
    "name": "get_weather",
    "description": "Get the weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture
def client(url):
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=120)


@pytest.fixture
def fields(model):
    # The newest client has no argument for the temperature; the API still takes the field.
    greedy = {"temperature": 0.0}
    return {"model": model, "max_tokens": 64, "messages": MESSAGES, "extra_body": greedy}


def test_message(client, fields):
    answer = client.messages.create(**fields)
    assert answer.type == "message"
    assert answer.role == "assistant"
    assert "Paris" in answer.content[0].text
    assert answer.stop_reason in ("end_turn", "max_tokens")
    assert answer.usage.input_tokens > 0
    assert answer.usage.output_tokens > 0


def test_system(client, fields):
    answer = client.messages.create(system="You answer in one word.", **fields)
    assert answer.content[0].text


def test_stop_sequences(client, fields):
    answer = client.messages.create(stop_sequences=["Paris"], **fields)
    assert answer.stop_reason == "stop_sequence"
    assert answer.stop_sequence == "Paris"


def test_stream(client, fields):
    whole = client.messages.create(**fields).content[0].text
    with client.messages.stream(**fields) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole == final.content[0].text
    assert final.usage.output_tokens > 0


def test_raw_stream_events(client, fields):
    kinds = [event.type for event in client.messages.create(stream=True, **fields)]
    kinds = [kind for kind in kinds if kind != "ping"]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_count_tokens(client, model, fields):
    counted = client.messages.count_tokens(model=model, messages=MESSAGES)
    usage = client.messages.create(**fields).usage
    # The usage counts the tokens that were found in the cache apart.
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


@pytest.mark.parametrize(
    "choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}], ids=["any", "tool"]
)
def test_tool_use(client, fields, choice):
    # A small model that may call again and again does so until its tokens end.
    choice = {**choice, "disable_parallel_tool_use": True}
    answer = client.messages.create(tools=[TOOL], tool_choice=choice, **fields)
    assert answer.stop_reason == "tool_use"
    block = next(one for one in answer.content if one.type == "tool_use")
    assert block.name == "get_weather"
    assert block.input["city"] in ("Paris", "Rome")


def test_streamed_tool_use(client, fields):
    with client.messages.stream(tools=[TOOL], tool_choice={"type": "any"}, **fields) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_message()
    assert "input_json" in kinds
    block = next(one for one in final.content if one.type == "tool_use")
    assert block.input["city"] in ("Paris", "Rome")


def test_tool_history(client, model):
    messages = [
        {"role": "user", "content": "What is the weather in Paris?"},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "I look it up."},
                {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Paris"}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "sunny"}],
        },
    ]
    answer = client.messages.create(
        model=model, max_tokens=48, messages=messages, tools=[TOOL], tool_choice={"type": "none"}
    )
    assert answer.content[0].text


def test_errors(client, fields):
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**{**fields, "model": "no-such-model"})
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(**{**fields, "extra_body": {"temperature": -1.0}})

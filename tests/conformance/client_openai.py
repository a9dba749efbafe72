"""openai: chat, completions, the stream helper, parse, tools and the Responses API."""

from __future__ import annotations

import json
from typing import Literal

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


class City(BaseModel):
    name: Literal["Paris", "Rome", "Berlin"]
    country: str = Field(max_length=12)
    is_capital: bool


class GetWeather(BaseModel):
    """Get the weather of a city."""

    city: Literal["Paris", "Rome"]
    unit: Literal["celsius", "fahrenheit"]


def weather_tool(strict: bool = True) -> dict:
    tool = openai.pydantic_function_tool(GetWeather, name="get_weather")
    tool["function"]["strict"] = strict
    return tool


NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture
def client(base_url):
    return OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=120)


@pytest.fixture
def chat(client, model):
    def ask(**fields):
        fields = {"messages": MESSAGES, "max_tokens": 64, "temperature": 0, **fields}
        return client.chat.completions.create(model=model, **fields)

    return ask


def test_models(client, model):
    names = [one.id for one in client.models.list()]
    assert model in names
    assert client.models.retrieve(model).id == model


def test_chat(chat):
    answer = chat()
    assert "Paris" in answer.choices[0].message.content
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_content_parts(chat):
    part = {"type": "text", "text": "What is the capital of France?"}
    assert (
        "Paris" in chat(messages=[{"role": "user", "content": [part]}]).choices[0].message.content
    )


def test_several_choices(chat):
    answer = chat(n=3, temperature=1.0, seed=1, max_tokens=8)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]


def test_logprobs(chat):
    answer = chat(logprobs=True, top_logprobs=3, max_tokens=4)
    content = answer.choices[0].logprobs.content
    assert len(content) == 4
    assert all(len(one.top_logprobs) == 3 and one.logprob <= 0 for one in content)


def test_stop(chat):
    answer = chat(stop=["Paris"])
    assert answer.choices[0].finish_reason == "stop"
    assert "Paris" not in answer.choices[0].message.content


def test_stream_equals_the_whole_answer(chat):
    whole = chat().choices[0].message.content
    chunks = list(chat(stream=True, stream_options={"include_usage": True}))
    parts = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(parts) == whole
    assert chunks[-1].usage.completion_tokens > 0


def test_stream_helper(client, model):
    # An answer that its limit cut is an exception of this helper, hence a stop string.
    with client.chat.completions.stream(
        model=model, messages=MESSAGES, max_tokens=64, temperature=0, stop=["."]
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content


async def test_async_stream(base_url, model):
    async with AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(
            model=model, messages=MESSAGES, max_tokens=16, stream=True
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")


def test_completions(client, model):
    answer = client.completions.create(
        model=model, prompt=["The capital of France is", "One, two,"], max_tokens=6, temperature=0
    )
    assert len(answer.choices) == 2
    assert "Paris" in answer.choices[0].text


def test_errors(client, chat, model):
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="no-such-model", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError) as raised:
        chat(temperature=-1)
    assert raised.value.param == "temperature"


def test_parse(client, model):
    answer = client.chat.completions.parse(
        model=model, messages=MESSAGES, response_format=City, max_tokens=128
    )
    assert isinstance(answer.choices[0].message.parsed, City)


def test_stream_helper_parses(client, model):
    with client.chat.completions.stream(
        model=model, messages=MESSAGES, response_format=City, max_tokens=128
    ) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, City)


def test_json_schema(chat):
    strict = {**City.model_json_schema(), "additionalProperties": False}
    schema = {"name": "city", "strict": True, "schema": strict}
    answer = chat(response_format={"type": "json_schema", "json_schema": schema}, max_tokens=128)
    City.model_validate_json(answer.choices[0].message.content)


def test_json_object(chat):
    messages = [{"role": "user", "content": 'Answer with JSON such as {"capital": "Rome"}.'}]
    answer = chat(messages=messages, response_format={"type": "json_object"}, max_tokens=256)
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content), dict)
    else:
        assert answer.choices[0].message.content.lstrip().startswith("{")


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
@pytest.mark.parametrize("strict", [True, False], ids=["strict", "loose"])
def test_tool_call(chat, choice, strict):
    # A small model that may call again and again does so until its tokens end.
    answer = chat(
        tools=[weather_tool(strict)],
        tool_choice=choice,
        parallel_tool_calls=False,
        max_tokens=128,
    )
    call = answer.choices[0].message.tool_calls[0]
    assert call.type == "function"
    assert call.id
    assert call.function.name == "get_weather"
    GetWeather.model_validate_json(call.function.arguments)
    assert answer.choices[0].finish_reason == ("tool_calls" if choice == "required" else "stop")


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_tools_offered(chat, choice):
    message = chat(tools=[weather_tool()], tool_choice=choice).choices[0].message
    assert message.content or message.tool_calls
    assert choice == "auto" or not message.tool_calls


def test_tool_history(chat):
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Paris", "unit": "celsius"}'},
    }
    messages = [
        {"role": "user", "content": "What is the weather in Paris?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny, 21 degrees"},
    ]
    answer = chat(messages=messages, tools=[weather_tool()], tool_choice="none")
    assert answer.choices[0].message.content


def test_streamed_tool_call(chat):
    chunks = list(chat(tools=[weather_tool()], tool_choice="required", max_tokens=128, stream=True))
    deltas = [
        delta
        for chunk in chunks
        if chunk.choices
        for delta in chunk.choices[0].delta.tool_calls or []
    ]
    assert deltas[0].id
    assert deltas[0].function.name == "get_weather"
    arguments = "".join(one.function.arguments or "" for one in deltas if one.index == 0)
    GetWeather.model_validate_json(arguments)


def test_stream_helper_parses_tools(client, model):
    with client.chat.completions.stream(
        model=model,
        messages=MESSAGES,
        tools=[weather_tool()],
        tool_choice="required",
        max_tokens=128,
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    call = final.choices[0].message.tool_calls[0]
    assert isinstance(call.function.parsed_arguments, GetWeather)


def test_responses(client, model):
    answer = client.responses.create(
        model=model, input="What is the capital of France?", max_output_tokens=32, store=False
    )
    assert answer.output_text
    assert answer.usage.output_tokens > 0


def test_responses_stream(client, model):
    # The client has a final response only of an answer that ends before its limit.
    with client.responses.stream(
        model=model, input="What is the capital of France?", temperature=0, max_output_tokens=128
    ) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert events[0].type == "response.created"
    numbers = [event.sequence_number for event in events]
    assert numbers == sorted(set(numbers))
    assert final.output_text


def test_responses_parse(client, model):
    answer = client.responses.parse(
        model=model, input="Where is Paris?", text_format=City, max_output_tokens=128, store=False
    )
    assert isinstance(answer.output_parsed, City)


def test_responses_tool_and_its_history(client, model):
    tool = openai.pydantic_function_tool(GetWeather, name="get_weather")["function"]
    tool = {"type": "function", **tool}
    question = {"role": "user", "content": "What is the weather in Paris?"}
    fields = {"model": model, "tools": [tool], "max_output_tokens": 128, "store": False}
    answer = client.responses.create(input=[question], tool_choice="required", **fields)
    calls = [item for item in answer.output if item.type == "function_call"]
    GetWeather.model_validate_json(calls[0].arguments)
    output = {"type": "function_call_output", "call_id": calls[0].call_id, "output": "sunny"}
    history = [question, *answer.output, output]
    assert client.responses.create(input=history, tool_choice="none", **fields).output_text

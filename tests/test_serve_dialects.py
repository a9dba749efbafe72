"""The dialects' bodies as chats, and their answers as the types of the clients have them."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from engine.types import FinishReason, TokenOutput
from serve_app.dialects.messages import CountTokensRequest, MessagesRequest
from serve_app.dialects.responses import ResponsesRequest
from serve_app.errors import ApiError
from serve_app.openai.answer import ResponseBuilder
from serve_app.openai.chat import ChatRequest
from serve_app.openai.dialect import DialectRequest
from serve_app.openai.engine_params import read_prompts, sampling_params
from serve_app.openai.json_body import MAX_OBJECT_KEYS, parse_body
from serve_app.openai.responses import ResponseHead
from serve_app.text_workers.pool import INLINE_BODY_BYTES, TextPool
from tests.answer_factory import data_of, ids_of, logprobs_of, outputs, whole_of
from tests.test_serve_tools import CALLS, CHATML, LIMITS, chatml_text

EVENT = TypeAdapter[Any](ResponseStreamEvent)
ANTHROPIC = json.loads((Path(__file__).parent / "anthropic_types.json").read_text())
THOUGHT = "<think>\nHm, well.\n</think>\n\n"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
FLAT_TOOLS = [
    {"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": None},
    {"type": "function", "name": "now", "parameters": None},
]
INPUT_TOOLS = [
    {"name": "get_weather", "input_schema": PARAMETERS},
    {"type": "custom", "name": "now", "input_schema": {"type": "object"}},
]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
Json = dict[str, Any]


def responses(**fields: object) -> ResponsesRequest:
    body = {"model": "m", "input": "hello", **fields}
    return parse_body(ResponsesRequest, json.dumps(body).encode())


def messages(**fields: object) -> MessagesRequest:
    user = [{"role": "user", "content": "hello"}]
    body = {"model": "m", "messages": user, "max_tokens": 64, **fields}
    return parse_body(MessagesRequest, json.dumps(body).encode())


def refusal(make: Any, **fields: object) -> ApiError:
    with pytest.raises(ApiError) as caught:
        make(**fields)
    error = caught.value
    assert error.status == 400
    assert error.message.isprintable()
    assert len(error.message) < 400
    return error


def as_chat(**fields: object) -> tuple[Any, ...]:
    body = {"model": "m", "messages": [], **fields}
    return parse_body(ChatRequest, json.dumps(body).encode()).messages


# Bodies of /v1/responses


def test_a_string_is_the_message_of_a_user() -> None:
    request = responses(instructions="Be brief.", max_output_tokens=5, temperature=0.5, top_p=0.9)
    assert request.messages == as_chat(
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "hello"},
        ]
    )
    assert request.requested_tokens == 5
    assert (request.temperature, request.top_p) == (0.5, 0.9)


def test_items_become_the_messages_of_a_chat() -> None:
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Rules."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Think."}],
            "encrypted_content": None,
        },
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "now", "arguments": '{"a": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "now", "arguments": ""},
        {"type": "function_call_output", "call_id": "c1", "output": "12:00"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "13:00"}],
        },
        {"role": "user", "content": "Thanks"},
    ]
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"a": 1}'}}
    assert responses(input=items, instructions="I.").messages == as_chat(
        messages=[
            {"role": "system", "content": "I.\n\nRules."},
            {"role": "user", "content": "Hi"},
            {
                "role": "assistant",
                "content": "I look.",
                "reasoning_content": "Think.",
                "tool_calls": [call, {**call, "id": "c2", "function": {"name": "now"}}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "12:00"},
            {"role": "tool", "tool_call_id": "c2", "content": "13:00"},
            {"role": "user", "content": "Thanks"},
        ]
    )


def test_the_output_of_an_answer_is_input_of_the_next_turn() -> None:
    answer = whole(responses, THOUGHT + CALLS, tools=FLAT_TOOLS)
    (turn,) = responses(input=answer["output"]).messages
    assert turn["reasoning_content"] == "Hm, well."
    assert turn["content"] == "Let me see."
    assert [call["function"]["name"] for call in turn["tool_calls"]] == ["get_weather", "now"]
    message = whole(messages, THOUGHT + CALLS, tools=INPUT_TOOLS)
    history = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": message["content"]},
    ]
    again = messages(messages=history).messages[1]
    assert [again[key] for key in ("content", "reasoning_content")] == ["Let me see.", "Hm, well."]
    assert [call["function"] for call in again["tool_calls"]] == [
        call["function"] for call in turn["tool_calls"]
    ]


def test_options_of_responses_reach_the_chat() -> None:
    request = responses(
        tools=[*FLAT_TOOLS, {"type": "web_search", "external_web_access": False}],
        tool_choice={"type": "function", "name": "now"},
        parallel_tool_calls=False,
        text={"format": {"type": "json_schema", "name": "f", "schema": SCHEMA, "strict": True}},
        reasoning={"effort": "high", "summary": "auto"},
        include=["reasoning.encrypted_content", "message.output_text.logprobs"],
        top_logprobs=3,
        store=True,
        background=False,
        truncation="auto",
        metadata={"k": "v"},
        prompt_cache_key="key",
        stream=True,
        stream_options={"include_obfuscation": False},
        service_tier="auto",
        previous_response_id=None,
    )
    assert [tool["function"]["name"] for tool in request.tools] == ["get_weather", "now"]
    assert [tool["function"]["name"] for tool in request.template_tools] == ["now"]
    assert request.parallel_tool_calls is False
    assert request.grammar is not None
    assert request.reasoning_effort == "high"
    assert request.output_logprobs == 3
    assert request.prompt_cache_key == "key"
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [FLAT_TOOLS[1]]}
    names = [
        t["function"]["name"]
        for t in responses(tools=FLAT_TOOLS, tool_choice=allowed).template_tools
    ]
    assert names == ["now"]


def test_a_call_of_a_tool_in_a_namespace_names_it() -> None:
    tools = [FLAT_TOOLS[0], {"type": "namespace", "name": "clock", "tools": FLAT_TOOLS[1:]}]
    first, second = whole(responses, CALLS, tools=tools)["output"][1:]
    assert (first["name"], first.get("namespace")) == ("get_weather", None)
    assert (second["name"], second["namespace"]) == ("now", "clock")
    nested = {"type": "namespace", "name": "n", "tools": [{"type": "namespace", "name": "m"}]}
    assert refusal(responses, tools=[nested]).param == "tools.0.tools.0.type"


def test_null_is_accepted_for_every_optional_field_of_a_dialect() -> None:
    from serve_app.dialects import messages as anthropic
    from serve_app.dialects import responses as openai

    own = openai._OWN - {"input"}
    assert responses(**dict.fromkeys(own)).grammar is None
    own = anthropic._OWN - {"messages", "max_tokens"}
    assert messages(**dict.fromkeys(own)).grammar is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [5]}, "input.0"),
        ({"input": [{}]}, "input.0.type"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0.type"),
        ({"input": [{"type": "web_search_call"}]}, "input.0.type"),
        ({"input": [{"type": {"a": 1}}]}, "input.0.type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input.0.role"),
        ({"input": [{"role": "user"}]}, "input.0.content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input.0.content.0.type",
        ),
        ({"input": [{"role": "user", "content": [5]}]}, "input.0.content.0"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input.0.call_id"),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "[]"}]},
            "input.0.arguments",
        ),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]},
            "input.0.arguments",
        ),
        (
            {
                "input": [
                    {
                        "type": "function_call",
                        "call_id": "c",
                        "name": "f",
                        "arguments": '{"a":' * 40 + "1" + "}" * 40,
                    }
                ]
            },
            "input.0.arguments",
        ),
        ({"instructions": ["x"]}, "instructions"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"background": True}, "background"),
        ({"store": "yes"}, "store"),
        ({"truncation": "middle"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": "3"}, "top_logprobs"),
        ({"include": "all"}, "include"),
        ({"include": [5]}, "include.0"),
        ({"reasoning": {"effort": "most"}}, "reasoning.effort"),
        ({"reasoning": "high"}, "reasoning"),
        ({"text": []}, "text"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"verbosity": "low"}}, "verbosity"),
        (
            {"text": {"format": {"type": "json_schema", "schema": {"x-guidance": {}}}}},
            "text.format",
        ),
        ({"tools": {}}, "tools"),
        ({"tools": [None]}, "tools.0"),
        ({"tools": [{"type": "code_interpreter"}]}, "tools.0.type"),
        ({"tools": [{"type": "function"}]}, "tools.0.name"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools.0.name"),
        ({"tools": [{"type": "web_search"}, {"type": "function", "name": "?"}]}, "tools.1.name"),
        ({"tools": [{"type": "function", "name": "f", "parameters": 5}]}, "tools.0.parameters"),
        ({"tools": FLAT_TOOLS, "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tools": FLAT_TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"metadata": {"a": 5}}, "metadata"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"stream_options": 5}, "stream_options"),
        ({"messages": [{"role": "user", "content": "x"}]}, "messages"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"lora_path": "x"}, "lora_path"),
        ({"audio": {}}, None),
    ],
)
def test_a_wrong_field_of_responses_is_named(fields: Json, param: str | None) -> None:
    if param is None:
        assert responses(**fields).messages
        return
    error = refusal(responses, **fields)
    assert error.param == param
    assert error.message.startswith(param)


# Bodies of /v1/messages


def test_blocks_become_the_messages_of_a_chat() -> None:
    history = [
        {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": None}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Think.", "signature": "abc"},
                {"type": "redacted_thinking", "data": "xyz"},
                {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "now", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "12:00"},
                {
                    "type": "tool_result",
                    "tool_use_id": "t2",
                    "is_error": True,
                    "content": [{"type": "text", "text": "13:00"}],
                },
                {"type": "tool_result", "tool_use_id": "t3"},
                {"type": "text", "text": "Thanks"},
            ],
        },
    ]
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cch=1234;"},
        {"type": "text", "text": "Be"},
        {"type": "text", "text": "brief.", "cache_control": {"type": "ephemeral"}},
    ]
    call = {"id": "t1", "type": "function", "function": {"name": "now", "arguments": {"a": 1}}}
    assert messages(messages=history, system=system).messages == as_chat(
        messages=[
            {"role": "system", "content": "Be\nbrief."},
            {"role": "user", "content": "Hi"},
            {
                "role": "assistant",
                "content": "I look.",
                "reasoning_content": "Think.",
                "tool_calls": [call],
            },
            {"role": "tool", "tool_call_id": "t1", "content": "12:00"},
            {"role": "tool", "tool_call_id": "t2", "content": "13:00"},
            {"role": "tool", "tool_call_id": "t3", "content": ""},
            {"role": "user", "content": "Thanks"},
        ]
    )


def test_options_of_messages_reach_the_chat() -> None:
    request = messages(
        tools=[*INPUT_TOOLS, {"type": "web_search_20260318", "name": "web_search"}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        stop_sequences=["END"],
        top_k=5,
        temperature=1,
        metadata={"user_id": "u" * 300},
        output_config={"effort": "max", "format": {"type": "json_schema", "schema": SCHEMA}},
        thinking={"type": "disabled"},
        service_tier="auto",
        container=None,
        context_management={"edits": []},
    )
    assert [tool["function"]["name"] for tool in request.tools] == ["get_weather", "now"]
    assert request.tool_choice.mode == "required"
    assert request.parallel_tool_calls is False
    assert request.stop == ("END",)
    assert request.top_k == 5
    assert request.user is not None
    assert len(request.user) == 64
    assert request.grammar is not None
    assert request.template_variables == {"enable_thinking": False, "reasoning_effort": "max"}
    form = {"type": "json_schema", "schema": SCHEMA}
    former, present = messages(output_format=form), messages(output_config={"format": form})
    assert former.grammar == present.grammar is not None
    thinking = {"type": "enabled", "budget_tokens": 2048}
    assert messages(thinking=thinking).template_variables == {"enable_thinking": True}
    named = messages(tools=INPUT_TOOLS, tool_choice={"type": "tool", "name": "now"})
    assert [tool["function"]["name"] for tool in named.template_tools] == ["now"]
    assert not messages(tools=INPUT_TOOLS, tool_choice={"type": "none"}).template_tools


def test_an_answer_continues_the_last_message_of_the_assistant() -> None:
    history = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "The answer is"}]
    request = messages(messages=history)
    assert request.continue_final_message
    assert request.add_generation_prompt is False
    assert not messages().continue_final_message


def test_a_limit_beyond_the_context_is_cut_to_what_fits() -> None:
    request = messages(max_tokens=100_000)
    (prompt,) = read_prompts(request, chatml_text(), LIMITS)
    params = sampling_params(request, prompt, LIMITS)
    assert params.max_tokens == LIMITS.max_request_tokens - len(prompt.token_ids)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [5]}, "messages.0"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [5]}]}, "messages.0.content.0"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages.0.content.0.type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            "messages.0.content.0.tool_use_id",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "t", "name": "f", "input": 5}],
                    }
                ]
            },
            "messages.0.content.0.input",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": ["x"]}]}]},
            "messages.0.content.0.type",
        ),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"system": 5}, "system"),
        ({"system": [{"type": "image"}]}, "system.0.type"),
        ({"stop_sequences": "END" * 200}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"tools": [{"name": "f", "input_schema": 5}]}, "tools.0.input_schema"),
        (
            {"tools": [{"name": "f", "input_schema": {"type": "array"}}]},
            "tools.0.input_schema.type",
        ),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0.type"),
        ({"tools": [{"input_schema": {}}]}, "tools.0.name"),
        ({"tools": INPUT_TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": INPUT_TOOLS, "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tool_choice": {}}, "tool_choice.type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "much"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": "x"}}, "thinking.budget_tokens"),
        ({"output_config": {"effort": "none"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"x-guidance": 1}}}},
            "output_config.format",
        ),
        ({"output_format": 5}, "output_format"),
        ({"output_format": {"type": "xml"}}, "output_format.type"),
        ({"output_format": {"type": "json_schema", "schema": 5}}, "output_format.schema"),
        (
            {"output_format": {"type": "json_schema", "schema": {"x-guidance": 1}}},
            "output_format.schema",
        ),
        ({"metadata": {"user_id": 5}}, "metadata.user_id"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"max_completion_tokens": 5}, "max_completion_tokens"),
        ({"temperature": -1}, "temperature"),
    ],
)
def test_a_wrong_field_of_messages_is_named(fields: Json, param: str) -> None:
    error = refusal(messages, **fields)
    assert error.param == param
    assert error.message.startswith(param)


def test_count_tokens_needs_no_limit_and_counts_the_same_prompt() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "system": "Be brief."}
    counted = parse_body(CountTokensRequest, json.dumps(body).encode())
    same = messages(messages=body["messages"], system=body["system"])
    text = chatml_text()
    assert read_prompts(counted, text, LIMITS) == read_prompts(same, text, LIMITS)


_VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(("message", "function", "text", "tool_use", "auto")),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ("type", "role", "content", "name", "text", "id", "format", "tools", "input")
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_hostile_body_is_read_or_refused(data: st.DataObject) -> None:
    kind: type[DialectRequest] = data.draw(st.sampled_from((ResponsesRequest, MessagesRequest)))
    names = ("input", "messages", "tools", "tool_choice", "text", "system", "thinking", "reasoning")
    names += (
        "metadata",
        "output_config",
        "include",
        "stop_sequences",
        "max_tokens",
        "instructions",
    )
    body = {"model": "m", "input": "x", "messages": [{"role": "user", "content": "x"}]}
    if kind is ResponsesRequest:
        del body["messages"]
    body |= data.draw(st.dictionaries(st.sampled_from(names), _VALUES, max_size=4))
    error = error_of(kind, json.dumps(body).encode())
    if error is not None:
        assert error.status == 400
        assert error.message.isprintable()
        assert b'"type":"error"' in error.anthropic_body(None)


def error_of(kind: type[DialectRequest], raw: bytes) -> ApiError | None:
    try:
        parse_body(kind, raw)
    except ApiError as error:
        return error
    return None


def test_a_deep_or_wide_body_is_refused() -> None:
    deep = b'{"model":"m","input":' + b"[" * 50_000 + b"]" * 50_000 + b"}"
    wide = json.dumps({str(i): 0 for i in range(MAX_OBJECT_KEYS + 1)}).encode()
    for raw in (deep, wide, b"[]", b"\xff"):
        with pytest.raises(ApiError) as caught:
            parse_body(ResponsesRequest, raw)
        assert caught.value.code == "invalid_json"


async def test_a_long_body_is_read_by_a_worker() -> None:
    long = "word " * INLINE_BODY_BYTES
    pool = TextPool(1)
    try:
        body: Json = {
            "model": "m",
            "input": long,
            "metadata": {"k": "v"},
            "tools": FLAT_TOOLS,
            "text": {"format": {"type": "json_object"}},
        }
        request = await pool.parse(ResponsesRequest, json.dumps(body).encode())
        assert request.messages == ({"role": "user", "content": ""},)
        assert request.grammar is not None
        assert [tool["function"]["name"] for tool in request.tools] == ["get_weather", "now"]
        assert request.repeated["metadata"] == {"k": "v"}
        history = [{"role": "user", "content": long}, {"role": "assistant", "content": "a"}]
        body = {"model": "m", "messages": history, "max_tokens": 5, "stop_sequences": ["x"]}
        message = await pool.parse(MessagesRequest, json.dumps(body).encode())
        assert message.continue_final_message
        assert message.max_tokens == 5
        assert message.stop == ("x",)
        with pytest.raises(ApiError) as caught:
            await pool.parse(MessagesRequest, json.dumps({**body, "system": 5}).encode())
        assert caught.value.param == "system"
    finally:
        pool.close()


# Answers


def builder(make: Any, **fields: object) -> ResponseBuilder:
    request, text = make(**fields), chatml_text()
    head = ResponseHead("chat", f"{request.id_prefix}1", "m", 1_700_000_000, "fp_1", "req-1")
    return ResponseBuilder(request, list(read_prompts(request, text, LIMITS)), text, head)


def fed(value: str, finish: FinishReason = "stop") -> list[TokenOutput]:
    return outputs(ids_of(chatml_text(), value), finish)


def whole(make: Any, value: str, finish: FinishReason = "stop", **fields: object) -> Json:
    answer = builder(make, **fields)
    for output in fed(value, finish):
        assert answer.feed(0, output).data == b""
        if answer.is_done:
            break
    body: Json = json.loads(whole_of(answer))
    return body


def stream(make: Any, value: str, finish: FinishReason = "stop", **fields: object) -> list[Json]:
    answer = builder(make, stream=True, **fields)
    data = b""
    for output in fed(value, finish):
        data += data_of(answer, answer.feed(0, output))
        if answer.is_done:
            break
    return events_of(data + answer.stream_end())


def events_of(data: bytes) -> list[Json]:
    parts = data.decode().split("\n\n")
    assert parts.pop() == ""
    events = []
    for part in parts:
        name, line = part.split("\n")
        event = json.loads(line.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def checked_response(body: Json) -> Response:
    return TypeAdapter(Response).validate_python(body)


def checked_events(events: list[Json]) -> list[Any]:
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    checked = [EVENT.validate_python(event) for event in events]
    for event, given_event in zip(checked, events, strict=True):
        assert event.to_dict(mode="json", exclude_unset=True).keys() >= given_event.keys()
    return checked


def test_a_response_of_text() -> None:
    body = whole(responses, "Paris is it.", metadata={"k": "v"}, temperature=0, user="u")
    answer = checked_response(body)
    assert answer.output_text == "Paris is it."
    assert (answer.id, answer.status, answer.created_at) == ("resp_1", "completed", 1_700_000_000)
    assert (answer.metadata, answer.temperature, answer.user) == ({"k": "v"}, 0, "u")
    assert (body["store"], body["previous_response_id"], body["error"]) == (False, None, None)
    assert answer.usage is not None
    assert answer.usage.input_tokens_details.cached_tokens == 1
    assert answer.usage.output_tokens == len(ids_of(chatml_text(), "Paris is it."))
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


def test_a_response_has_reasoning_text_and_calls_as_items() -> None:
    answer = checked_response(whole(responses, THOUGHT + CALLS, tools=FLAT_TOOLS))
    reasoning, message, first, second = answer.output
    assert reasoning.type == "reasoning"
    assert reasoning.content is not None
    assert reasoning.content[0].text == "Hm, well."
    assert message.type == "message"
    assert answer.output_text == "Let me see."
    assert first.type == second.type == "function_call"
    assert (first.name, json.loads(first.arguments)) == ("get_weather", {"city": "Paris"})
    assert (second.name, json.loads(second.arguments)) == ("now", {})
    assert first.call_id != second.call_id
    assert [tool.type for tool in answer.tools] == ["function", "function"]
    assert answer.usage is not None
    text = chatml_text()
    num_thought = answer.usage.output_tokens_details.reasoning_tokens
    assert 0 < num_thought <= len(ids_of(text, THOUGHT))


def test_the_events_of_a_response_follow_its_items() -> None:
    events = stream(responses, THOUGHT + CALLS, tools=FLAT_TOOLS)
    checked_events(events)
    names = [event["type"].removeprefix("response.") for event in events]
    grouped = [name for n, name in enumerate(names) if n == 0 or name != names[n - 1]]
    part = ("content_part.added", "content_part.done")
    item = ("output_item.added", "output_item.done")
    call = ("function_call_arguments.delta", "function_call_arguments.done")
    assert grouped == [
        *("created", "in_progress"),
        *(item[0], part[0], "reasoning_text.delta", "reasoning_text.done", part[1], item[1]),
        *(item[0], part[0], "output_text.delta", "output_text.done", part[1], item[1]),
        *(item[0], *call, item[1]),
        *(item[0], *call, item[1]),
        "completed",
    ]
    final = events[-1]["response"]
    assert final["output"] == [
        event["item"] for event in events if event["type"] == "response.output_item.done"
    ]
    for number, done in enumerate(final["output"]):
        deltas = [e["delta"] for e in events if e.get("output_index") == number and "delta" in e]
        text = done["arguments"] if "arguments" in done else done["content"][0]["text"]
        assert "".join(deltas) == text
    same = whole(responses, THOUGHT + CALLS, tools=FLAT_TOOLS)
    assert without_ids(final) == without_ids(same)


def without_ids(response: Json) -> Json:
    output = [
        {key: value for key, value in item.items() if key != "call_id"}
        for item in response["output"]
    ]
    return {**response, "output": output, "completed_at": None}


def test_a_cut_response_is_incomplete() -> None:
    body = whole(responses, "Once upon", "length")
    answer = checked_response(body)
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert body["output"][0]["status"] == "incomplete"
    events = stream(responses, "Once upon", "length")
    assert events[-1]["type"] == "response.incomplete"
    checked_events(events)


def test_a_cut_call_of_a_response_is_incomplete() -> None:
    value = CALLS[: CALLS.index('is"}}')]
    message, call = checked_response(whole(responses, value, "length", tools=FLAT_TOOLS)).output
    assert message.type == "message"
    assert call.type == "function_call"
    assert (call.name, call.arguments) == ("get_weather", '{"city": "Par')
    assert (message.status, call.status) == ("completed", "incomplete")
    events = stream(responses, value, "length", tools=FLAT_TOOLS)
    checked_events(events)
    assert events[-1]["type"] == "response.incomplete"
    (done,) = (e for e in events if e["type"] == "response.function_call_arguments.done")
    assert done["arguments"] == call.arguments


def test_an_empty_response_has_an_empty_message() -> None:
    answer = builder(responses)
    answer.feed(0, TokenOutput("r", 0, 0, (3,), finish_reason="stop"))
    response = checked_response(json.loads(whole_of(answer)))
    assert [item.type for item in response.output] == ["message"]
    assert response.output_text == ""


@pytest.mark.parametrize("streams", [False, True])
def test_log_probabilities_are_in_the_text(streams: bool) -> None:
    text = chatml_text(CHATML.replace("<think>\n", ""))
    ids = ids_of(text, "ab")
    given_logprobs = [logprobs_of(i, (i, -0.5), (7, -1.0)) for i in ids]
    include = ["message.output_text.logprobs"]
    answer = builder(responses, include=include, top_logprobs=2, stream=streams)
    data = b"".join(
        data_of(answer, answer.feed(0, output))
        for output in outputs(ids, "length", logprobs=given_logprobs)
    )
    if streams:
        events = events_of(data + answer.stream_end())
        checked_events(events)
        deltas = [e["logprobs"] for e in events if e["type"] == "response.output_text.delta"]
        response = checked_response(events[-1]["response"])
        (done,) = (e for e in events if e["type"] == "response.output_text.done")
        assert done["logprobs"] == [entry for part in deltas for entry in part]
    else:
        response = checked_response(json.loads(whole_of(answer)))
    (message,) = response.output
    assert message.type == "message"
    (content,) = message.content
    assert content.type == "output_text"
    assert content.logprobs is not None
    assert [one.logprob for one in content.logprobs] == [-0.5] * len(ids)
    assert all(len(one.top_logprobs) == 2 for one in content.logprobs)


def test_a_stream_of_responses_that_fails_says_so() -> None:
    answer = builder(responses, stream=True)
    data = answer.feed(0, fed("Hello there")[0]).data
    data += answer.failure(ApiError(503, "The engine stopped.", code="engine_unavailable"))
    events = events_of(data)
    checked_events(events)
    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    assert events[-2]["code"] == "engine_unavailable"
    assert events[-1]["response"]["status"] == "failed"
    assert events[-1]["response"]["error"]["message"] == "The engine stopped."


def check_anthropic(value: Json, kind: str | None = None) -> Json:
    anthropic_validator(kind).validate(value)
    return value


@cache
def anthropic_validator(kind: str | None) -> jsonschema.Draft202012Validator:
    """Checks the schema once: that takes longer than many events."""
    schema = ANTHROPIC if kind is None else {"$ref": f"#/$defs/{kind}", "$defs": ANTHROPIC["$defs"]}
    kind_of_schema = jsonschema.validators.validator_for(schema)
    kind_of_schema.check_schema(schema)
    return kind_of_schema(schema)


def test_a_message_of_text() -> None:
    body = check_anthropic(whole(messages, "Paris is it."), "Message")
    assert body["content"] == [{"type": "text", "text": "Paris is it."}]
    assert (body["stop_reason"], body["stop_sequence"]) == ("end_turn", None)
    usage = body["usage"]
    (prompt,) = read_prompts(messages(), chatml_text(), LIMITS)
    assert usage["input_tokens"] == len(prompt.token_ids)
    assert usage["cache_read_input_tokens"] == 0
    assert usage["output_tokens"] == len(ids_of(chatml_text(), "Paris is it."))


@pytest.mark.parametrize(
    "fields",
    [
        {"cache_control": {"type": "ephemeral"}},
        {"system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]},
        {"tools": [{**INPUT_TOOLS[0], "cache_control": {"type": "ephemeral"}}]},
    ],
)
def test_the_cache_is_counted_apart_if_the_body_marks_a_block(fields: Json) -> None:
    usage = whole(messages, "x", **fields)["usage"]
    (prompt,) = read_prompts(messages(**fields), chatml_text(), LIMITS)
    assert usage["cache_read_input_tokens"] == 1
    assert usage["input_tokens"] == len(prompt.token_ids) - 1


def test_a_message_has_thinking_text_and_calls_as_blocks() -> None:
    body = check_anthropic(whole(messages, THOUGHT + CALLS, tools=INPUT_TOOLS), "Message")
    thinking, text, first, second = body["content"]
    assert (thinking["thinking"], text["text"]) == ("Hm, well.", "Let me see.")
    assert (first["name"], first["input"]) == ("get_weather", {"city": "Paris"})
    assert (second["name"], second["input"]) == ("now", {})
    assert body["stop_reason"] == "tool_use"
    named = {"type": "tool", "name": "now"}
    call = CALLS[CALLS.index('<tool_call>\n{"name": "now"') :]
    body = whole(messages, call, tools=INPUT_TOOLS, tool_choice=named)
    assert body["stop_reason"] == "tool_use"


def test_a_cut_call_of_a_message_has_no_input() -> None:
    value = CALLS[: CALLS.index('is"}}')]
    most = len(ids_of(chatml_text(), value))
    body = whole(messages, value, "length", tools=INPUT_TOOLS, max_tokens=most)
    text, call = check_anthropic(body, "Message")["content"]
    assert (text["text"], call["name"], call["input"]) == ("Let me see.", "get_weather", {})
    assert body["stop_reason"] == "max_tokens"
    events = stream(messages, value, "length", tools=INPUT_TOOLS, max_tokens=most)
    parts = [e["delta"].get("partial_json", "") for e in events if "delta" in e]
    assert "".join(parts) == '{"city": "Par'
    assert events[-2]["delta"]["stop_reason"] == "max_tokens"


def test_the_events_of_a_message_follow_its_blocks() -> None:
    events = stream(messages, THOUGHT + CALLS, tools=INPUT_TOOLS)
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    content: list[Json] = []
    for event in events:
        if event["type"] == "ping":
            continue
        check_anthropic(event)
        if event["type"] == "content_block_start":
            assert event["index"] == len(content)
            content.append({**event["content_block"], "parts": ""})
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            kinds = {
                "text": "text_delta",
                "thinking": "thinking_delta",
                "tool_use": "input_json_delta",
            }
            if delta["type"] != "signature_delta":
                assert delta["type"] == kinds[content[event["index"]]["type"]]
                (part,) = (value for key, value in delta.items() if key != "type")
                content[event["index"]]["parts"] += part
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    body = whole(messages, THOUGHT + CALLS, tools=INPUT_TOOLS)
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"] == body["usage"]
    for block, same in zip(content, body["content"], strict=True):
        if block["type"] == "tool_use":
            assert json.loads(block["parts"]) == same["input"]
        else:
            assert block["parts"] == same[block["type"]]


def test_the_stop_reason_of_a_message() -> None:
    body = whole(messages, "One. END of it", stop_sequences=["END"])
    assert body["content"][0]["text"] == "One. "
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "END")
    last = stream(messages, "One. END of it", stop_sequences=["END"])[-2]
    assert last["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "END"}
    length = len(ids_of(chatml_text(), "Once upon"))
    cut = whole(messages, "Once upon", "length", max_tokens=length)
    assert cut["stop_reason"] == "max_tokens"
    full = whole(messages, "Once upon", "length", max_tokens=100_000)
    assert full["stop_reason"] == "model_context_window_exceeded"


def test_an_empty_message_has_no_block() -> None:
    answer = builder(messages)
    answer.feed(0, TokenOutput("r", 0, 0, (3,), finish_reason="stop"))
    assert check_anthropic(json.loads(whole_of(answer)), "Message")["content"] == []


def test_a_stream_of_messages_that_fails_ends_with_an_error() -> None:
    answer = builder(messages, stream=True)
    data = answer.feed(0, fed("Hello there")[0]).data
    data += answer.failure(ApiError(503, "The engine stopped.", code="engine_unavailable"))
    last = events_of(data)[-1]
    assert last["type"] == "error"
    assert last["error"] == {"type": "overloaded_error", "message": "The engine stopped."}
    assert last["request_id"] == "req-1"


def test_space_between_calls_is_no_text_and_space_before_text_is_kept() -> None:
    only = CALLS[CALLS.index("<tool_call>") :]
    body = whole(messages, f"\n{only}\n", tools=INPUT_TOOLS)
    assert [block["type"] for block in body["content"]] == ["tool_use", "tool_use"]
    assert whole(messages, "\n\n  x")["content"] == [{"type": "text", "text": "\n\n  x"}]

"""HTTP bodies: the accepted fields and values; all others are a 400 that names the field."""

import json
import tracemalloc

import pytest
from pydantic import BaseModel

from serve_app.errors import ApiError
from serve_app.openai import fields
from serve_app.openai.chat import ChatRequest
from serve_app.openai.completions import CompletionRequest
from serve_app.openai.fields import MAX_UNKNOWN_NAMES, UnknownFields
from serve_app.openai.json_body import MAX_OBJECT_KEYS, parse_body
from serve_app.openai.tokenize import DetokenizeRequest, TokenizeRequest

USER = [{"role": "user", "content": "hello"}]


def chat(**fields: object) -> ChatRequest:
    body = {"model": "m", "messages": USER, **fields}
    return parse_body(ChatRequest, json.dumps(body).encode())


def completion(**fields: object) -> CompletionRequest:
    body = {"model": "m", "prompt": "hello", **fields}
    return parse_body(CompletionRequest, json.dumps(body).encode())


def refused(model: type[BaseModel], raw: bytes) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse_body(model, raw)
    error = caught.value
    assert error.status == 400
    assert error.type == "invalid_request_error"
    assert len(error.message) < 400
    assert error.message.isprintable()
    return error


def refused_field(model: type[BaseModel], name: str, value: object) -> ApiError:
    base = {"model": "m", "messages": USER, "prompt": "hello"}
    if model is ChatRequest:
        del base["prompt"]
    return refused(model, json.dumps({**base, name: value}).encode())


@pytest.mark.parametrize("model", [ChatRequest, CompletionRequest])
def test_null_is_accepted_for_every_optional_field(model: type[BaseModel]) -> None:
    fields: dict[str, object] = {
        name: None for name, field in model.model_fields.items() if not field.is_required()
    }
    fields |= {"model": "m", "messages": USER, "prompt": "hello", "tools": None, "suffix": None}
    if model is ChatRequest:
        fields["prompt"] = None
    parse_body(model, json.dumps(fields).encode())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("reasoning_effort", "low"),
        ("include_reasoning", False),
        ("documents", [{"text": "x"}]),
    ],
)
def test_a_field_of_chats_is_refused_for_completions(name: str, value: object) -> None:
    assert refused_field(CompletionRequest, name, value).param == name


def test_unknown_and_neutral_fields_are_ignored() -> None:
    request = chat(
        store=True,
        service_tier="auto",
        parallel_tool_calls=False,
        tools=[],
        tool_choice="auto",
        include_reasoning=True,
        spaces_between_special_tokens=True,
        lora_path=None,
        response_format={"type": "text"},
        modalities=["text"],
        best_of=1,
        user="u",
        metadata={"k": "v"},
        something_new={"a": [1]},
        guided_json=None,
    )
    assert request.requested_tokens is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tool_choice", "required"),
        ("logprob_token_ids", [1]),
        ("guided_whitespace_pattern", " "),
        ("structural_tag", "{}"),
        ("repetition_detection", {"max_pattern_size": 4}),
        ("spaces_between_special_tokens", False),
        ("return_prompt_text", True),
        ("vllm_xargs", {"a": 1}),
        ("truncation_side", "left"),
        ("watermarking", True),
        ("functions", [{"name": "f"}]),
        ("function_call", "auto"),
        ("suffix", "x"),
        ("best_of", 3),
        ("audio", {"voice": "a"}),
        ("modalities", ["text", "audio"]),
        ("chat_template", "{{ 1 }}"),
        ("logits_processors", ["x"]),
        ("bad_words", ["x"]),
        ("allowed_token_ids", [1]),
        ("use_beam_search", True),
        ("use_beam_search", 1),
        ("length_penalty", True),
        ("length_penalty", 0.5),
        ("truncate_prompt_tokens", 5),
    ],
)
@pytest.mark.parametrize("model", [ChatRequest, CompletionRequest])
def test_field_that_would_change_the_output_is_refused(
    model: type[BaseModel], name: str, value: object
) -> None:
    assert refused_field(model, name, value).param == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lora_path", "pirate"),
        ("lora_path", ["pirate", None]),
        ("adapter_id", "org/pirate"),
        ("adapter_source", "hub"),
        ("lora", [{"id": 0, "scale": 1.0}]),
    ],
)
@pytest.mark.parametrize("model", [ChatRequest, CompletionRequest])
def test_a_field_that_chooses_the_adapter_elsewhere_is_refused_with_the_way_to_choose_it_here(
    model: type[BaseModel], name: str, value: object
) -> None:
    error = refused_field(model, name, value)
    assert error.param == name
    assert '"model": "<base>:<adapter>"' in error.message


def test_unknown_fields_are_logged_once_and_never_fill_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fields, "unknown_fields", UnknownFields())
    for _ in range(3):
        chat(something_new=1, **{"a\nb" + "x" * 1_000: 2})
    assert [record.getMessage()[:47] for record in caplog.records] == [
        "a request has the unknown field 'something_new'",
        "a request has the unknown field 'a\\nbxxxxxxxxxx",
    ]
    for i in range(10 * MAX_UNKNOWN_NAMES):
        chat(**{f"made_up_{i}": None})
    assert (
        len(caplog.records) == MAX_UNKNOWN_NAMES + 1
    )  # the last line announces that it is the last
    assert max(len(record.getMessage()) for record in caplog.records) < 128


@pytest.mark.parametrize("request_id", ["a b", "a\n", "é", "", "x" * 129, "<a>", 7])
def test_a_request_id_that_fits_no_header_or_log_is_refused(request_id: object) -> None:
    assert refused_field(ChatRequest, "request_id", request_id).param == "request_id"


def test_a_request_id_of_the_client_is_taken() -> None:
    assert chat(request_id="My-1.2:3_" + "x" * 119).request_id == "My-1.2:3_" + "x" * 119


WRONG: dict[str, list[object]] = {
    "n": [10**9, 17, 0, -1, 2.5, "3", True, [1]],
    "temperature": [-0.1, 2.01, "1", True, 10**400, []],
    "top_p": [0, 1.1, -1],
    "top_k": [-2, 1.0, 2**63],
    "min_p": [-0.1, 1.5],
    "presence_penalty": [-2.1, 1e9],
    "frequency_penalty": [2.1, -1e9],
    "repetition_penalty": [0, -1, 2.5, 1e-46, 0.0099],
    "seed": [2**64, -(2**63) - 1, 1.0, "1"],
    "stop": ["", [""], ["a"] * 17, "x" * 257, 3, [3], {"a": 1}],
    "stop_token_ids": [[-1], [1.5], ["a"], [2**63], [True], 5, [1] * 129],
    "min_tokens": [-1, 1.5, 2**31],
    "logit_bias": [
        *({"a": 1}, {"-1": 1}, {"1.5": 1}, {"1": 101}, {"1": "x"}, {"1": True}, {"1": None}),
        *([1], {"²": 1}, {str(2**63): 1}, {str(i): 1 for i in range(1025)}),
    ],
    "max_tokens": [-1, 1.0, "5", True, 2**31],
    "cache_salt": ["", "x" * 257, 5],
    "model": ["", None, 5, "x" * 513],
    "stream": ["true"],
    "stream_options": [{"include_usage": True}],
    "ignore_eos": [1],
    "speculation": ["sometimes", True],
    "prompt_logprobs": [21],
    "user": [5, "x" * 257],
    "safety_identifier": ["x" * 257],
    "prompt_cache_key": ["x" * 257],
}
WRONG_IN_COMPLETIONS: dict[str, list[object]] = {
    "prompt": [
        *(None, 5, [], [[]], ["a", 5], ["a", [1]], [[1], "a"], {"a": 1}),
        *([-1], [2**31], [1.5], [True], [1, "a"], ["a"] * 129),
    ],
    "logprobs": [-1, 21, 10**6, True],
    "max_tokens": [0],  # without echo
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG.items() for value in values]
)
@pytest.mark.parametrize("model", [ChatRequest, CompletionRequest])
def test_wrong_type_or_value_out_of_bounds_names_the_field(
    model: type[BaseModel], name: str, value: object
) -> None:
    error = refused_field(model, name, value)
    assert error.param is not None
    assert error.param.split(".")[0] == name
    assert name in error.message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_logprobs", 5),  # without logprobs
        ("logprobs", 1),
        ("max_tokens", 0),
        ("max_completion_tokens", 0),
        ("messages", []),
        ("messages", "hello"),
        ("messages", [{"role": "robot", "content": "a"}]),
        ("messages", [{"role": "user"}]),
        ("messages", [{"role": "user", "content": 5}]),
        ("messages", [{"role": "user", "content": []}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
        ("messages", [{"role": "user", "content": [{"type": "text", "text": None}]}]),
        ("messages", [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]),
        ("messages", [5] * 5000),
        ("messages", [{"role": ["user"], "content": "a"}]),
        ("echo", True),
        ("continue_final_message", True),
        ("chat_template_kwargs", {"messages": 1}),
        ("chat_template_kwargs", {"bos_token": "x"}),
        ("chat_template_kwargs", {"a": [1]}),
    ],
)
def test_chat_alone_refuses(name: str, value: object) -> None:
    error = refused_field(ChatRequest, name, value)
    assert error.param is not None
    assert error.param.split(".")[0] == name


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in WRONG_IN_COMPLETIONS.items() for value in values],
)
def test_completions_alone_refuse(name: str, value: object) -> None:
    assert refused_field(CompletionRequest, name, value).param == name


def test_prompts_times_choices_are_bounded() -> None:
    completion(prompt=["a"] * 16, n=16)
    with pytest.raises(ApiError, match="272"):
        completion(prompt=["a"] * 17, n=16)


def test_agreement_between_fields() -> None:
    with pytest.raises(ApiError, match="min_tokens: 5 is more than max_tokens, 4"):
        completion(min_tokens=5, max_tokens=4)
    with pytest.raises(ApiError, match="best_of"):
        completion(n=2, best_of=1)
    with pytest.raises(ApiError, match="prompt_logprobs"):
        completion(prompt_logprobs=1, stream=True)
    assert completion(n=2, best_of=2).num_choices == 2
    assert completion(max_tokens=0, echo=True).requested_tokens == 0


def test_values_at_the_bounds_are_accepted() -> None:
    request = chat(
        n=16,
        temperature=2,
        top_p=1,
        top_k=-1,
        seed=2**64 - 1,
        stop=["a" * 256] * 16,
        logit_bias={str(i): -100 for i in range(1024)},
        logprobs=True,
        top_logprobs=20,
        max_completion_tokens=7,
        max_tokens=9,
        repetition_penalty=2.0,
    )
    assert request.stop == ("a" * 256,)
    assert request.requested_tokens == 7
    assert request.output_logprobs == 20


def test_prompt_forms() -> None:
    assert completion(prompt="a").prompt == ("a",)
    assert completion(prompt=["a", "b"]).prompt == ("a", "b")
    assert completion(prompt=[1, 2]).prompt == ((1, 2),)
    assert completion(prompt=[[1, 2], [3]]).prompt == ((1, 2), (3,))
    assert completion(prompt="").prompt == ("",)


def test_text_parts_are_joined_and_empty_fields_left_out() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = chat(
        messages=[
            {"role": "developer", "content": parts, "name": None, "tool_calls": None},
            {"role": "assistant", "content": None},
            {"role": "tool", "content": "x", "tool_call_id": "c1"},
        ]
    )
    assert request.messages == (
        {"role": "developer", "content": "a\nb"},
        {"role": "assistant", "content": ""},
        {"role": "tool", "content": "x", "tool_call_id": "c1"},
    )


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b'{"model": "\xff"}',
        b'{"model": "m", "model": "n", "messages": [{"role": "user", "content": "a"}]}',
        b'{"model": "m", "temperature": NaN}',
        b'{"model": "m", "temperature": -Infinity}',
        b'{"model": "\\ud800", "messages": [{"role": "user", "content": "a"}]}',
        b'{"model": "m", "messages": [{"role": "user", "content": "\\uDC00 x"}]}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"model": "m", "seed": ' + b"9" * 100_000 + b"}",
        b'{"model": "m", "messages": []} trailing',
        b"{" + b",".join(b'"%d":1' % i for i in range(MAX_OBJECT_KEYS + 1)) + b"}",
        b"{" + b",".join([b'"a":1'] * 100_000) + b"}",
    ],
)
def test_malformed_body_is_a_400(raw: bytes) -> None:
    refused(ChatRequest, raw)


def test_a_body_of_millions_of_objects_is_refused_before_they_are_made() -> None:
    raw = b'{"model": "m", "messages": [' + b"{}," * 500_000 + b"{}]}"
    with pytest.raises(ApiError, match="more than 65536 objects and arrays") as caught:
        parse_body(ChatRequest, raw)
    assert caught.value.code == "invalid_json"
    code = "{}[]" * 100_000 + ' \\"{'  # braces inside a text do not count
    raw = json.dumps({"model": "m", "prompt": code}).encode()
    assert parse_body(CompletionRequest, raw).prompt == (code,)


def test_infinite_number_by_its_exponent_is_refused() -> None:
    raw = b'{"model": "m", "prompt": "a", "temperature": 1e999}'
    assert refused(CompletionRequest, raw).param == "temperature"


@pytest.mark.parametrize("name", ["user", "stop", "tools", "messages", "chat_template_kwargs"])
def test_deep_value_is_refused_as_any_other(name: str) -> None:
    deep = b"[" * 500 + b"]" * 500
    raw = b'{"model": "m", "messages": [{"role": "user", "content": "a"}]}'
    raw = b'{"model": "m", "messages": %s}' % deep if name == "messages" else raw
    if name != "messages":
        raw = raw[:-1] + b', "%s": %s}' % (name.encode(), deep)
    assert refused(ChatRequest, raw).param is not None


def test_surrogate_pair_is_one_character() -> None:
    raw = b'{"model": "m", "prompt": "\\ud83d\\ude00 \\\\ud800"}'
    assert parse_body(CompletionRequest, raw).prompt == ("😀 \\ud800",)


def test_missing_field_is_named() -> None:
    error = refused(ChatRequest, b'{"model": "m"}')
    assert (error.param, error.code) == ("messages", "missing_required_parameter")


def test_position_of_a_wrong_message_is_named() -> None:
    image = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}
    error = refused_field(ChatRequest, "messages", [*USER, image])
    assert error.param == "messages.1.content.1"


def test_long_value_is_cut_in_the_message() -> None:
    error = refused_field(ChatRequest, "user", ["\x1b[31m" * 100_000])
    assert len(error.message) < 200


def test_half_a_million_stop_strings_are_refused_without_looking_at_each() -> None:
    body = {"model": "m", "messages": USER, "stop": ["a"] * 500_000}
    raw = json.dumps(body).encode()
    tracemalloc.start()
    with pytest.raises(ApiError, match="at most 16 strings are allowed, got 500000"):
        parse_body(ChatRequest, raw)
    left, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert left < 100_000
    assert peak < 8 * len(raw)  # the parsed list itself, a pointer per string, and the decoded text


def test_tokenize_takes_a_prompt_or_messages() -> None:
    assert parse_body(TokenizeRequest, b'{"prompt": "a", "model": null}').prompt == "a"
    raw = json.dumps({"messages": USER}).encode()
    assert parse_body(TokenizeRequest, raw).messages == tuple(USER)
    for body in (b"{}", b'{"prompt": "a", "messages": [{"role": "user", "content": "a"}]}'):
        assert refused(TokenizeRequest, body).param == "prompt"


def test_detokenize_takes_ids() -> None:
    assert parse_body(DetokenizeRequest, b'{"tokens": [1, 2]}').tokens == (1, 2)
    assert refused(DetokenizeRequest, b'{"tokens": [1, -2]}').param == "tokens"
    assert refused(DetokenizeRequest, b'{"tokens": "a"}').param == "tokens"

"""Tools of chats: checks, grammars that the parser reads back, histories, and response bodies."""

import json
import random
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from engine.admission import EngineLimits
from engine.errors import InvalidRequestError
from engine.types import Grammar
from serve_app.errors import ApiError
from serve_app.openai.answer import ResponseBuilder
from serve_app.openai.chat import ChatRequest
from serve_app.openai.engine_params import Prompt, read_prompts, sampling_params
from serve_app.openai.json_body import parse_body
from serve_app.openai.tool_grammars import answer_grammar
from serve_app.openai.tools import check_tool_choice, resolve_choice, schemas
from serve_app.text.base_text import BaseText
from serve_app.text.regions import RegionParser
from serve_app.text.response_template import FAMILIES, family_template
from serve_app.text.template import ChatTemplate
from serve_app.text.tokenizer import TextTokenizer
from tests.answer_factory import Json, body_of, head, ids_of, outputs, stream_of
from tests.response_texts import NOW, TOOLS, WEATHER
from tests.text_factory import byte_level_tokenizer

USER = {"role": "user", "content": "x"}
LIMITS = EngineLimits(max_model_len=4096, vocab_size=4096, max_kv_tokens=4096)
CONSTRAINED = [name for name in FAMILIES if family_template(name).calls is not None]

# As Qwen2.5's template, without its long texts.
CHATML = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}in <tool_call></tool_call><|im_end|>
{% endif %}{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking %}<think>
{% endif %}{% endif %}"""


def chatml_text(source: str = CHATML) -> BaseText:
    tokenizer = TextTokenizer(byte_level_tokenizer(), "<s>")
    template = ChatTemplate(source, {"bos_token": "<s>"})
    return BaseText(tokenizer, template, {}, frozenset((3,)), source=source)


def request_of(**fields: object) -> ChatRequest:
    return parse_body(
        ChatRequest, json.dumps({"model": "m", "messages": [USER], **fields}).encode()
    )


def refusal(**fields: object) -> ApiError:
    with pytest.raises(ApiError) as caught:
        request_of(**fields)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tools": {}}, "must be a list"),
        ({"tools": [{"type": "function"}]}, "tools.0.function: must be an object"),
        ({"tools": [{"type": "web", "function": {}}]}, 'tools.0.type: must be "function"'),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [NOW, NOW]}, "appears twice"),
        ({"tools": [NOW] * 300}, "at most 256"),
        ({"tool_choice": "required"}, "only if tools are given"),
        ({"tools": [NOW], "tool_choice": "maybe"}, "tool_choice: must be"),
        (
            {"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "f"}}},
            'the tool "f" is not in tools',
        ),
        (
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "f", "strict": True, "parameters": {"type": "object"}},
                    }
                ]
            },
            "must be false in strict mode",
        ),
    ],
)
def test_a_wrong_tool_is_refused_with_its_place(fields: Json, words: str) -> None:
    assert words in refusal(**fields).message.replace("'f'", '"f"')


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (5, "messages.0.tool_calls.0"),
        ({"function": {"name": "f", "arguments": "{"}}, "arguments: must be a JSON object"),
        ({"function": {"name": "f", "arguments": "[]"}}, "arguments: must be a JSON object"),
        ({"function": {"name": 5, "arguments": "{}"}}, "function.name: must be"),
        ({"function": {"name": "f", "arguments": '{"a":' * 40 + "1" + "}" * 40}}, "32 levels"),
    ],
)
def test_a_wrong_call_in_a_history_is_refused(call: object, words: str) -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert words in refusal(messages=[message]).message


def test_a_history_with_calls_is_written_into_the_prompt() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"a": "é"}'}}
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "r"},
        {"role": "tool", "tool_call_id": "c1", "content": "12:00"},
    ]
    request = request_of(messages=messages, tools=[NOW])
    assert request.messages[1]["reasoning_content"] == "r"
    rendered = chatml_text().render_chat(request.messages, tools=request.template_tools)
    assert '{"type": "function", "function": {"name": "now"}}' in rendered
    assert (
        '<tool_call>\n{"name": "now", "arguments": {"a": "é"}}\n</tool_call><|im_end|>' in rendered
    )
    assert "<|im_start|>tool\n12:00<|im_end|>" in rendered
    without = chatml_text().render_chat(messages[:1], tools=())
    assert "<tool_call>" not in without


def test_tool_choice_decides_which_tools_the_prompt_shows() -> None:
    def shown(choice: object) -> list[str]:
        request = request_of(tools=TOOLS, tool_choice=choice)
        return [tool["function"]["name"] for tool in request.template_tools]

    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NOW]}}
    assert shown("none") == []
    assert shown("auto") == shown("required") == ["get_weather", "now"]
    assert shown({"type": "function", "function": {"name": "now"}}) == ["now"]
    assert shown(allowed) == ["now"]


def drawn(grammar: Grammar, seed: int) -> str:
    """Returns a text that random bytes make under the grammar, the hardest adversary."""
    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(grammar.source), log_level=0)
    draw, ids = random.Random(seed), list[int]()
    assert not matcher.is_error(), matcher.get_error()
    for _ in range(4000):
        if matcher.is_stopped():
            break
        mask = matcher.compute_bitmask()
        allowed = [i for i in range(256) if mask[i // 8] >> (i % 8) & 1]
        closing = [i for i in allowed if chr(i) in '"}]>\n1']
        if not allowed or (matcher.is_accepting() and draw.random() < 0.5):
            break
        if len(allowed) > 100 and draw.random() < 0.3:  # free text, which random bytes never end
            ending = list(b"\n</parameter>\n")
            ids += ending[: matcher.try_consume_tokens(ending)]
            continue
        token = draw.choice(closing if closing and draw.random() < 0.5 else allowed)
        assert matcher.consume_token(token)
        ids.append(token)
    assert matcher.is_accepting()
    return bytes(ids).decode(errors="replace")


@pytest.mark.parametrize("family", CONSTRAINED)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": NOW["function"]}])
def test_demanded_calls_are_well_formed_for_random_bytes(family: str, choice: object) -> None:
    template, chosen = family_template(family), check_tool_choice(choice)
    tools = resolve_choice(chosen, TOOLS)
    grammar = answer_grammar(chosen, tools, template, {}, is_parallel=True)
    assert grammar is not None
    for seed in range(12):
        text = drawn(grammar, seed)
        parser = RegionParser(template, "", schemas(tools))
        pieces = parser.push(text) + parser.finish()
        calls = [call for piece in pieces for call in piece.calls]
        assert calls, text
        assert "".join(piece.content for piece in pieces).strip() == "", text
        for name, arguments, _ in calls:
            jsonschema.validate(arguments, schemas(tools)[name])
        if chosen.is_named:
            assert [name for name, _, _ in calls] == ["now"]


def matches(grammar: Grammar, text: str) -> bool:
    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(grammar.source), log_level=0)
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


def test_a_strict_tool_is_constrained_where_the_model_begins_a_call() -> None:
    chosen = check_tool_choice("auto")
    grammar = answer_grammar(chosen, TOOLS, family_template("chatml-json"), {})
    assert grammar is not None
    good = '{"name": "get_weather", "arguments": {"city": "Paris", "unit": "C"}}'
    assert matches(grammar, "Only text, 1 < 2.")
    assert matches(grammar, f"Sure.\n<tool_call>\n{good}\n</tool_call>")
    assert not matches(grammar, '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>')
    bad = good.replace('"C"', "5")
    assert not matches(grammar, f"<tool_call>\n{bad}\n</tool_call>")
    assert answer_grammar(chosen, [NOW], family_template("chatml-json"), {}) is None


def test_one_call_only_without_parallel_calls() -> None:
    chosen, template = check_tool_choice("required"), family_template("chatml-json")
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    many = answer_grammar(chosen, [NOW], template, {})
    one = answer_grammar(chosen, [NOW], template, {}, is_parallel=False)
    assert many is not None
    assert one is not None
    assert matches(many, call)
    assert matches(one, call)
    assert matches(many, f"{call}\n{call}")
    assert not matches(one, f"{call}\n{call}")


@pytest.mark.parametrize(
    ("family", "parameters", "words"),
    [
        ("chatml-json", {"properties": {"a": {"divisibleBy": 2}}}, r"properties\.a\.divisibleBy"),
        ("chatml-json", {"properties": {"a": {"x-guidance": {}}}}, r"properties\.a\.x-guidance"),
        ("chatml-json", {"properties": {"a": {"const": 1e999}}}, "too large"),
        ("qwen-xml", {"properties": {"a": {"items": {"extends": {}}}}}, r"a\.items\.extends"),
        ("qwen-xml", {"properties": {"a": {}}, "minProperties": 1}, r"minProperties"),
        ("qwen-xml", {"$ref": "#/$defs/p", "$defs": {"p": {}}}, r"\$ref"),
        ("qwen-xml", {"properties": {}, "required": ["a"]}, r"required: 'a' is not in properties"),
    ],
)
def test_parameters_that_no_grammar_enforces_are_refused_where_calls_are_demanded(
    family: str, parameters: Json, words: str
) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    with pytest.raises(InvalidRequestError, match=rf"tools\.f\.parameters.*{words}") as caught:
        answer_grammar(check_tool_choice("required"), [tool], family_template(family), {})
    assert caught.value.param == "tools"


def test_calls_cannot_be_demanded_of_a_model_without_a_template() -> None:
    with pytest.raises(InvalidRequestError, match="no response template"):
        answer_grammar(check_tool_choice("required"), [NOW], None, {})


def prompt_of(request: ChatRequest, text: BaseText) -> Prompt:
    (prompt,) = read_prompts(request, text, LIMITS)
    return prompt


def test_a_demanded_call_constrains_the_engine() -> None:
    text = chatml_text()
    request = request_of(tools=TOOLS, tool_choice="required")
    prompt = prompt_of(request, text)
    assert prompt.grammar is not None
    assert sampling_params(request, prompt, LIMITS).grammar == prompt.grammar
    free = request_of(tools=[NOW])
    assert sampling_params(free, prompt_of(free, text), LIMITS).grammar is None


def test_reasoning_effort_sets_the_template_and_the_parser_starts_inside() -> None:
    text = chatml_text()
    request = request_of(reasoning_effort="high")
    assert prompt_of(request, text).turn_start == "<think>\n"
    assert prompt_of(request_of(reasoning_effort="none"), text).turn_start == ""


def answer_of(value: str, **fields: object) -> tuple[ResponseBuilder, list[Any]]:
    text = chatml_text()
    request = request_of(**fields)
    answer = ResponseBuilder(request, [prompt_of(request, text)], text, head("chat"))
    return answer, outputs(ids_of(text, value), "stop")


# As Phi-4-mini's template: tools come in the system message, and calls are no part of it.
PHI = """{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message \
and message['tools'] is not none %}{{ '<|' + message['role'] + '|>' + message['content'] + \
'<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>' }}{% else %}\
{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"""


def test_tools_and_calls_become_parts_of_messages_where_the_template_reads_them_there() -> None:
    text = chatml_text(PHI)
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"a": "é"}'}}
    turns = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "12:00"},
    ]
    end = (
        '<|user|>x<|end|><|assistant|><|tool_call|>[{"name": "now", "arguments": {"a": "é"}}]'
        "<|/tool_call|><|end|><|tool|>12:00<|end|><|assistant|>"
    )
    begin = "You are a helpful assistant with some tools."
    own = {"role": "system", "content": "Be brief."}
    for first, words in (((), begin), ((own,), "Be brief.")):
        request = request_of(messages=[*first, *turns], tools=[NOW])
        rendered = text.render_chat(request.messages, tools=request.template_tools)
        assert rendered == f'<|system|>{words}<|tool|>[{{"name": "now"}}]<|/tool|><|end|>{end}'
    request = request_of(messages=turns)
    assert text.render_chat(request.messages, tools=request.template_tools) == end


def test_tools_of_the_system_message_are_shown_and_their_calls_read() -> None:
    text = chatml_text(PHI)
    tools = '[{"name": "now"}]'
    request = request_of(messages=[{"role": "system", "content": "", "tools": tools}, USER])
    prompt = prompt_of(request, text)
    assert text.tokenizer.decode(prompt.token_ids) == (
        f"<|system|><|tool|>{tools}<|/tool|><|end|><|user|>x<|end|><|assistant|>"
    )
    value = '<|tool_call|>[{"name": "now", "arguments": {}}]<|/tool_call|>'
    answer = ResponseBuilder(request, [prompt], text, head("chat"))
    (choice,) = body_of(answer, outputs(ids_of(text, value), "stop"))["choices"]
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}
    assert "tools" in refusal(messages=[{"role": "system", "content": "", "tools": [1]}]).message


CALLS = (
    'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n'
    '</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)


def test_a_whole_response_has_the_calls() -> None:
    answer, fed = answer_of(f"<think>\nHm.\n</think>\n\n{CALLS}", tools=TOOLS, logprobs=None)
    (choice,) = ChatCompletion.model_validate(body_of(answer, fed)).choices
    calls = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    assert choice.message.model_extra is not None
    assert choice.message.model_extra["reasoning"] == "Hm."
    assert choice.message.model_extra["reasoning_content"] == "Hm."
    assert calls is not None
    assert [(c.function.name, json.loads(c.function.arguments)) for c in calls] == [
        ("get_weather", {"city": "Paris"}),
        ("now", {}),
    ]
    assert len({call.id for call in calls}) == 2
    assert all(call.id.startswith("call_") for call in calls)


def test_the_usage_counts_the_tokens_of_reasoning() -> None:
    answer, fed = answer_of("<think>abc</think>de")
    usage = ChatCompletion.model_validate(body_of(answer, fed)).usage
    assert usage is not None
    assert usage.completion_tokens_details is not None
    reasoning = usage.completion_tokens_details.reasoning_tokens
    assert reasoning is not None
    assert 3 <= reasoning < usage.completion_tokens


def test_content_is_null_if_there_are_only_calls_and_a_named_choice_ends_with_stop() -> None:
    only = CALLS[CALLS.index('<tool_call>\n{"name": "now"') :]
    named = {"type": "function", "function": {"name": "now"}}
    answer, fed = answer_of(only, tools=TOOLS, tool_choice=named)
    (choice,) = body_of(answer, fed)["choices"]
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "stop"


def test_the_chunks_of_a_stream_add_up_to_the_whole_response() -> None:
    value = f"<think>\nHm, well.\n</think>\n\n{CALLS}"
    whole, fed = answer_of(value, tools=TOOLS)
    message = body_of(whole, fed)["choices"][0]["message"]
    streamed, fed = answer_of(value, tools=TOOLS, stream=True)
    deltas = []
    for chunk in stream_of(streamed, fed):
        ChatCompletionChunk.model_validate(chunk)
        deltas.append(chunk["choices"][0]["delta"])
        last = chunk["choices"][0]["finish_reason"]
    assert deltas[0]["role"] == "assistant"
    assert last == "tool_calls"
    for name in ("content", "reasoning", "reasoning_content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == message[name]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [call["index"] for call in calls] == [0, 1]
    assert [c["function"] for c in calls] == [c["function"] for c in message["tool_calls"]]


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_call_that_is_cut_is_the_same_streamed_and_whole(choice: str) -> None:
    text, fields = chatml_text(), {"tools": TOOLS, "tool_choice": choice}
    value = CALLS[: CALLS.index('is"}}')]
    fed = outputs(ids_of(text, value), "length")
    whole, _ = answer_of(value, **fields)
    (body,) = ChatCompletion.model_validate(body_of(whole, fed)).choices
    assert body.finish_reason == "length"
    assert body.message.content == "Let me see."
    assert body.message.tool_calls is not None
    (call,) = body.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Par')
    streamed, _ = answer_of(value, **fields, stream=True)
    chunks = [ChatCompletionChunk.model_validate(chunk) for chunk in stream_of(streamed, fed)]
    assert chunks[-1].choices[0].finish_reason == "length"
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == body.message.content
    (same,) = [one for delta in deltas for one in delta.tool_calls or ()]
    assert same.function is not None
    assert (same.function.name, same.function.arguments) == ("get_weather", '{"city": "Par')


def test_a_repeated_output_changes_nothing() -> None:
    plain, fed = answer_of(CALLS, tools=TOOLS, stream=True)
    expected = stream_of(plain, fed)
    resumed, fed = answer_of(CALLS, tools=TOOLS, stream=True)
    again = [output for output in fed for _ in range(2)]
    chunks = stream_of(resumed, again[:-1])

    def without_ids(chunks: list[Json]) -> str:
        text = json.dumps(chunks)
        for chunk in chunks:
            for call in chunk["choices"][0]["delta"].get("tool_calls", ()):
                text = text.replace(call["id"], "")
        return text

    assert without_ids(chunks) == without_ids(expected)


def test_text_without_tools_passes_unchanged() -> None:
    source = CHATML.replace("<think>\n", "")
    text = chatml_text(source)
    request = request_of()
    answer = ResponseBuilder(request, [prompt_of(request, text)], text, head("chat"))
    body = body_of(answer, outputs(ids_of(text, CALLS), "stop"))
    assert body["choices"][0]["message"] == {
        "role": "assistant",
        "content": CALLS,
        "refusal": None,
    }


def test_stop_strings_are_looked_for_in_the_content_only() -> None:
    answer, fed = answer_of(f"<think>Paris</think>{CALLS} end, more", tools=TOOLS, stop=["end"])
    (choice,) = body_of(answer, fed)["choices"]
    assert choice["stop_reason"] == "end"
    assert len(choice["message"]["tool_calls"]) == 2
    assert choice["message"]["reasoning"] == "Paris"


def test_reasoning_is_left_out_on_request() -> None:
    answer, fed = answer_of("<think>a</think>b", include_reasoning=False)
    assert body_of(answer, fed)["choices"][0]["message"] == {
        "role": "assistant",
        "content": "b",
        "refusal": None,
    }


def test_the_weather_tool_is_valid() -> None:
    assert request_of(tools=[WEATHER]).template_tools == (WEATHER,)

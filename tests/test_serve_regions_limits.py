"""Answers and bodies at the edges of regions: cut calls, marks inside JSON, long beginnings."""

from __future__ import annotations

import json
import time

import pytest

from engine.errors import UnsupportedModelError
from serve_app.openai.chat import ChatRequest
from serve_app.openai.json_body import parse_body
from serve_app.openai.tools import check_tool_choice, resolve_choice, schemas
from serve_app.text.regions import RegionParser
from serve_app.text.response_template import choose_template, family_template, load_template
from tests.response_texts import TEXTS, TOOLS, template_json

MOVE = {
    "type": "object",
    "properties": {"source": {"type": "string"}, "target": {"type": "string"}},
    "required": ["source", "target"],
}


def pieces(family: str, text: str, **options: object) -> tuple[str, list[object], str]:
    parser = RegionParser(family_template(family), **options)  # type: ignore[arg-type]
    found = [*parser.push(text), *parser.finish()]
    return (
        "".join(piece.content for piece in found),
        [call for piece in found for call in piece.calls],
        "".join(piece.reasoning for piece in found),
    )


def test_a_call_that_is_cut_is_text_and_not_a_call_without_some_arguments() -> None:
    text = (
        "<tool_call>\n<function=move>\n<parameter=source>\na\n</parameter>\n<parameter=target>\n/tm"
    )
    content, calls, _ = pieces("qwen-xml", text)
    assert calls == []
    assert content == text
    _, calls, _ = pieces("qwen-xml", text + "p\n</parameter>\n</function>\n</tool_call>")
    assert [call[:2] for call in calls] == [("move", {"source": "a", "target": "/tmp"})]


def cut(family: str, text: str) -> tuple[str, list[tuple[object, ...]]]:
    """Returns the content and the calls of a text that the limit of tokens ends."""
    whole = RegionParser(family_template(family), "", schemas(TOOLS))
    found = [*whole.push(text), *whole.finish(is_cut=True)]
    parser = RegionParser(family_template(family), "", schemas(TOOLS))
    again = [piece for one in text for piece in parser.push(one)] + parser.finish(is_cut=True)
    results = [
        ("".join(p.content for p in some), [call[:2] for p in some for call in p.calls])
        for some in (found, again)
    ]
    assert results[0] == results[1]
    return results[0]


@pytest.mark.parametrize("family", TEXTS)
def test_a_call_that_the_limit_of_tokens_cuts_has_its_name_and_no_whole_arguments(
    family: str,
) -> None:
    for text, _, _, calls in TEXTS[family]:
        longest: list[str] = []
        for count in range(len(text) + 1):
            content, found = cut(family, text[:count])
            for (name, arguments), expected in zip(found, calls, strict=False):
                assert name == expected[0]
                if isinstance(arguments, dict):
                    assert arguments == expected[1]
                    continue
                assert isinstance(arguments, str)
                assert json.dumps(expected[1]).startswith(arguments.rstrip(","))
                with pytest.raises(ValueError, match=r"char|line"):
                    json.loads(arguments)
                longest.append(arguments)
                assert family not in content
        if calls:
            assert len(set(longest)) > (8 if "json" in family and calls[0][1] else 0)


@pytest.mark.parametrize(
    ("family", "text", "calls"),
    [
        ("chatml-json", '<tool_call>\n{"name": "now"', [("now", "{")]),
        ("chatml-json", '<tool_call>\n{"name": "now', []),
        (
            "chatml-json",
            '<tool_call>{"name": "now", "arguments": {"a": 1}}\n</to',
            [("now", {"a": 1})],
        ),
        ("chatml-json", '<tool_call>{"name": "now", "arguments": {x}}</tool_call>', []),
        ("chatml-json", '<tool_call>{"name": "now", "arguments": [1', []),
        (
            "llama3-json",
            '{"name": "now", "parameters": {"a": {"b": 1}',
            [("now", '{"a": {"b": 1}')],
        ),
        (
            "llama3-json",
            '{"name": "now", "parameters": {"a": {"b": 1}}',
            [("now", {"a": {"b": 1}})],
        ),
        ("mistral", '[TOOL_CALLS] [{"name": "now", "arguments": {}}, {"name": "no', [("now", {})]),
        ("mistral", "[TOOL_CALLS] [", []),
        ("gemma", "<|tool_call>call:no", []),
        ("qwen-xml", "<tool_call>\n<function=now>\n<parameter=a>\n1", [("now", "{")]),
    ],
)
def test_a_call_is_cut_after_its_name(family: str, text: str, calls: list[object]) -> None:
    content, found = cut(family, text)
    assert found == calls
    assert bool(content) == (not calls)


def test_text_in_a_parameter_keeps_its_indentation() -> None:
    code = "    if x:\n        return 1\n"
    text = (
        f"<tool_call>\n<function=edit>\n<parameter=code>\n{code}\n</parameter>\n"
        "<parameter=line>\n 12 \n</parameter>\n</function>\n</tool_call>"
    )
    properties = {"code": {"type": "string"}, "line": {"type": "integer"}}
    _, calls, _ = pieces("qwen-xml", text, schemas={"edit": {"properties": properties}})
    assert [call[:2] for call in calls] == [("edit", {"code": code, "line": 12})]


def test_names_with_hyphens_are_read() -> None:
    text = '<|tool_call>call:get-weather{city-name:<|"|>a:b<|"|>,at:{x.y:1}}<tool_call|>'
    _, calls, _ = pieces("gemma", text)
    assert [call[:2] for call in calls] == [("get-weather", {"city-name": "a:b", "at": {"x.y": 1}})]


@pytest.mark.parametrize("family", ["chatml-json", "mistral"])
def test_a_lone_surrogate_in_a_call_is_replaced(family: str) -> None:
    """No body can hold one: the whole answer would fail."""
    call = '{"name": "f\\udc00", "arguments": {"a": "x\\ud83d", "b": "\\ud83d\\ude00"}}'
    text = f"<tool_call>{call}</tool_call>" if family == "chatml-json" else f"[TOOL_CALLS] [{call}]"
    _, calls, _ = pieces(family, text)
    assert [call[:2] for call in calls] == [("f\ufffd", {"a": "x\ufffd", "b": "\U0001f600"})]


def test_arguments_that_are_no_json_are_text() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {"x": NaN}}\n</tool_call>'
    assert pieces("chatml-json", text)[:2] == (text, [])


def test_marks_inside_a_constrained_answer_stay_text() -> None:
    answer = json.dumps({"doc": "use <think>a</think> here", "n": 1})
    assert pieces("chatml-json", answer, is_constrained=True) == (answer, [], "")
    thought = f"<think>\nhm\n</think>\n\n{answer}"
    assert pieces("chatml-json", thought, is_constrained=True) == (answer, [], "hm")


def test_a_long_beginning_of_the_turn_is_read_quickly_and_leaves_the_parser_whole() -> None:
    began_s = time.perf_counter()
    parser = RegionParser(family_template("chatml-json"), "word " * 40_000)
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    found = [*parser.push(call), *parser.finish()]
    print(f"{time.perf_counter() - began_s:.3f} s")
    assert [one[0] for piece in found for one in piece.calls] == ["f"]


def test_a_tool_that_is_allowed_often_is_shown_once() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": MOVE}}
    named = {"type": "function", "function": {"name": "f"}}
    choice = check_tool_choice(
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named] * 300}}
    )
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [tool],
    }
    tools = parse_body(ChatRequest, json.dumps(body).encode()).tools
    assert len(resolve_choice(choice, tools)) == 1


@pytest.mark.parametrize("required", [[["a"]], [1], "name", 5])
def test_odd_lists_of_required_names_are_refused(required: object) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}},
        "required": required,
        "additionalProperties": False,
    }
    format_ = {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": schema, "strict": True},
    }
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "response_format": format_,
    }
    with pytest.raises(Exception, match="must name all properties"):
        parse_body(ChatRequest, json.dumps(body).encode())


def test_an_expression_beside_the_calls_of_a_family_has_a_time_limit() -> None:
    """It may come from an adapter, and the search runs in the event loop."""
    own = template_json("chatml-json")
    own["fields"]["content"] = {"close_pattern": r"(?:a|aa|aaa)+b"}
    template = choose_template(own, "<|im_start|>assistant\n <tool_call>")
    assert template is not None
    assert template.calls is not None
    (piece,) = RegionParser(template).push("a" * 28)
    assert piece.content == "a" * 28


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"content": {"close_pattern": "((a{100}){100}){20}"}}, "1000 counted repetitions"),
        ({"content": {"close_pattern": "(?:a{9,}){2,500}"}}, "1000 counted repetitions"),
        ({"content": {"close_pattern": "a" * 3000}}, "2048 characters"),
        ({"content": {"close_pattern": "(?:" * 500 + ")" * 500}}, "recursion"),
        ({"content": {"close": [f"a{i}" for i in range(40)]}}, "32 texts"),
        ({"content": {"content": "json", "content_args": [1]}}, "no object"),
        (
            {"content": {"content": "json", "content_args": {"string_delims": [["a", "b"]] * 40}}},
            "32 string_delims",
        ),
        (
            {
                "content": {
                    "content": "xml-inline",
                    "content_args": {
                        "tag_pattern": "(?P<key>a)",
                        "value_parser": {
                            "name": "xml-inline",
                            "args": {"tag_pattern": "((a{100}){100}){20}"},
                        },
                    },
                }
            },
            "1000 counted repetitions",
        ),
        ({f"f{i}": {"open": "a"} for i in range(40)}, "32 fields"),
    ],
)
def test_a_template_that_would_take_all_memory_or_time_is_refused(
    fields: dict[str, object], words: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        load_template({"fields": fields, "start_anchor": "A"})

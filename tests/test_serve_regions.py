"""The parser of response templates, against texts of each family and against transformers'."""

import random

import pytest
from transformers.utils.chat_parsing.response_parser import parse_response

from engine.errors import UnsupportedModelError
from serve_app.openai.tools import schemas
from serve_app.text.regions import Piece, RegionParser
from serve_app.text.response_template import (
    FAMILIES,
    choose_template,
    family_template,
    load_template,
)
from tests.response_texts import TEXTS, TOOLS, Call, template_json

CASES = [(family, *case) for family, cases in TEXTS.items() for case in cases]
Result = tuple[str, str, list[Call]]


def joined(pieces: list[Piece]) -> Result:
    calls = [(name, arguments) for piece in pieces for name, arguments, _ in piece.calls]
    content = "".join(piece.content for piece in pieces)
    return content, "".join(piece.reasoning for piece in pieces), calls


def parsed(family: str, chunks: list[str], turn_start: str = "") -> Result:
    parser = RegionParser(family_template(family), turn_start, schemas(TOOLS))
    return joined([piece for chunk in chunks for piece in parser.push(chunk)] + parser.finish())


@pytest.mark.parametrize(("family", "text", "content", "reasoning", "calls"), CASES)
def test_a_text_is_divided_equally_at_every_position_of_a_cut(
    family: str, text: str, content: str, reasoning: str, calls: list[Call]
) -> None:
    assert parsed(family, [text]) == (content, reasoning, calls)
    assert parsed(family, list(text)) == (content, reasoning, calls)
    for cut in range(1, len(text)):
        assert parsed(family, [text[:cut], text[cut:]]) == (content, reasoning, calls)


@pytest.mark.parametrize("family", FAMILIES)
def test_generated_texts_are_divided_as_transformers_divides_them(family: str) -> None:
    draw = random.Random(family)
    pieces = [text for text, *_ in TEXTS[family]]
    pieces += ["Hello ", "a < b", "\n\n", "[1, 2]", "{", "é", "<", "<think>", "</think>", "  x"]
    num_compared = 0
    for _ in range(400):
        text = "".join(draw.choices(pieces, k=draw.randint(1, 4)))
        chunks = []
        while text[sum(map(len, chunks)) :]:
            chunks.append(text[sum(map(len, chunks)) :][: draw.randint(1, 9)])
        ours = parsed(family, chunks)
        assert ours == parsed(family, [text])
        try:
            theirs = parse_response(text, template_json(family), prefix="", tools=TOOLS)
        except (ValueError, KeyError, TypeError):
            continue  # ours gives text where theirs fails
        calls = [call["function"] for call in theirs.get("tool_calls", ())]
        if any("name" not in call for call in calls):
            continue
        num_compared += 1
        expected = [(call["name"], call.get("arguments", {})) for call in calls]
        if not template_json(family)["fields"]["tool_calls"].get("repeats"):
            assert ours[2][len(ours[2]) - len(expected) :] == expected, text  # theirs: the last
        else:
            assert ours[2] == expected, text
        assert ours[1].endswith(theirs.get("reasoning_content", "")), text
    assert num_compared > 100


def test_reasoning_that_the_prompt_opens_is_reasoning() -> None:
    start = family_template("chatml-json").turn_start("<|im_start|>assistant\n<think>\n")
    assert start == "<think>\n"
    assert parsed("chatml-json", ["Hm.", "</think>", "\n\nHi"], start) == ("Hi", "Hm.", [])
    closed = "<think>\n\n</think>\n\n"
    assert parsed("chatml-json", ["Hi"], closed) == ("Hi", "", [])


def test_reasoning_without_an_end_stays_reasoning() -> None:
    assert parsed("chatml-json", ["<think>a", " <tool_call>"]) == ("", "a <tool_call>", [])


def test_a_search_that_takes_too_long_gives_text() -> None:
    spec = {
        "start_anchor": "A",
        "fields": {"content": {}, "tool_calls": {"open_pattern": r"(a|aa|aaa)+b", "close": "c"}},
    }
    parser = RegionParser(load_template(spec))
    text = "a" * 4000
    assert joined(parser.push(text) + parser.push("x") + parser.finish()) == (text + "x", "", [])


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"version": 2, "fields": {"content": {}}, "start_anchor": "A"},
        {"fields": {"content": {}}},
        {"fields": {"content": {}, "other": {}}, "start_anchor": "A"},
        {"fields": {"content": {"open_pattern": "("}}, "start_anchor": "A"},
        {"fields": {"content": {"content": "python"}}, "start_anchor": "A"},
        {"fields": {"content": {"transform": "a {content}"}}, "start_anchor": "A"},
    ],
)
def test_an_invalid_template_is_refused(spec: dict[str, object]) -> None:
    with pytest.raises(UnsupportedModelError, match="response_template: "):
        load_template(spec)


def test_the_family_comes_from_the_marks_of_the_chat_template() -> None:
    def family(source: str) -> str | None:
        template = choose_template(None, source)
        return None if template is None else template.name

    assert family("<|im_start|>assistant\n <tool_call>") == "chatml-json"
    assert family("<|im_start|> <tool_call> <function=x> <parameter=y>") == "qwen-xml"
    assert family("<|start_header_id|> <|eot_id|>") == "llama3-json"
    assert family("[INST] [TOOL_CALLS]") == "mistral"
    assert family("[INST] [TOOL_CALLS] [ARGS]") == "mistral-args"
    assert family("<|turn> <|tool_call>") == "gemma"
    assert family("<|start_of_role|> respond with <|tool_call|>") == "granite"
    assert family("'<|tool|>' + message['tools'] + '<|/tool|>'") == "phi"
    assert family("{{ messages }}") is None
    chosen = choose_template(template_json("mistral"), "{{ messages }}")
    assert chosen is not None
    assert chosen.name == "own"
    assert chosen.calls is None


def test_a_template_that_delimits_calls_as_its_family_can_demand_them() -> None:
    own = template_json("qwen-xml")
    own["fields"]["tool_calls"]["content_args"]["tag_pattern"] = "<(?P<key>a)(?P<value>b)>"
    source = "<|im_start|> <tool_call> <function=x> <parameter=y>"
    chosen = choose_template(own, source)
    assert chosen is not None
    assert chosen.calls is not None
    own["fields"]["tool_calls"]["close_pattern"] = "</call>"
    chosen = choose_template(own, source)
    assert chosen is not None
    assert chosen.calls is None

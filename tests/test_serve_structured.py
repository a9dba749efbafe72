"""Structured output in bodies: grammars made from OpenAI's and vLLM's fields, and refusals."""

from __future__ import annotations

import asyncio
import json
import random
import time
from contextlib import suppress

import jsonschema
import pytest

from engine.errors import InvalidRequestError
from engine.grammars import check_grammar
from engine.types import Grammar
from serve_app.dispatch.grammar_checks import GrammarChecks
from serve_app.errors import ApiError
from serve_app.openai.chat import ChatRequest
from serve_app.openai.completions import CompletionRequest
from serve_app.openai.json_body import FieldError, parse_body
from serve_app.openai.json_schemas import (
    MAX_SCHEMA_CHARS,
    closed,
    grammar_of_schema,
    place_of_keyword,
)
from serve_app.openai.structured import MAX_REGEX_CHARS
from tests.benchmarks.hostile_specs import HOSTILE, salted
from tests.grammar_helpers import accepts, random_schema

STRICT = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}


def chat(**fields: object) -> ChatRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return parse_body(ChatRequest, json.dumps(body).encode())


def refusal(**fields: object) -> ApiError:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert caught.value.status == 400
    return caught.value


def json_schema(schema: object, **options: object) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **options}}


def test_response_format_is_a_grammar() -> None:
    grammar = chat(response_format=json_schema(STRICT, strict=True)).grammar
    assert grammar is not None
    assert grammar.kind == "json_schema"
    assert json.loads(grammar.source) == STRICT
    assert list(json.loads(grammar.source)) == list(STRICT)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": None},
        {"response_format": {"type": "text"}},
        {"structured_outputs": None},
        {"structured_outputs": {}},
        {"structured_outputs": {"json": None, "json_object": False, "disable_fallback": True}},
        {"guided_json": None, "guided_regex": None, "guided_choice": None},
    ],
)
def test_neutral_values_leave_the_text_free(fields: dict[str, object]) -> None:
    assert chat(**fields).grammar is None


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "json_schema"),
        ({"structured_outputs": {"json": STRICT}}, "json_schema"),
        ({"structured_outputs": {"json": json.dumps(STRICT)}}, "json_schema"),
        ({"structured_outputs": {"json_object": True}}, "json_schema"),
        ({"structured_outputs": {"regex": r"^\d{3}-[a-f]+$"}}, "regex"),
        ({"structured_outputs": {"choice": ["yes", 'a "quote"', "Zürich\n"]}}, "lark"),
        ({"structured_outputs": {"grammar": 'start: "a" | "b"'}}, "lark"),
        (
            {"structured_outputs": {"grammar": 'root ::= "a" [b-c]+ | digit\ndigit ::= [0-9]'}},
            "gbnf",
        ),
        ({"guided_json": STRICT}, "json_schema"),
        ({"guided_regex": "a+"}, "regex"),
        ({"guided_choice": ["a", "b"]}, "lark"),
        ({"guided_grammar": 'start: "a"'}, "lark"),
    ],
)
def test_every_kind_of_constraint_passes_the_library(fields: dict[str, object], kind: str) -> None:
    body = {"model": "m", "prompt": "hi", **fields}
    completion = parse_body(CompletionRequest, json.dumps(body).encode())
    assert completion.grammar == chat(**fields).grammar
    assert completion.grammar is not None
    assert completion.grammar.kind == kind
    check_grammar(completion.grammar)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not JSON: a value is missing or is not JSON at line 1, column 1"),
        ("{\n nope}", "not JSON: a key in double quotes is missing at line 2, column 2"),
        ('{"type" 1}', "not JSON: a colon is missing after a key at line 1, column 9"),
        ("[1 2]", "not JSON: a comma or the closing bracket is missing at line 1, column 4"),
        ("{} {}", "not JSON: more text follows the value at line 1, column 4"),
        ('{"type', "not JSON: no quote ends the string that begins at line 1, column 2"),
        ('{"\t": 1}', "not JSON: a control character stands in a string at line 1, column 3"),
        (r'{"\x": 1}', "not JSON: a string has an invalid escape at line 1, column 3"),
        ("9" * 5000, "not JSON: a number has too many digits"),
        ("[" * 20_000, "nested too deeply"),
    ],
)
def test_text_that_is_no_json_is_refused_with_field_and_place(text: str, words: str) -> None:
    with pytest.raises(ApiError) as refused:
        chat(guided_json=text)
    assert str(refused.value) == f"guided_json: the text is {words}."
    assert refused.value.param == "guided_json"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": "json"}, "response_format", "must be an object"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "'xml'"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema: must be"),
        ({"response_format": json_schema([1])}, "response_format", "schema: must be a JSON schema"),
        ({"response_format": json_schema({}, strict="yes")}, "response_format", "strict: must be"),
        (
            {"response_format": json_schema({**STRICT, "required": []}, strict=True)},
            "response_format",
            "'city' is missing",
        ),
        (
            {"response_format": json_schema({"type": "object"}, strict=True)},
            "response_format",
            "additionalProperties: must be false",
        ),
        (
            {"response_format": json_schema({"type": "object", "x-guidance": {"lenient": True}})},
            "response_format",
            "x-guidance",
        ),
        ({"guided_json": {"divisibleBy": 2}}, "guided_json", "divisibleBy: is not supported"),
        ({"guided_json": {"required": True}}, "guided_json", "must be a list of names"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs", "the text is not JSON"),
        ({"guided_json": '{"type": "object", "type": 1}'}, "guided_json", "appears twice"),
        ({"guided_json": '{"const": NaN}'}, "guided_json", "NaN is not JSON"),
        ({"structured_outputs": {"json": '{"minimum": 1e999}'}}, "structured_outputs", "too large"),
        ({"structured_outputs": {"json": STRICT, "regex": "a"}}, "structured_outputs", "only one"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs", "non-empty"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs", "list of 1 to 1000"),
        ({"structured_outputs": {"choice": [""]}}, "structured_outputs", "non-empty strings"),
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern",
            "is not supported",
        ),
        (
            {"structured_outputs": {"structural_tag": "{}"}},
            "structured_outputs.structural_tag",
            "{}",
        ),
        ({"guided_choice": "a"}, "guided_choice", "must be a list"),
        ({"guided_regex": "a", "guided_json": STRICT}, "guided_regex", "guided_json does"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "guided_regex"),
        ({"guided_regex": "a", "min_tokens": 2}, "min_tokens", "guided_regex"),
        ({"guided_regex": "a" * (MAX_REGEX_CHARS + 1)}, "guided_regex", str(MAX_REGEX_CHARS)),
        (
            {"guided_grammar": '%llguidance {"no_forcing": false}\nstart: "a"'},
            "guided_grammar",
            "no_forcing is set by the server",
        ),
    ],
)
def test_a_wrong_constraint_is_refused_with_its_field(
    fields: dict[str, object], param: str, words: str
) -> None:
    error = refusal(**fields)
    assert error.param == param
    assert words in error.message


def test_a_schema_beyond_its_limits_is_refused() -> None:
    deep: dict[str, object] = {"type": "string"}
    for _ in range(31):
        deep = {"type": "array", "items": deep}
    assert chat(guided_json=deep).grammar is not None
    assert "levels deep" in refusal(guided_json={"type": "array", "items": deep}).message
    many: dict[str, object] = {"properties": {f"p{i}": {} for i in range(1001)}}
    assert "at most 1000 properties" in refusal(guided_json=many).message
    constants = {"enum": [[i] for i in range(101)]}
    assert "at most 100 objects and lists" in refusal(guided_json=constants).message
    wide = {"enum": [f"value {i}" for i in range(10_000)]}
    assert str(MAX_SCHEMA_CHARS) in refusal(guided_json=wide).message


def test_keywords_that_constrain_nothing_are_left_out() -> None:
    schema = {
        "type": "array",
        "uniqueItems": False,
        "items": {"type": "object", "propertyNames": {}, "properties": {"uniqueItems": {}}},
    }
    grammar = chat(guided_json=schema).grammar
    assert grammar is not None
    check_grammar(grammar)
    assert json.loads(grammar.source)["items"]["properties"] == {"uniqueItems": {}}


PERSON = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


@pytest.mark.parametrize(
    ("schema", "is_closed"),
    [
        (PERSON, True),
        ({"type": "array", "items": PERSON}, True),
        ({"$ref": "#/$defs/P", "$defs": {"P": PERSON}}, True),
        ({"anyOf": [PERSON, {"type": "null"}]}, True),
        ({"allOf": [{"$ref": "#/$defs/P"}], "$defs": {"P": PERSON}}, True),
        ({"allOf": [PERSON, {"type": "object", "properties": {"age": {}}}]}, False),
        ({**PERSON, "anyOf": [{"properties": {"age": {}}}]}, False),
        ({"oneOf": [PERSON, {"type": "null"}]}, True),
        ({"oneOf": [{**PERSON, "properties": {"name": {"const": "a"}}}, {"type": []}]}, False),
        ({**PERSON, "additionalProperties": {"type": "integer"}}, False),
        ({**PERSON, "patternProperties": {"^x": {}}}, False),
        ({**PERSON, "required": ["age"]}, False),
        ({"type": "object"}, False),
    ],
)
def test_objects_have_the_listed_properties_alone_unless_the_schema_speaks_of_others(
    schema: dict[str, object], is_closed: bool
) -> None:
    grammar = chat(guided_json=schema).grammar
    assert grammar is not None
    check_grammar(grammar)
    found = closed(schema)
    assert (found != schema) is is_closed
    assert ('"additionalProperties": false' in json.dumps(found)) is is_closed


def test_no_empty_schema_allows_answers_without_end() -> None:
    grammar = chat(guided_json={}).grammar
    assert grammar is not None
    assert json.loads(grammar.source) == {"type": "object"}


# Keywords that change which documents are valid, and that the library does not enforce.
UNENFORCED = {
    "uniqueItems": True,
    "contains": {"type": "integer"},
    "not": {"type": "string"},
    "if": {"required": ["a"]},
    "dependentRequired": {"a": ["b"]},
    "propertyNames": {"pattern": "^a"},
    "unevaluatedProperties": False,
}


@pytest.mark.parametrize("keyword", UNENFORCED)
def test_a_keyword_that_is_not_enforced_is_refused_and_found(keyword: str) -> None:
    schema = {"type": "object", "properties": {"a": {keyword: UNENFORCED[keyword]}}}
    grammar = chat(guided_json=schema).grammar
    assert grammar is not None
    with pytest.raises(InvalidRequestError, match=keyword):
        check_grammar(grammar)
    assert place_of_keyword(schema, keyword, "guided_json") == (
        f"guided_json.properties.a.{keyword}"
    )


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"enum": [9007199254740992, 10**18]}, (2**53, 10**18), (2**53 + 1, 10**18 + 1)),
        ({"type": "integer", "enum": [-(10**18), 7]}, (7, -(10**18)), (8,)),
        ({"minimum": 0, "maximum": 2**63 - 1}, (0, 2**63 - 1), (-1, 2**63)),
        ({"minimum": 0, "maximum": 10**40}, (0, 2**63 - 1), (-1,)),
    ],
)
def test_numbers_are_enforced_to_the_last_digit(
    schema: dict[str, object], right: tuple[int, ...], wrong: tuple[int, ...]
) -> None:
    grammar = chat(guided_json={"type": "integer", **schema}).grammar
    assert grammar is not None
    assert [n for n in right + wrong if accepts(grammar, str(n))] == list(right)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "enum": [1, 123456789012345678]},
        {"const": 2**53 + 1},
        {"const": {"ids": [-(2**53) - 1]}},
        {"type": "integer", "const": 2**63},
        {"type": ["integer", "array"], "const": 1e20},
        {"type": "integer", "minimum": 10**17 + 1},
        {"type": "integer", "maximum": 10**17 + 15},
        {"type": "integer", "exclusiveMinimum": -(2**53) + 0, "exclusiveMaximum": 2**53 + 3},
        {"type": "integer", "minimum": 2**64},
    ],
)
def test_a_number_that_the_library_would_change_is_refused(schema: dict[str, object]) -> None:
    error = refusal(guided_json={"properties": {"a": schema}})
    assert error.message.startswith("guided_json.properties.a.")
    assert "too many digits" in error.message


OPEN = {"type": "object", "properties": {"a": {"type": "integer"}, "ab": {}, "é": {"const": 1}}}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (
            {**OPEN, "additionalProperties": True},
            ('{"a": 1, "b": "x"}', '{"": 1}', '{"\\n": 1}'),
            ('{"a": "x"}', '{"\\u0061": "x"}', '{"\\u00e9": 2}', '{"\\ud83d": 1}'),
        ),
        (
            {**OPEN, "additionalProperties": {"type": "string"}},
            ('{"a": 1, "b": "x"}', '{"ab": 1, "abc": ""}', '{"": "", "e\\n": ""}'),
            ('{"b": 1}', '{"a": "x"}', '{"\\u0061": "x"}', '{"é": "x"}', '{"\\u00e9": "x"}'),
        ),
        (
            {"type": "object", "additionalProperties": {"type": "string"}},
            ("{}", '{"a": "x"}', '{"é\\n": ""}'),
            ('{"a": 1}', '{"\\ud83d": "x"}'),
        ),
        (
            {"type": "object", "patternProperties": {"^a": {"type": "integer"}}},
            ("{}", '{"a": 1, "ab": 2}'),
            ('{"a": "x"}', '{"\\u0061": "x"}'),
        ),
        (
            {"allOf": [OPEN, {"properties": {"z": {"type": "null"}}, "required": ["z"]}]},
            ('{"z": null}', '{"a": 1, "z": null, "y": 2}'),
            ('{"a": 1}', '{"a": "x", "z": null}', '{"z": null, "\\u0061": "x"}'),
        ),
    ],
)
def test_no_escape_in_a_name_evades_the_schema_of_its_property(
    schema: dict[str, object], right: tuple[str, ...], wrong: tuple[str, ...]
) -> None:
    grammar = chat(guided_json=schema).grammar
    assert grammar is not None
    assert [text for text in right + wrong if accepts(grammar, text)] == list(right)
    for text in right:
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        ('^[^,"]$', ("a", "\\"), ('"', ",")),
        (r"^[^\\]$", ("a", '"'), ("\\",)),
        (r"^[^\"\\]+$", ("ab",), ('"', "\\", 'a"')),
        (r"^[^a]$", ('"', "\\", "\n"), ("a",)),
        (r"^\[[^\x22]\]$", ("[a]",), ('["]',)),
    ],
)
def test_classes_leave_out_quotation_marks_and_backslashes(
    pattern: str, right: tuple[str, ...], wrong: tuple[str, ...]
) -> None:
    grammar = chat(guided_json={"type": "string", "pattern": pattern}).grammar
    assert grammar is not None
    assert [one for one in right + wrong if accepts(grammar, json.dumps(one))] == list(right)


@pytest.mark.parametrize(
    "pattern",
    ['^[^[:alpha:]"]$', '^[[^"]]$', '^[a&&b"]$', r"^\P{Po}$", "^[\0-!#-~]$", r"^[\x00-\x1f]$"],
)
def test_classes_in_which_the_library_takes_more_are_refused(pattern: str) -> None:
    error = refusal(guided_json={"type": "string", "pattern": pattern})
    assert "not supported" in error.message


@pytest.mark.parametrize("schema", [{"pattern": "yes\\"}, {"patternProperties": {"^a\\": {}}}])
def test_an_expression_that_ends_in_a_lone_backslash_is_refused(schema: dict[str, object]) -> None:
    assert "escapes nothing" in refusal(guided_json={"type": "object", **schema}).message
    assert chat(guided_json={"type": "string", "pattern": "yes\\\\"}).grammar is not None


def test_an_expression_of_open_brackets_is_read_once() -> None:
    """A quadratic search would need minutes."""
    with suppress(FieldError):
        grammar_of_schema({"type": "string", "pattern": "[" * 60_000}, "guided_json")


@pytest.mark.parametrize("name", ['"a', "\\a"])
def test_free_names_are_others_than_those_with_a_mark_of_json(name: str) -> None:
    schema = {
        "type": "object",
        "properties": {name: {"type": "integer"}},
        "additionalProperties": {"type": "boolean"},
    }
    grammar = chat(guided_json=schema).grammar
    assert grammar is not None
    texts = [json.dumps(one) for one in ({name: 1}, {"b": True}, {name: True})]
    assert [accepts(grammar, text) for text in texts] == [True, True, False]


def test_a_choice_of_exactly_one_schema_is_not_closed() -> None:
    one = {"type": "object", "required": ["id", "win"], "properties": {"id": {"type": "string"}}}
    other = {**one, "required": ["id", "lose"], "properties": {**one["properties"], "lose": {}}}
    grammar = chat(guided_json={"oneOf": [one, other]}).grammar
    assert grammar is not None
    with pytest.raises(InvalidRequestError, match="oneOf"):  # for both take {id, win, lose}
        check_grammar(grammar)


def test_schemas_beside_too_many_names_are_refused() -> None:
    many = {f"p{i}": {} for i in range(101)}
    text = {"additionalProperties": {"type": "string"}}
    assert "at most 100 properties" in refusal(guided_json={"properties": many, **text}).message
    mixed = {"patternProperties": {"^a": {}}, **text}
    assert "patternProperties beside" in refusal(guided_json=mixed).message


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        (
            "date",
            ("2024-02-29", "2000-02-29", "2023-02-28", "2023-12-29", "0004-02-29", "1000-10-10"),
            ("2023-02-29", "1900-02-29", "0000-01-01", "0000-02-29", "2023-04-31", "2023-13-01"),
        ),
        (
            "date-time",
            ("2024-02-29T23:59:59Z", "2023-03-01T00:00:00.5+01:00"),
            ("2023-02-29T00:00:00Z", "2024-12-31T22:59:60Z", "2024-12-31T24:00:00Z"),
        ),
        ("time", ("23:59:59Z", "00:00:00.1-01:00"), ("22:59:60Z", "24:00:00Z", "23:59:59")),
    ],
)
@pytest.mark.parametrize("own", [{}, {"pattern": "^[0-9]"}, {"pattern": "^[0-9]", "allOf": [{}]}])
def test_formats_of_dates_and_times_are_those_that_parsers_take(
    name: str, right: tuple[str, ...], wrong: tuple[str, ...], own: dict[str, object]
) -> None:
    grammar = chat(guided_json={"type": "string", "format": name, **own}).grammar
    assert grammar is not None
    assert [one for one in right + wrong if accepts(grammar, json.dumps(one))] == list(right)


async def test_checks_name_the_field_and_are_remembered() -> None:
    checks = GrammarChecks()
    try:
        await checks.check(Grammar("regex", "a+"), "guided_regex")
        unique = {"type": "object", "properties": {"a": {"uniqueItems": True}}}
        with pytest.raises(InvalidRequestError, match=r"at schema\.properties\.a\.uniqueItems"):
            await checks.check(Grammar("json_schema", json.dumps(unique)), "guided_json")
        for _ in range(2):
            with pytest.raises(InvalidRequestError, match="look-ahead") as caught:
                await checks.check(Grammar("regex", "(?=a)b"), "guided_regex")
            assert caught.value.param == "guided_regex"
            assert caught.value.message.startswith("guided_regex: ")
    finally:
        checks._threads.shutdown(wait=False, cancel_futures=True)


async def test_a_grammar_in_gbnf_reaches_the_engine_in_lark() -> None:
    checks = GrammarChecks()
    try:
        grammar = Grammar("gbnf", 'root ::= "a" [b-c]+ | digit\ndigit ::= [0-9]', starts_after=7)
        for _ in range(2):  # the second from the memory of translations
            checked = await checks.check(grammar, "guided_grammar")
            assert checked is not None
            assert (checked.kind, checked.starts_after) == ("lark", 7)
            assert "start: " in checked.source
            assert check_grammar(checked) is checked
        for source, words in (
            ("root ::= (", "not a grammar in GBNF"),
            ('a ::= "a"', "No 'root' rule"),
            ("".join(f"r{i} ::= r{i + 1}\n" for i in range(1500)), "too many in GBNF"),
        ):
            for _ in range(2):
                with pytest.raises(InvalidRequestError, match=words) as caught:
                    await checks.check(Grammar("gbnf", source), "guided_grammar")
                assert caught.value.param == "guided_grammar"
    finally:
        checks._threads.shutdown(wait=False, cancel_futures=True)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_constraint_is_refused_or_passes_and_nothing_else(name: str) -> None:
    """Prints its time; `pytest -rP` shows it."""
    began_s = time.perf_counter()
    try:
        grammar = chat(**HOSTILE[name]).grammar
        assert grammar is not None
        check_grammar(grammar)
        result = "passes"
    except (ApiError, InvalidRequestError) as error:
        result = error.message[:90]
    print(f"{name}: {time.perf_counter() - began_s:.3f} s: {result}")


@pytest.mark.parametrize("name", HOSTILE)
def test_a_salt_makes_a_hostile_constraint_new_and_refuses_none(name: str) -> None:
    """The benchmark measures what no cache knows."""
    sources = []
    for fields in (HOSTILE[name], salted(HOSTILE[name], "1"), salted(HOSTILE[name], "2")):
        with suppress(ApiError):
            grammar = chat(**fields).grammar
            assert grammar is not None
            sources.append(grammar.source)
    assert len(set(sources)) == len(sources)
    assert len(sources) in (0, 3)


async def test_the_event_loop_runs_on_while_grammars_are_checked() -> None:
    checks = GrammarChecks()
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    turning = asyncio.ensure_future(turn())
    try:
        schema = {"anyOf": [{"type": "string", "minLength": i} for i in range(1000)]}
        grammar = Grammar("json_schema", json.dumps(schema))
        before = turns
        await checks.check(grammar, "guided_json")
        assert turns > before + 1
    finally:
        turning.cancel()
        checks._threads.shutdown(wait=False, cancel_futures=True)


def test_generated_schemas_reach_the_engine_unchanged() -> None:
    generator = random.Random(5)
    for _ in range(200):
        schema = random_schema(generator, 3)
        jsonschema.Draft202012Validator.check_schema(schema)
        grammar = chat(response_format=json_schema(schema)).grammar
        assert grammar is not None
        assert json.loads(grammar.source) == closed(schema)
        check_grammar(grammar)

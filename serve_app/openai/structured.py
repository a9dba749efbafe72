"""Structured output: the fields of a body that constrain its answer, as a grammar for the engine.

OpenAI's `response_format`, vLLM's `structured_outputs`, and vLLM's former `guided_*` fields. The
size of a constraint is bounded here, before anything reads it closely; the grammar library then
refuses the features that it cannot enforce, so that no part of a constraint is ignored in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import PlainValidator

from engine.grammar_sources import lark_of_choices, without_forcing
from engine.types import Grammar
from serve_app.errors import shown
from serve_app.openai.json_body import FieldError, is_one_of, nullable, refuse, strict_json
from serve_app.openai.json_schemas import MAX_SCHEMA_CHARS, grammar_of_schema

MAX_REGEX_CHARS = 4 * 1024
MAX_GRAMMAR_CHARS = 64 * 1024
MAX_ALTERNATIVES = 1000
MAX_NAME_CHARS = 64

_ANY_OBJECT = Grammar("json_schema", '{"type": "object"}')
_STRUCTURED_KINDS = ("json", "regex", "choice", "grammar", "json_object")
# Option of `structured_outputs` -> the values that are as if it were left out.
_STRUCTURED_OPTIONS: Mapping[str, tuple[object, ...]] = {
    "structural_tag": (None,),
    "whitespace_pattern": (None,),
    "disable_fallback": (None, True, False),  # there is one library, so there is no fallback
    "disable_any_whitespace": (None, True, False),  # the form of JSON is fixed
    "disable_additional_properties": (None, False),
}


def check_response_format(value: object) -> Grammar | None:
    """Returns the grammar of OpenAI's `response_format`, and None for text."""
    if not isinstance(value, dict):
        refuse("response_format", "must be an object", value)
    kind, form, field = value.get("type"), value.get("json_schema"), "response_format.json_schema"
    if kind == "text":
        return None
    if kind == "json_object":
        return _ANY_OBJECT
    if kind != "json_schema":
        kinds = "text, json_object, json_schema"
        refuse("response_format.type", f"must be one of {kinds}", kind, "type")
    if not isinstance(form, dict):
        refuse(field, "must be an object", form)
    name, is_strict = form.get("name"), form.get("strict")
    if name is not None and not (isinstance(name, str) and len(name) <= MAX_NAME_CHARS):
        refuse(f"{field}.name", f"must be a string of at most {MAX_NAME_CHARS} characters", name)
    if is_strict is not None and not isinstance(is_strict, bool):
        refuse(f"{field}.strict", "must be true or false", is_strict)
    schema = form.get("schema")
    if schema is None:
        if is_strict:
            raise FieldError(f"{field}.schema: is required if strict is true.")
        return _ANY_OBJECT
    return grammar_of_schema(schema, f"{field}.schema", is_strict=bool(is_strict))


def check_structured_outputs(value: object) -> Grammar | None:
    """Returns the grammar of vLLM's `structured_outputs`, and None if it names no constraint."""
    field = "structured_outputs"
    if not isinstance(value, dict):
        refuse(field, "must be an object", value)
    for name, item in value.items():
        if name in _STRUCTURED_KINDS:
            continue
        if not is_one_of(item, _STRUCTURED_OPTIONS.get(name, ())):
            refuse(f"{field}.{shown(name)[1:-1]}", "is not supported", item, name)
    given = {
        name: item
        for name in _STRUCTURED_KINDS
        if (item := value.get(name)) is not None and not (name == "json_object" and item is False)
    }
    if len(given) > 1:
        raise FieldError(f"{field}: only one constraint is allowed, got {', '.join(given)}.")
    for name, item in given.items():
        return _CONSTRAINTS[name](item, f"{field}.{name}")
    return None


def _grammar_of_json(value: object, field: str) -> Grammar:
    """Returns the grammar of a schema that is an object or, as vLLM allows, its JSON text."""
    if isinstance(value, str):
        if len(value) > MAX_SCHEMA_CHARS:
            refuse(field, f"at most {MAX_SCHEMA_CHARS} characters are allowed", len(value))
        try:
            value = strict_json(value)
        except RecursionError:
            raise FieldError(f"{field}: the text is nested too deeply.") from None
        except ValueError as error:
            raise FieldError(f"{field}: the text is not JSON: {error}.") from None
    return grammar_of_schema(value, field)


def _grammar_of_json_object(value: object, field: str) -> Grammar:
    if value is not True:
        refuse(field, "must be true or false", value)
    return _ANY_OBJECT


def _grammar_of_regex(value: object, field: str) -> Grammar:
    return Grammar("regex", _text(value, field, MAX_REGEX_CHARS))


def _grammar_of_choice(value: object, field: str) -> Grammar:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_ALTERNATIVES:
        refuse(field, f"must be a list of 1 to {MAX_ALTERNATIVES} strings", value)
    for item in value:
        if not isinstance(item, str) or not item:
            refuse(field, "must hold non-empty strings", item)
    source = lark_of_choices(tuple(dict.fromkeys(value)))
    return Grammar("lark", _text(source, field, MAX_GRAMMAR_CHARS))


def _grammar_of_grammar(value: object, field: str) -> Grammar:
    """Returns a grammar in Lark or GBNF, neither of which is read here."""
    source = _text(value, field, MAX_GRAMMAR_CHARS)
    if "::=" in source:
        return Grammar("gbnf", source)
    try:
        return Grammar("lark", without_forcing(source))
    except ValueError as error:
        raise FieldError(f"{field}: {error}.") from None


_CONSTRAINTS: Mapping[str, Callable[[object, str], Grammar]] = {
    "json": _grammar_of_json,
    "regex": _grammar_of_regex,
    "choice": _grammar_of_choice,
    "grammar": _grammar_of_grammar,
    "json_object": _grammar_of_json_object,
}


def _text(value: object, field: str, max_chars: int) -> str:
    if not isinstance(value, str) or not value:
        refuse(field, "must be a non-empty string", value)
    if len(value) > max_chars:
        refuse(field, f"at most {max_chars} characters are allowed", len(value))
    return value


def guided(name: str, kind: Any) -> PlainValidator:
    """Returns the validator of vLLM's former field for one kind of constraint."""
    return nullable(lambda value: _CONSTRAINTS[name](value, f"guided_{name}"), kind, None)

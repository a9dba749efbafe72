"""JSON schemas of clients: checked, bounded in size, and brought into the form of grammars."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeAlias

from engine.types import Grammar
from serve_app.errors import shown
from serve_app.openai.exact_schemas import (
    PATTERNS_OF_FORMATS,
    UnsupportedPatternError,
    exact_pattern,
    inexact_number,
    without_controls,
)
from serve_app.openai.json_body import FieldError, is_deeper, is_one_of, refuse

MAX_SCHEMA_CHARS = 64 * 1024
MAX_SCHEMA_DEPTH = 32
# The time to compile grows with the square: 0.1 s for so many properties, 0.2 s for so many objects
# and lists as constants.
MAX_PROPERTIES = 1000
MAX_CONSTANT_CONTAINERS = 100
_MAX_NAMES = 100
MAX_NAME_CHARS = 128
# OpenAI's limits of schemas with `strict`, except for the number of properties.
MAX_STRICT_DEPTH = 10
MAX_STRICT_ENUM_VALUES = 1000
MAX_STRICT_NAME_CHARS = 120_000

Schema: TypeAlias = Mapping[str, object]

# Keywords whose values are schemas, mappings to schemas, or lists of schemas.
_SCHEMA_KEYS = (
    "additionalProperties",
    "additionalItems",
    "items",
    "contains",
    "not",
    "if",
    "then",
    "else",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
)
_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMA_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems", "items")
# Keyword -> the values with which it has no effect: the library refuses some even then.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "uniqueItems": (False,),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    "propertyNames": (True, {}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "minContains": (0,),
}
# The library's own switches, which would turn refusals off, and keywords of JSON Schema's third
# draft, which the library passes over.
_REFUSED_KEYS = ("x-guidance", "divisibleBy", "disallow", "extends")
_SCALARS = ("string", "number", "integer", "boolean", "null")
# Keywords that combine the properties of an object with those of other schemas, and keywords about
# properties which `properties` does not list.
_COMBINING_KEYS = frozenset(
    ("$ref", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas")
)
_OPEN_KEYS = frozenset(
    (
        *("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames"),
        *("minProperties", "dependentRequired", "dependencies"),
    )
)


def grammar_of_schema(schema: object, field: str, *, is_strict: bool = False) -> Grammar:
    """Returns the grammar of a JSON schema. `{}` allows any object: any value would include numbers
    and strings that never end. Raises FieldError with the place of the fault in the schema."""
    found = enforceable(schema, field, is_strict=is_strict) or {"type": "object"}
    return Grammar("json_schema", json.dumps(found, ensure_ascii=False))


def enforceable(schema: object, field: str, *, is_strict: bool = False) -> dict[str, object]:
    """Returns a schema within all limits, in the form that the grammar library enforces to the
    letter, if it takes it. Raises FieldError with the place of the fault in the schema."""
    if not isinstance(schema, dict):
        refuse(field, "must be a JSON schema, an object", schema)
    if is_deeper(schema, MAX_SCHEMA_DEPTH):
        raise FieldError(f"{field}: nested more than {MAX_SCHEMA_DEPTH} levels deep.")
    schema = _without_neutral(schema)
    if is_strict:
        _check_strict(schema, field)
    _check_size(schema, field)
    try:
        exact = _with_exact_formats(closed(schema))
    except UnsupportedPatternError as error:
        raise FieldError(f"{field}: {error}") from None
    found = _with_plain_names(exact, field)
    try:
        source = json.dumps(found, ensure_ascii=False, allow_nan=False)
        source.encode()
    except UnicodeEncodeError:  # of a schema given as JSON text, whose escapes are decoded here
        raise FieldError(f"{field}: a string has a lone surrogate.") from None
    except ValueError:  # 1e999 is read as infinity
        raise FieldError(f"{field}: a number is too large.") from None
    if len(source) > MAX_SCHEMA_CHARS:
        refuse(field, f"at most {MAX_SCHEMA_CHARS} characters are allowed", len(source))
    return found


def _with_exact_formats(schema: Schema) -> dict[str, object]:
    """Returns the schema with expressions beside the formats that the library takes too widely."""
    found = _map_schemas(schema, _with_exact_formats)
    patterns = found.get("patternProperties")
    if isinstance(patterns, dict):
        found["patternProperties"] = {exact_pattern(key): part for key, part in patterns.items()}
    if isinstance(found.get("pattern"), str):
        found["pattern"] = exact_pattern(str(found["pattern"]))
    name = found.get("format")
    pattern = PATTERNS_OF_FORMATS.get(name) if isinstance(name, str) else None
    others = found.get("allOf", [])
    if pattern is not None and "pattern" not in found:
        found["pattern"] = pattern
    elif pattern is not None and isinstance(others, list):
        found["allOf"] = [*others, {"pattern": pattern}]
    return found


def _with_plain_names(schema: Schema, field: str) -> dict[str, object]:
    """Returns the schema without `additionalProperties` beside other properties: the library takes
    JSON escapes in such names, `"\\u0061"` for `"a"`, which would evade the schema of `a`. The
    names of `patternProperties` have no such escapes."""

    def plain(part: Schema) -> dict[str, object]:
        found = _map_schemas(part, plain)
        names, patterns = found.get("properties"), found.get("patternProperties")
        others = found.get("additionalProperties", True)
        is_open = others is True or others == {}
        if others is False or (is_open and not names and not patterns):
            return found
        if patterns:
            if not is_open:
                raise FieldError(
                    f"{field}: patternProperties beside an additionalProperties that is a schema "
                    "is not supported."
                )
            return {**found, "additionalProperties": False}
        known = list(names) if isinstance(names, dict) and not is_open else []
        if len(known) > _MAX_NAMES or any(len(name) > MAX_NAME_CHARS for name in known):
            raise FieldError(
                f"{field}: an additionalProperties that is a schema is allowed beside at most "
                f"{_MAX_NAMES} properties, of at most {MAX_NAME_CHARS} characters."
            )
        pattern = f"(?s)^({_all_but(known)})$" if known else "^"
        return {**found, "patternProperties": {pattern: others}, "additionalProperties": False}

    return plain(schema)


def _all_but(texts: Iterable[str]) -> str:
    """Returns an expression of all texts except for these."""
    rests: dict[str, list[str]] = {}
    is_empty_one = False
    for text in texts:
        is_empty_one |= not text
        if text:
            rests.setdefault(f"\\x{{{ord(text[0]):x}}}", []).append(text[1:])
    parts = [] if is_empty_one else [""]
    parts.append(f"[^{''.join(rests)}{without_controls(rests)}].*" if rests else ".+")
    parts += [f"{first}({_all_but(rest)})" for first, rest in rests.items()]
    return "|".join(parts)


def _children(schema: Schema) -> Iterator[tuple[str, object]]:
    """Yields the schemas directly inside a schema, with their places."""
    for key in _SCHEMA_KEYS:
        if isinstance(schema.get(key), dict):
            yield key, schema[key]
    for key in _SCHEMA_MAPS:
        inner = schema.get(key)
        if isinstance(inner, dict):
            yield from ((f"{key}.{name}", part) for name, part in inner.items())
    for key in _SCHEMA_LISTS:
        items = schema.get(key)
        if isinstance(items, list):
            yield from ((f"{key}.{index}", part) for index, part in enumerate(items))


def _schemas(schema: Schema, where: str) -> Iterator[tuple[str, Schema]]:
    """Yields a schema and all schemas inside it, with their places."""
    yield where, schema
    for place, part in _children(schema):
        if isinstance(part, dict):
            yield from _schemas(part, f"{where}.{place}")


def place_of_keyword(schema: Schema, keyword: str, where: str) -> str | None:
    """Returns the place of the keyword in the first schema that has it."""
    return next(
        (f"{at}.{keyword}" for at, part in _schemas(schema, where) if keyword in part), None
    )


def closed(schema: Schema) -> dict[str, object]:
    """Returns a schema whose objects have only the properties that it lists, unless it has keywords
    about others: as vLLM by default, for a small model adds properties without end. Every document
    of the result is a document of the schema. Schemas that combine objects, which may each list a
    part of the properties, are returned unchanged, as are schemas of which at most one may match: a
    document that a closed schema refuses may match the open schema too."""
    for _, part in _schemas(schema, ""):
        all_of, one_of = part.get("allOf"), part.get("oneOf")
        is_combined = isinstance(all_of, list) and len(all_of) > 1
        if isinstance(one_of, list) and sum(not _is_scalar(one) for one in one_of) > 1:
            is_combined = True
        if is_combined or ("properties" in part and not part.keys().isdisjoint(_COMBINING_KEYS)):
            return dict(schema)
    return _closed(schema)


def _is_scalar(schema: object) -> bool:
    """Returns True for a schema without objects and lists."""
    return isinstance(schema, dict) and schema.get("type") in _SCALARS


def _closed(schema: Schema) -> dict[str, object]:
    found = _map_schemas(schema, _closed)
    properties, required = found.get("properties"), found.get("required", [])
    if (
        isinstance(properties, dict)
        and isinstance(required, list)
        and properties.keys() >= set(map(str, required))
        and found.keys().isdisjoint(_OPEN_KEYS)
    ):
        found["additionalProperties"] = False
    return found


def _check_size(schema: Schema, field: str) -> None:
    num_properties = num_containers = 0
    for where, part in _schemas(schema, field):
        for key in _REFUSED_KEYS:
            if key in part:
                raise FieldError(f"{where}.{key}: is not supported.")
        if isinstance(part.get("required"), bool):
            raise FieldError(f"{where}.required: must be a list of names.")
        if (inexact := inexact_number(part)) is not None:
            key, number = inexact
            if isinstance(number, float) and math.isinf(number):  # 1e999 is read so
                raise FieldError(f"{where}.{key}: a number is too large.")
            raise FieldError(f"{where}.{key}: {shown(number)} has too many digits to be enforced.")
        for key in _SCHEMA_MAPS:
            inner = part.get(key)
            num_properties += len(inner) if isinstance(inner, dict) else 0
        values = part.get("enum")
        constants = values if isinstance(values, list) else []
        num_containers += sum(map(_num_containers, (*constants, part.get("const"))))
    for count, limit, words in (
        (num_properties, MAX_PROPERTIES, "properties and definitions"),
        (num_containers, MAX_CONSTANT_CONTAINERS, "objects and lists in enum and const"),
    ):
        if count > limit:
            refuse(field, f"at most {limit} {words} are allowed", count)


def _num_containers(value: object) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + sum(map(_num_containers, value)) if isinstance(value, list) else 0


def _without_neutral(schema: Schema) -> dict[str, object]:
    """Returns the schema without keywords that have no effect."""
    kept = {
        key: value for key, value in schema.items() if not is_one_of(value, _NEUTRAL.get(key, ()))
    }
    return _map_schemas(kept, _without_neutral)


def _map_schemas(
    schema: Schema, change: Callable[[Schema], dict[str, object]]
) -> dict[str, object]:
    """Returns a copy whose direct inner schemas are changed."""

    def changed(part: object) -> object:
        return change(part) if isinstance(part, dict) else part

    found = dict(schema)
    for key in _SCHEMA_KEYS:
        if key in found:
            found[key] = changed(found[key])
    for key in _SCHEMA_MAPS:
        inner = found.get(key)
        if isinstance(inner, dict):
            found[key] = {name: changed(part) for name, part in inner.items()}
    for key in _SCHEMA_LISTS:
        items = found.get(key)
        if isinstance(items, list):
            found[key] = [changed(part) for part in items]
    return found


def _check_strict(schema: Schema, field: str) -> None:
    """Checks OpenAI's rules and limits for `strict: true`."""
    num_enum_values = num_name_chars = 0
    for where, part in _schemas(schema, field):
        properties = part.get("properties")
        names = set(properties) if isinstance(properties, dict) else set()
        num_name_chars += sum(map(len, names))
        if isinstance(properties, dict) or part.get("type") == "object":
            if part.get("additionalProperties") is not False:
                raise FieldError(f"{where}.additionalProperties: must be false if strict is true.")
            required = part.get("required")
            given = required if isinstance(required, list) else ()
            missing = names.difference(name for name in given if isinstance(name, str))
            if missing:
                raise FieldError(
                    f"{where}.required: must name all properties if strict is true; "
                    f"{shown(min(missing))} is missing."
                )
        values = part.get("enum")
        if isinstance(values, list):
            num_enum_values += len(values)
            num_name_chars += sum(len(one) for one in values if isinstance(one, str))
    for count, limit, words in (
        (num_enum_values, MAX_STRICT_ENUM_VALUES, "enum values"),
        (num_name_chars, MAX_STRICT_NAME_CHARS, "characters of names and enum values"),
        (_object_depth(schema), MAX_STRICT_DEPTH, "levels of objects"),
    ):
        if count > limit:
            refuse(field, f"at most {limit} {words} are allowed if strict is true", count)


def _object_depth(schema: object) -> int:
    if not isinstance(schema, dict):
        return 0
    inner = max((_object_depth(part) for _, part in _children(schema)), default=0)
    return inner + ("properties" in schema)

"""Parses HTTP bodies: bytes -> strict JSON -> a checked model, or an ApiError that names the field.

Strict JSON: UTF-8, no duplicate keys, no NaN or Infinity, no lone surrogates, bounded depth and
object size. FastAPI's own validation is never used, and a body is checked before any object of its
size is built. The models are in chat, completions, tokenize and the dialects.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Never, NoReturn, TypeVar

from pydantic import BaseModel, PlainValidator, ValidationError

from serve_app.errors import ApiError, shown
from serve_app.field_problems import problem_of

MAX_OBJECT_KEYS = 4096
# Objects and arrays in one body: at least 128 bytes each as Python objects.
MAX_CONTAINERS = 1 << 16

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
# The message of Python's parser -> its meaning.
_SYNTAX = {
    "Expecting value": "a value is missing or is not JSON",
    "Expecting ',' delimiter": "a comma or the closing bracket is missing",
    "Expecting ':' delimiter": "a colon is missing after a key",
    "Expecting property name enclosed in double quotes": "a key in double quotes is missing",
    "Extra data": "more text follows the value",
    "Invalid control character at": "a control character stands in a string",
    "Invalid \\escape": "a string has an invalid escape",
    "Invalid \\uXXXX escape": "a string has an invalid escape",
    "Unterminated string starting at": "no quote ends the string that begins",
}
# A string can hold a surrogate only if its JSON escapes one.
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")

Model = TypeVar("Model", bound=BaseModel)


class FieldError(ValueError):
    """Raised by validators. `message` names the field and the problem; `where` is appended to the
    field's name in the error's `param`."""

    def __init__(self, message: str, where: str = "") -> None:
        super().__init__(message, where)
        self.message = message
        self.where = where

    def __str__(self) -> str:
        return self.message


def refuse(field: str, problem: str, value: object, where: str = "") -> NoReturn:
    """Raises FieldError with a value that is not allowed."""
    raise FieldError(f"{field}: {problem}, got {shown(value)}.", where)


def nullable(check: Callable[[Any], object], kind: Any, null: object = ()) -> PlainValidator:
    """Returns the validator of a field whose values `check` reads; `null` stands for JSON's null.
    `kind`: the type of the field in the JSON schema."""
    return PlainValidator(
        lambda value: null if value is None else check(value), json_schema_input_type=kind | None
    )


def is_one_of(value: object, others: Iterable[object]) -> bool:
    """Returns True if the value equals one of the others of its own type: True == 1 in Python."""
    return any(type(value) is type(one) and value == one for one in others)


def is_deeper(value: object, max_levels: int) -> bool:
    """Returns True if JSON has more than so many levels of objects and lists, empty ones beyond the
    last not counted."""
    level: list[Any] = [[value]]  # the objects and lists of a level; other values may be many
    for _ in range(max_levels + 1):
        items = (item for one in level for item in (one.values() if isinstance(one, dict) else one))
        level = [item for item in items if isinstance(item, dict | list)]
        if not level:
            return False
    return any(level)


class TranslatedBody(BaseModel):
    """A body that is written in other fields than the model's."""

    @classmethod
    def read(cls, body: dict[str, object]) -> dict[str, object]:
        """Returns the fields of the model. Raises FieldError, `where` being the body's field."""
        raise NotImplementedError

    @classmethod
    def renamed(cls, error: ApiError) -> ApiError:
        """Returns the error with the body's name of the field."""
        raise NotImplementedError


def parse_body(model: type[Model], raw: bytes) -> Model:
    return check_fields(model, parse_fields(model, raw))


def parse_fields(model: type[BaseModel], raw: bytes) -> dict[str, object]:
    """Returns the fields of the model that a body gives, unchecked."""
    body = parse_json(raw)
    if not isinstance(body, dict):
        raise ApiError(
            400, f"The body must be a JSON object, not {_type_name(body)}.", code="invalid_json"
        )
    if not issubclass(model, TranslatedBody):
        return body
    try:
        return model.read(body)
    except FieldError as error:
        raise ApiError(
            400, error.message, param=error.where or None, code="invalid_value"
        ) from None


def check_fields(model: type[Model], fields: dict[str, object]) -> Model:
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise _named(_to_api_error(error), model) from None


def _named(error: ApiError, model: type[BaseModel]) -> ApiError:
    # A local variable of the function that raises the error would keep the body in a cycle.
    return model.renamed(error) if issubclass(model, TranslatedBody) else error


def parse_json(raw: bytes) -> object:
    if _num_containers(raw) > MAX_CONTAINERS:
        raise json_error(f"more than {MAX_CONTAINERS} objects and arrays")
    try:
        value = strict_json(raw.decode("utf-8"))
        if _SURROGATE_ESCAPE.search(raw):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeError:
        raise json_error("not UTF-8, or a lone surrogate in a string") from None
    except RecursionError:
        raise json_error("nested too deeply") from None
    except ValueError as error:
        raise json_error(str(error)[:200]) from None
    return value


def strict_json(text: str) -> object:
    """Returns the value. Raises ValueError for syntax that Python accepts beyond JSON, and for a
    key that an object has twice, in words other than Python's; RecursionError for deep nesting."""
    try:
        return json.loads(text, object_pairs_hook=_checked_object, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        words = _SYNTAX.get(error.msg, error.msg.lower())
        place = f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"{words} at {place}") from None
    except ValueError as error:
        if "integer string conversion" in str(error):
            raise ValueError("a number has too many digits") from None
        raise


def _num_containers(raw: bytes) -> int:
    """Counts the objects and arrays of a body before any of them is built. Brackets inside strings
    are excluded only if the count is too high: that costs 50 ms for 16 MiB, and counting 2 ms."""
    count = raw.count(b"{") + raw.count(b"[")
    if count > MAX_CONTAINERS:
        bare = _STRING.sub(b"", raw)
        count = bare.count(b"{") + bare.count(b"[")
    return count


def _checked_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if len(pairs) > MAX_OBJECT_KEYS:
        raise ValueError(f"an object has {len(pairs)} keys; at most {MAX_OBJECT_KEYS} are allowed")
    value = dict(pairs)
    if len(value) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        key = counts.most_common(1)[0][0]
        raise ValueError(f"the key {shown(key)} appears twice in an object")
    return value


def _refuse_constant(name: str) -> Never:
    raise ValueError(f"{name} is not JSON")


def json_error(reason: str) -> ApiError:
    return ApiError(400, f"The body is not valid JSON: {reason}.", code="invalid_json")


def _to_api_error(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, FieldError):
        param = f"{field}.{cause.where}".strip(".") if cause.where else field
        return ApiError(400, cause.message, param=param or None, code="invalid_value")
    if first["type"] == "missing":
        return ApiError(
            400, f"{field}: is required.", param=field, code="missing_required_parameter"
        )
    message = f"{field}: {problem_of(first)}, got {shown(first['input'])}."
    return ApiError(400, message, param=field, code="invalid_value")


def _type_name(value: object) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")

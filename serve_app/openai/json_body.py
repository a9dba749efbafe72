"""The door for HTTP bodies: bytes -> strict JSON -> a checked model, or an ApiError with the field.

Strict JSON: UTF-8, no duplicate keys, no NaN or Infinity, no lone surrogates, bounded depth and
object size. FastAPI's own validation is never used, and a body is checked before anything of its
size is built from it. The models are in protocol_chat, protocol_completions, protocol_tokenize.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Never, TypeVar

from pydantic import BaseModel, ValidationError

from serve_app.errors import ApiError, shown

MAX_OBJECT_KEYS = 4096
# Objects and arrays of one body: 128 bytes or more each, once they are Python's.
MAX_CONTAINERS = 1 << 16

# A text can only hold a surrogate if its JSON spells one.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_SPELLS_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

Model = TypeVar("Model", bound=BaseModel)


class FieldError(ValueError):
    """Raised by validators: what is wrong with which field; `where` extends the field's name."""

    def __init__(self, message: str, where: str = "") -> None:
        super().__init__(message, where)
        self.message = message
        self.where = where

    def __str__(self) -> str:
        return self.message


def parse_body(model: type[Model], raw: bytes) -> Model:
    body = parse_json(raw)
    if not isinstance(body, dict):
        raise ApiError(
            400, f"The body must be a JSON object, not {_kind(body)}.", code="invalid_json"
        )
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise _to_api_error(error) from None


def parse_json(raw: bytes) -> object:
    if _num_containers(raw) > MAX_CONTAINERS:
        raise _json_error(f"more than {MAX_CONTAINERS} objects and arrays")
    try:
        value: object = json.loads(
            raw.decode("utf-8"), object_pairs_hook=_object, parse_constant=_constant
        )
        if _SPELLS_SURROGATE.search(raw):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeError:
        raise _json_error("not UTF-8, or a lone surrogate in a string") from None
    except RecursionError:
        raise _json_error("nested too deeply") from None
    except ValueError as error:
        raise _json_error(str(error)[:200]) from None
    return value


def _num_containers(raw: bytes) -> int:
    """Before anything is built of them. Braces inside strings are told apart only where it matters:
    that takes 50 ms for 16 MiB, and counting 2."""
    count = raw.count(b"{") + raw.count(b"[")
    if count > MAX_CONTAINERS:
        bare = _STRING.sub(b"", raw)
        count = bare.count(b"{") + bare.count(b"[")
    return count


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if len(pairs) > MAX_OBJECT_KEYS:
        raise ValueError(f"an object of {len(pairs)} keys, at most {MAX_OBJECT_KEYS} are allowed")
    value = dict(pairs)
    if len(value) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = counts.most_common(1)[0][0]
        raise ValueError(f"the key {shown(twice)} appears twice in an object")
    return value


def _constant(name: str) -> Never:
    raise ValueError(f"{name} is not JSON")


def _json_error(reason: str) -> ApiError:
    return ApiError(400, f"The body is not valid JSON: {reason}.", code="invalid_json")


def _to_api_error(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, FieldError):
        param = f"{field}.{cause.where}".strip(".") if cause.where else field
        return ApiError(400, cause.message, param=param or None, code="invalid_value")
    if first["type"] == "missing":
        return ApiError(400, f"{field}: required.", param=field, code="missing_required_parameter")
    message = f"{field}: {first['msg']}, got {shown(first['input'])}."
    return ApiError(400, message, param=field, code="invalid_value")


def _kind(value: object) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")

"""Checks of values in a dialect's body, whose errors name the dialect's own field."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NoReturn

from serve_app.errors import ApiError, shown
from serve_app.openai.chat import ChatRequest
from serve_app.openai.fields import unknown_fields
from serve_app.openai.json_body import FieldError, parse_json
from serve_app.openai.tools import check_depth, check_tools

Fields = dict[str, Any]

MAX_PARTS = 4096  # of one message

# Fields of chats that every dialect takes under the same names.
_SHARED = frozenset(
    (
        *("model", "stream", "temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
        *("presence_penalty", "frequency_penalty", "logit_bias", "stop_token_ids", "min_tokens"),
        *("ignore_eos", "skip_special_tokens", "cache_salt", "priority", "user", "request_id"),
        *("safety_identifier", "prompt_cache_key", "documents", "chat_template_kwargs"),
        *("structured_outputs", "include_reasoning", "speculation", "seed", "adapters"),
    )
)


def shared_fields(body: Mapping[str, object], own: Collection[str]) -> Fields:
    """Returns the fields that need no translation. `own`: fields that the dialect reads itself.
    Another field of chats is refused, unless it is null: to ignore it could change the answer."""
    fields: Fields = {}
    for name, value in body.items():
        if name in own:
            continue
        # The checks of chats refuse or log an unknown one.
        if name in _SHARED or name not in ChatRequest.model_fields:
            fields[name] = value
        elif value is not None:
            refuse(name, "is a field of /v1/chat/completions", value)
    return fields


def refuse(where: str, problem: str, value: object) -> NoReturn:
    raise FieldError(f"{where}: {problem}, got {shown(value)}.", where)


def text_of(value: object, where: str) -> str:
    if not isinstance(value, str):
        refuse(where, "must be a string", value)
    return value


def name_of(value: object, where: str) -> str:
    if not isinstance(value, str) or not value:
        refuse(where, "must be a non-empty string", value)
    return value


def options_of(value: object, where: str) -> Fields:
    """Returns an object; {} for null."""
    return {} if value is None else object_of(value, where)


def object_of(value: object, where: str) -> Fields:
    if not isinstance(value, dict):
        refuse(where, "must be an object", value)
    return value


def list_of(value: object, where: str, max_items: int = MAX_PARTS) -> list[Any]:
    """Returns a list; [] for null."""
    if value is None:
        return []
    if not isinstance(value, list) or len(value) > max_items:
        refuse(where, f"must be a list of at most {max_items} items", value)
    return value


def objects_of(
    value: object, where: str, max_items: int = MAX_PARTS
) -> Iterator[tuple[str, Fields]]:
    """Yields the place and the value of each object of a list; nothing for null."""
    for number, item in enumerate(list_of(value, where, max_items)):
        place = f"{where}.{number}"
        yield place, object_of(item, place)


def bool_of(value: object, where: str) -> bool | None:
    if value is not None and not isinstance(value, bool):
        refuse(where, "must be true or false", value)
    return value


def arguments_of(value: object, where: str) -> Fields:
    """Returns the arguments of a call in a history: an object, or its JSON as text."""
    if isinstance(value, str):
        try:
            value = parse_json(value.encode()) if value else {}
        except (ApiError, UnicodeError):
            refuse(where, "must be a JSON object as text", value)
    if not isinstance(value, dict):
        refuse(where, "must be a JSON object", value)
    check_depth(value, where, where)
    return value


def tool_of(function: Fields, where: str, schema: str = "parameters") -> Fields:
    """Returns a tool as a chat has it, after its checks: a later error would count only the tools
    that are kept. `schema`: the dialect's name of the parameters."""
    tool = {"type": "function", "function": function}
    try:
        check_tools([tool])
    except FieldError as error:
        path, _, problem = error.message.partition(": ")
        place = path.removeprefix("tools.0.function").replace(".parameters", f".{schema}", 1)
        raise FieldError(f"{where}{place}: {problem}", where + place) from None
    return tool


def left_out(kind: str, endpoint: str) -> None:
    """Logs a part of a request that is left out, once."""
    unknown_fields.log(f"{endpoint}: {kind[:64]}", "a part of a request is left out: %s")

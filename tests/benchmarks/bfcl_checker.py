"""The rules by which the Berkeley Function Calling Leaderboard judges one call, for Python.

A call is right if its function and its arguments are: all required ones and no unknown ones, each
of the described type and among the values that the benchmark lists, with "" in the list of an
optional one. Texts are compared without case, spaces and some punctuation. A value of another type
counts if the listed values have that type. The source of the rules: `ast_checker.py` of bfcl-eval
2026.3.23 (Apache-2.0), with which this module agreed on 26,320 changed calls of its questions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

Json = dict[str, Any]
Call = tuple[str, Json]  # name, arguments

_TYPES: Mapping[str, type] = {
    "string": str,
    "integer": int,
    "float": float,
    "boolean": bool,
    "array": list,
    "tuple": list,
    "dict": dict,
    "any": str,
}


def public_name(name: str) -> str:
    """Returns the name as OpenAI's API allows it: an underscore for a dot."""
    return name.replace(".", "_")


def find_fault(function: Json, calls: Sequence[Call], possible: Mapping[str, list[Any]]) -> str:
    """Returns what is wrong with the calls of one answer, or "" if nothing is. `function` is the
    benchmark's description, `possible` has the values that each parameter may have."""
    if len(calls) != 1:
        return "wrong_count"
    name, arguments = calls[0]
    properties = function["parameters"]["properties"]
    if name != public_name(function["name"]):
        return "wrong_name"
    if any(key not in arguments for key in function["parameters"]["required"]):
        return "missing_required"
    for key, value in arguments.items():
        if key not in properties or key not in possible:
            return "unexpected_parameter"
        fault = _value_fault(properties[key], value, possible[key])
        if fault:
            return fault
    if any(key not in arguments and "" not in values for key, values in possible.items()):
        return "missing_optional"
    return ""


def _value_fault(description: Json, value: Any, possible: list[Any]) -> str:
    kind = _TYPES[description["type"]]
    item = _TYPES[description["items"]["type"]] if kind is list else None
    if description["type"] == "float" and type(value) is int:
        value = float(value)
    if type(value) is kind:
        if item is not None and isinstance(value, list) and not _items_fit(value, item, possible):
            return "wrong_type"
        is_other = _listed_type(possible) not in (None, kind)
    elif type(value) is _listed_type(possible):
        is_other = True
    else:
        return "wrong_type"
    if is_other:
        return "" if value in possible else "wrong_value"
    return "" if _is_listed(value, item, possible) else "wrong_value"


def _listed_type(possible: Sequence[Any]) -> type | None:
    return next((type(one) for one in possible if one != ""), None)


def _items_fit(value: Sequence[Any], item: type, possible: Sequence[Any]) -> bool:
    """Returns True if one listed answer has items of these types."""
    return any(
        not isinstance(one, list)
        or all(type(each) is item or type(each) is _listed_type(one) for each in value)
        for one in possible
    )


def _is_listed(value: Any, item: type | None, possible: Sequence[Any]) -> bool:
    if isinstance(value, dict):
        return any(_same_object(value, one) for one in possible if one != "")
    if isinstance(value, list) and item is dict:
        return any(
            len(value) == len(one)
            and all(_same_object(each, known) for each, known in zip(value, one, strict=True))
            for one in possible
        )
    if isinstance(value, str):
        return _plain(value) in [_plain(one) for one in possible if isinstance(one, str)]
    if isinstance(value, list):
        return [_plain(each) for each in value] in [[_plain(e) for e in one] for one in possible]
    return value in possible


def _same_object(value: Json, possible: Mapping[str, list[Any]]) -> bool:
    return all(
        key in possible and _plain(each) in [_plain(one) for one in possible[key]]
        for key, each in value.items()
    ) and all(key in value or "" in listed for key, listed in possible.items())


def _plain(value: Any) -> Any:
    """Returns a text without what does not count; any other value as it is."""
    if not isinstance(value, str):
        return value
    return re.sub(r"[ ,./\-_*^]", "", value).lower().replace("'", '"')

"""Tool calls that the limit of tokens cuts: their names, and the beginnings of their arguments.

As in OpenAI's API the arguments of such a call are no whole JSON, and the choice ends with
"length". They never are the whole JSON of other arguments: a client that reads them must fail,
rather than call a tool without some of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import regex

from serve_app.text.response_template import Region

_NAME = r'\s*\{\s*"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*+")'
_CALL = regex.compile(
    _NAME + r'\s*,\s*"(?:arguments|parameters)"\s*:\s*(?P<arguments>.*)', regex.DOTALL
)
# The end of the text between the name and the arguments.
_BEFORE_ARGUMENTS = regex.compile(_NAME + r'\s*(?:,\s*(?:"\w*+(?:"\s*:?\s*)?)?)?')
_BETWEEN = regex.compile(r"[\s,]*+")
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class CutCall:
    """A call in the last region of an answer that is cut."""

    value: Any  # as `Region.value` returns it
    is_whole: bool = False
    arguments: str = ""  # of a call that is cut; empty: arguments of the value without their end


def cut_calls(region: Region, text: str, captures: Mapping[str, str]) -> list[CutCall]:
    """Returns the calls of a region that the end of the answer closes; the last may be cut. `text`
    begins after the delimiter that opened the region. Raises as `Region.value` if there is none."""
    function = region.transform.get("function") if isinstance(region.transform, dict) else None
    if function == "{content}":
        return [_object(text)]
    if isinstance(function, dict) and function.get("name") == "{name}":
        if region.transform_each:
            return _list(region, text, captures)
        if "name" in captures:
            return [_named(region, text, captures)]
    raise TypeError("not a call")


def _object(text: str) -> CutCall:
    try:
        return CutCall({"function": _DECODER.raw_decode(text.lstrip())[0]}, is_whole=True)
    except ValueError:
        found = _CALL.match(text)
    if found is not None:
        return _call(json.loads(found["name"]), found["arguments"])
    found = _BEFORE_ARGUMENTS.fullmatch(text)
    if found is None:
        raise ValueError("no name")
    return _call(json.loads(found["name"]), "")


def _call(name: str, arguments: str) -> CutCall:
    """`arguments` may be whole, and more text may follow them."""
    function: dict[str, Any] = {"name": name}
    if not arguments:
        return CutCall({"function": function})
    if not arguments.startswith("{"):
        raise ValueError("not an object")
    try:
        function["arguments"], _ = _DECODER.raw_decode(arguments)
    except ValueError:
        return CutCall({"function": function}, arguments=arguments)
    return CutCall({"function": function}, is_whole=True)


def _named(region: Region, text: str, captures: Mapping[str, str]) -> CutCall:
    """Returns the call of a delimiter that has the name."""
    args = region.content_args
    if region.content == "json" and not (args.get("unquoted_keys") or args.get("string_delims")):
        return _call(captures["name"], text.lstrip())
    if region.content == "xml-inline":
        return CutCall(region.value(text, captures))
    return CutCall({"function": {"name": captures["name"]}})


def _list(region: Region, text: str, captures: Mapping[str, str]) -> list[CutCall]:
    """Returns the calls of a list of objects."""
    start = len(text) - len(text.lstrip())
    if not text.startswith("[", start):
        raise ValueError("not a list")
    items: list[Any] = []
    position = start + 1
    while True:
        between = _BETWEEN.match(text, position)
        position = position if between is None else between.end()
        try:
            item, position = _DECODER.raw_decode(text, position)
        except ValueError:
            break
        items.append(item)
    values = region.value(json.dumps(items), captures) if items else []
    found = [CutCall(value, is_whole=True) for value in values]
    rest = text[position:]
    return [*found, _object(rest)] if _CALL.match(rest) or not found else found

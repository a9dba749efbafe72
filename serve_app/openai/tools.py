"""Tools of a chat: the checks of `tools` and `tool_choice`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from serve_app.errors import shown
from serve_app.openai.json_body import FieldError, is_deeper, refuse

MAX_TOOLS = 256
MAX_DEPTH = 32
MAX_DESCRIPTION_CHARS = 16 * 1024

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}

Tool = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolChoice:
    mode: Literal["none", "auto", "required"]
    names: tuple[str, ...] = ()  # the tools that may be called; () for all
    is_named: bool = False  # exactly one tool, exactly one call


AUTO = ToolChoice("auto")


def check_depth(value: Any, name: str, where: str = "") -> None:
    """Refuses JSON that is nested more than MAX_DEPTH levels: templates and grammars recurse."""
    if is_deeper(value, MAX_DEPTH):
        raise FieldError(f"{name}: is nested more than {MAX_DEPTH} levels deep.", where)


def check_tools(value: object) -> tuple[Tool, ...]:
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        got = len(value) if isinstance(value, list) else value
        refuse("tools", f"must be a list of at most {MAX_TOOLS} tools", got)
    tools = tuple(_check_tool(tool, index) for index, tool in enumerate(value))
    names = [tool["function"]["name"] for tool in tools]
    for name in names:
        if names.count(name) > 1:
            raise FieldError(f"tools: the name {shown(name)} appears twice.")
    return tools


def _check_tool(tool: object, index: int) -> Tool:
    def refuse_at(where: str, problem: str, got: object) -> NoReturn:
        refuse(f"tools.{index}{where}", problem, got, f"{index}{where}")

    if not isinstance(tool, dict) or tool.get("type") != "function":
        kind = tool.get("type") if isinstance(tool, dict) else tool
        refuse_at(".type", 'must be "function"', kind)
    function = tool.get("function")
    if not isinstance(function, dict):
        refuse_at(".function", "must be an object", function)
    name, description = function.get("name"), function.get("description")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        refuse_at(".function.name", "must match [a-zA-Z0-9_-]{1,64}", name)
    if not isinstance(description, str | None) or len(description or "") > MAX_DESCRIPTION_CHARS:
        limit = f"must be a string of at most {MAX_DESCRIPTION_CHARS} characters"
        refuse_at(".function.description", limit, description)
    parameters, strict = function.get("parameters"), function.get("strict")
    if not isinstance(parameters, dict | None):
        refuse_at(".function.parameters", "must be a JSON schema", parameters)
    if parameters and parameters.get("type", "object") != "object":
        refuse_at(".function.parameters.type", 'must be "object"', parameters["type"])
    if not isinstance(strict, bool | None):
        refuse_at(".function.strict", "must be true or false", strict)
    if strict and parameters and parameters.get("additionalProperties") is not False:
        got = parameters.get("additionalProperties")
        refuse_at(".function.parameters.additionalProperties", "must be false in strict mode", got)
    for key, kind in (("properties", dict), ("required", list), ("$defs", dict)):
        if parameters and not isinstance(parameters.get(key, kind()), kind):
            words = "must be an object" if kind is dict else "must be a list"
            refuse_at(f".function.parameters.{key}", words, parameters[key])
    check_depth(parameters, f"tools.{index}.function.parameters")
    # Templates write the tool as JSON: without nulls, and in the order of OpenAI's documents.
    known = {
        key: function[key]
        for key in ("name", "description", "parameters", "strict")
        if function.get(key) is not None
    }
    return {"type": "function", "function": known}


def check_tool_choice(value: object) -> ToolChoice:
    if value == "auto":
        return AUTO
    if value == "none" or value == "required":
        return ToolChoice(value)
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(value, dict) and kind == "function":
        return ToolChoice("required", (_named(value),), True)
    if isinstance(value, dict) and kind == "allowed_tools":
        return _allowed(value.get("allowed_tools", value))
    kinds = (
        '"none", "auto", "required", {"type": "function", ...} or {"type": "allowed_tools", ...}'
    )
    refuse("tool_choice", f"must be {kinds}", value)


def _named(value: Mapping[str, Any]) -> str:
    function = value.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        refuse("tool_choice.function.name", "must be a string", name)
    return name


def _allowed(value: object) -> ToolChoice:
    mode = value.get("mode") if isinstance(value, dict) else None
    tools = value.get("tools") if isinstance(value, dict) else None
    if mode not in ("auto", "required"):
        refuse("tool_choice.allowed_tools.mode", 'must be "auto" or "required"', mode)
    if not isinstance(tools, list) or not tools or not all(isinstance(t, dict) for t in tools):
        refuse("tool_choice.allowed_tools.tools", "must be a non-empty list of tools", tools)
    # Without repetitions: each name costs a few bytes here and a whole tool in the prompt.
    return ToolChoice(mode, tuple(dict.fromkeys(map(_named, tools))))


def resolve_choice(choice: ToolChoice, tools: Sequence[Tool]) -> tuple[Tool, ...]:
    """Returns the tools that the model may call. Raises FieldError if the choice has none."""
    if choice.mode == "none":
        return ()
    known = {tool["function"]["name"]: tool for tool in tools}
    for name in choice.names:
        if name not in known:
            raise FieldError(f"tool_choice: the tool {shown(name)} is not in tools.", "tool_choice")
    if choice.mode == "required" and not tools:
        raise FieldError("tool_choice: is allowed only if tools are given.", "tool_choice")
    return tuple(known[name] for name in choice.names) if choice.names else tuple(tools)


def schemas(tools: Sequence[Tool]) -> dict[str, dict[str, Any]]:
    """Returns the schema of the parameters of each tool, by its name."""
    return {
        tool["function"]["name"]: {
            "type": "object",
            **(tool["function"].get("parameters") or _NO_PARAMETERS),
        }
        for tool in tools
    }

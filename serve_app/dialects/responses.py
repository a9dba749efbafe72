"""The body of POST /v1/responses as a chat.

Stateless: no item is stored, so a body that refers to stored items is refused, and each answer
has `store: false`. Reasoning items of the history become the reasoning of the assistant.
"""

from __future__ import annotations

from collections.abc import Mapping
from re import compile as pattern
from typing import Any, ClassVar

from pydantic import Field

from serve_app.dialects.fields import (
    Fields,
    arguments_of,
    bool_of,
    left_out,
    list_of,
    name_of,
    object_of,
    objects_of,
    options_of,
    refuse,
    shared_fields,
    text_of,
    tool_of,
)
from serve_app.dialects.responses_writer import ResponsesWriter
from serve_app.openai.dialect import DialectRequest, Renames
from serve_app.openai.json_body import FieldError
from serve_app.openai.responses import ResponseHead

PATH = "/v1/responses"

MAX_ITEMS = 16 * 1024
MAX_TOOLS = 1024
_MAX_METADATA = 16
_MAX_METADATA_CHARS = 512

_ROLES = ("user", "system", "developer", "assistant")
_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
# The fields that would need a store, with the remedy.
_STATEFUL: Mapping[str, str] = {
    "previous_response_id": "answers are not stored: send the earlier items in input",
    "conversation": "conversations are not stored: send their items in input",
    "prompt": "prompts are not stored: send instructions and input",
}
# Tools that the provider runs and that clients add to every request: the answer is as well formed
# without them. Others name data or a machine that the client expects to be used.
_LEFT_OUT_TOOLS = (
    *("web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11"),
    *("image_generation", "tool_search"),
)
_OWN = frozenset(
    (
        *("input", "instructions", "max_output_tokens", "text", "reasoning", "tools", "include"),
        *("tool_choice", "parallel_tool_calls", "top_logprobs", "metadata", "stream_options"),
        *("store", "background", "truncation", "service_tier", "max_tool_calls"),
        *("prompt_cache_retention", "prompt_cache_options", "context_management", "moderation"),
        *("client_metadata", "access_programs", "image"),
        *_STATEFUL,
    )
)


class ResponsesRequest(DialectRequest):
    id_prefix: ClassVar[str] = "resp_"
    renames: ClassVar[Renames] = (
        (pattern(r"^messages\b"), "input"),
        (pattern(r"^tool_choice\.(function|allowed_tools)\b"), "tool_choice"),
        (pattern(r"^response_format\.json_schema\b"), "text.format"),
        (pattern(r"^response_format\b"), "text.format"),
        (pattern(r"^(max_completion_tokens|max_tokens)\b"), "max_output_tokens"),
        (pattern(r"^reasoning_effort\b"), "reasoning.effort"),
        (pattern(r"^logprobs\b"), "top_logprobs"),
    )

    # The parts of the body that the answer repeats as they were sent.
    repeated: dict[str, object] = Field(default_factory=dict)
    namespaces: dict[str, str] = Field(default_factory=dict)  # of tools, by their names

    @classmethod
    def read(cls, body: dict[str, object]) -> Fields:
        _refuse_state(body)
        fields = shared_fields(body, _OWN)
        fields["messages"] = _messages(body.get("input"), body.get("instructions"))
        fields["max_completion_tokens"] = body.get("max_output_tokens")
        fields["parallel_tool_calls"] = body.get("parallel_tool_calls")
        text = options_of(body.get("text"), "text")
        fields["response_format"] = _response_format(text.get("format"))
        if text.get("verbosity") is not None:
            fields["verbosity"] = text["verbosity"]
        reasoning = options_of(body.get("reasoning"), "reasoning")
        fields["reasoning_effort"] = reasoning.get("effort")
        _set_logprobs(fields, body)
        fields["namespaces"] = {}
        fields["tools"] = _tools(body.get("tools"), "tools", fields["namespaces"])
        fields["tool_choice"] = _tool_choice(body.get("tool_choice"))
        fields["repeated"] = {
            "metadata": _metadata(body.get("metadata")),
            "text": {"format": text.get("format") or {"type": "text"}},
            "reasoning": {"effort": reasoning.get("effort"), "summary": None},
            "tool_choice": body.get("tool_choice") or "auto",
        }
        return fields

    def new_writer(self, head: ResponseHead) -> ResponsesWriter:
        tools = [
            {"type": "function", "strict": False, "parameters": None, **tool["function"]}
            for tool in self.tools
        ]
        return ResponsesWriter(
            head,
            self.namespaces,
            {
                **self.repeated,
                "max_output_tokens": self.max_completion_tokens,
                "parallel_tool_calls": self.parallel_tool_calls is not False,
                "prompt_cache_key": self.prompt_cache_key,
                "safety_identifier": self.safety_identifier,
                "temperature": self.temperature,
                "tools": tools,
                "top_logprobs": self.top_logprobs or 0,
                "top_p": self.top_p,
                "user": self.user,
            },
        )


def _refuse_state(body: Mapping[str, object]) -> None:
    for name, remedy in _STATEFUL.items():
        if body.get(name) is not None:
            refuse(name, f"is not supported, {remedy}", body[name])
    if bool_of(body.get("background"), "background"):
        refuse("background", "is not supported, answers are not stored", True)
    bool_of(body.get("store"), "store")
    if body.get("truncation") not in (None, "auto", "disabled"):
        refuse("truncation", 'must be "auto" or "disabled"', body["truncation"])
    options = options_of(body.get("stream_options"), "stream_options")
    bool_of(options.get("include_obfuscation"), "stream_options.include_obfuscation")


def _metadata(value: object) -> Fields:
    metadata = options_of(value, "metadata")
    if len(metadata) > _MAX_METADATA:
        refuse("metadata", f"must have at most {_MAX_METADATA} entries", value)
    for key, item in metadata.items():
        if len(key) > 64 or not isinstance(item, str) or len(item) > _MAX_METADATA_CHARS:
            limit = f"must map names to strings of at most {_MAX_METADATA_CHARS} characters"
            refuse("metadata", limit, item)
    return metadata


def _set_logprobs(fields: Fields, body: Mapping[str, object]) -> None:
    include = list_of(body.get("include"), "include", 64)
    for number, name in enumerate(include):
        text_of(name, f"include.{number}")
    top = body.get("top_logprobs")
    if top is not None and type(top) is not int:
        refuse("top_logprobs", "must be an integer", top)
    if top or "message.output_text.logprobs" in include:
        fields |= {"logprobs": True, "top_logprobs": top}


def _response_format(value: object) -> Fields | None:
    form = options_of(value, "text.format")
    kind = form.get("type")
    if not form or kind == "text":
        return None
    if kind == "json_object":
        return {"type": "json_object"}
    if kind != "json_schema":
        refuse("text.format.type", "must be one of text, json_object, json_schema", kind)
    given = {name: form.get(name) for name in ("name", "schema", "strict")}
    return {"type": "json_schema", "json_schema": given}


def _tools(value: object, place: str, namespaces: dict[str, str], inside: str = "") -> list[Fields]:
    """Returns the tools as a chat has them. Adds the tools of a namespace to `namespaces`; `inside`
    is the namespace that `value` is in."""
    tools: list[Fields] = []
    for where, tool in objects_of(value, place, MAX_TOOLS):
        kind = tool.get("type")
        if kind in _LEFT_OUT_TOOLS:
            left_out(f"the tool {kind}", PATH)
            continue
        if kind == "namespace" and not inside:
            name = name_of(tool.get("name"), f"{where}.name")
            tools += _tools(tool.get("tools"), f"{where}.tools", namespaces, name)
            continue
        if kind != "function":
            refuse(f"{where}.type", 'must be "function": this server runs no tools', kind)
        if isinstance(tool.get("function"), dict):  # as in a chat, which OpenAI's client allows
            tool = {**tool["function"], **tool}
        name = name_of(tool.get("name"), f"{where}.name")
        if inside:
            namespaces[name] = inside
        function = {key: tool.get(key) for key in ("name", "description", "parameters", "strict")}
        tools.append(tool_of(function, where))
    return tools


def _tool_choice(value: object) -> object:
    if not isinstance(value, dict):
        return value
    kind = value.get("type")
    if kind == "function":
        return {"type": "function", "function": {"name": value.get("name")}}
    if kind != "allowed_tools":
        refuse("tool_choice.type", 'must be "function" or "allowed_tools"', kind)
    tools = [
        {"type": "function", "function": {"name": object_of(tool, "tool_choice.tools").get("name")}}
        for tool in list_of(value.get("tools"), "tool_choice.tools", MAX_TOOLS)
    ]
    return {"type": kind, "allowed_tools": {"mode": value.get("mode"), "tools": tools}}


def _messages(value: object, instructions: object) -> list[Fields]:
    """Returns the messages of a chat. The system's messages at the beginning are joined: many chat
    templates allow one."""
    system = [] if instructions is None else [text_of(instructions, "instructions")]
    if isinstance(value, str):
        messages: list[Fields] = [{"role": "user", "content": value}]
    elif isinstance(value, list) and 1 <= len(value) <= MAX_ITEMS:
        messages = _Items().read(value)
    else:
        refuse("input", f"must be a string or a list of 1 to {MAX_ITEMS} items", value)
    while messages and messages[0]["role"] in ("system", "developer"):
        system.append(messages.pop(0)["content"])
    if system:
        messages.insert(0, {"role": "system", "content": "\n\n".join(system)})
    return messages


class _Items:
    """Reads items: the reasoning, text and calls of one turn become one message."""

    def __init__(self) -> None:
        self._messages: list[Fields] = []
        self._turn: Fields | None = None  # the assistant's newest message, while it may grow

    def read(self, items: list[Any]) -> list[Fields]:
        for where, item in objects_of(items, "input", MAX_ITEMS):
            self._read(item, where)
        return self._messages

    def _read(self, item: Fields, where: str) -> None:
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind == "message":
            self._read_message(item, where)
        elif kind == "function_call":
            self._read_call(item, where)
        elif kind == "function_call_output":
            call_id = name_of(item.get("call_id"), f"{where}.call_id")
            content = _joined(item.get("output"), f"{where}.output")
            self._add({"role": "tool", "tool_call_id": call_id, "content": content})
        elif kind == "reasoning":
            parts = item.get("content") or item.get("summary")
            reasoning = _joined(parts or [], f"{where}.content")
            if reasoning:
                self._assistant(is_new=bool(self._turn))["reasoning_content"] = reasoning
        elif kind == "item_reference" or (kind is None and "id" in item):
            refuse(f"{where}.type", "items are not stored: send the item itself", kind)
        else:
            kinds = "message, function_call, function_call_output, reasoning"
            refuse(f"{where}.type", f"must be one of {kinds}", kind)

    def _read_message(self, item: Fields, where: str) -> None:
        role = item.get("role")
        if role not in _ROLES:
            refuse(f"{where}.role", f"must be one of {', '.join(_ROLES)}", role)
        content = _joined(item.get("content"), f"{where}.content")
        if role == "assistant":
            has_content = bool(
                self._turn and ("content" in self._turn or "tool_calls" in self._turn)
            )
            self._assistant(is_new=has_content)["content"] = content
        else:
            self._add({"role": role, "content": content})

    def _read_call(self, item: Fields, where: str) -> None:
        call = {
            "id": name_of(item.get("call_id"), f"{where}.call_id"),
            "type": "function",
            "function": {
                "name": name_of(item.get("name"), f"{where}.name"),
                "arguments": arguments_of(item.get("arguments"), f"{where}.arguments"),
            },
        }
        self._assistant(is_new=False).setdefault("tool_calls", []).append(call)

    def _assistant(self, *, is_new: bool) -> Fields:
        if self._turn is None or is_new:
            turn: Fields = {"role": "assistant"}
            self._add(turn)
            self._turn = turn
        return self._turn

    def _add(self, message: Fields) -> None:
        self._turn = None
        self._messages.append(message)


def _joined(value: object, where: str) -> str:
    """Returns the text of a string or of a list of text parts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        refuse(where, "must be a string or a list of text parts", value)
    texts = []
    for place, part in objects_of(value, where):
        kind = part.get("type")
        if kind == "refusal":
            texts.append(text_of(part.get("refusal"), f"{place}.refusal"))
        elif kind in _TEXT_PARTS:
            texts.append(text_of(part.get("text"), f"{place}.text"))
        else:
            raise FieldError(
                f"{place}.type: only text is supported, as input_text or output_text.",
                f"{place}.type",
            )
    return "\n".join(texts)

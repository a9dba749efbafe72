"""The body of POST /v1/chat/completions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NoReturn

from pydantic import BaseModel, Field, PlainValidator, model_validator

from serve_app.errors import ApiError, shown
from serve_app.openai.fields import MAX_LOGPROBS, MAX_TOKENS, GenerationFields
from serve_app.openai.json_body import FieldError, nullable, parse_json, refuse
from serve_app.openai.tools import (
    AUTO,
    ToolChoice,
    check_depth,
    check_tool_choice,
    check_tools,
    resolve_choice,
)
from serve_app.text.template import ChatMessage, JsonObject, TemplateValue

MAX_MESSAGES = 4096
MAX_PARTS = 256
MAX_TEMPLATE_VARIABLES = 16
MAX_CALLS = 256  # in one message
MAX_DOCUMENTS = 1024

_ROLES = ("system", "developer", "user", "assistant", "tool")
_UNSUPPORTED_IN_MESSAGE = ("function_call", "audio")
# Phi-4-mini's template reads `tools`, JSON as text, of the system message.
_OPTIONAL_IN_MESSAGE = ("name", "tool_call_id", "reasoning_content", "reasoning", "tools")
# Variables that the renderer sets; a client must not.
_RESERVED_VARIABLES = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "chat_template", "self", "loop")
)
_VARIABLE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")


def check_messages(value: object) -> tuple[ChatMessage, ...]:
    """Returns plain dictionaries for the template: text parts joined, empty fields left out."""
    if not isinstance(value, list) or not value:
        refuse("messages", "must be a non-empty list", value)
    if len(value) > MAX_MESSAGES:
        refuse("messages", f"at most {MAX_MESSAGES} are allowed", len(value))
    return tuple(_check_message(message, index) for index, message in enumerate(value))


def _check_message(value: object, index: int) -> ChatMessage:
    if not isinstance(value, dict):
        _refuse(str(index), "must be an object", value)
    role = value.get("role")
    if role not in _ROLES:
        _refuse(f"{index}.role", f"must be one of {', '.join(_ROLES)}", role)
    for name in _UNSUPPORTED_IN_MESSAGE:
        if value.get(name):
            _refuse(f"{index}.{name}", "is not supported", value[name])
    message: ChatMessage = {
        "role": role,
        "content": _check_content(value.get("content"), role, index),
    }
    for name in _OPTIONAL_IN_MESSAGE:
        extra = value.get(name)
        if isinstance(extra, str):
            message[name] = extra
        elif extra is not None:
            _refuse(f"{index}.{name}", "must be a string", extra)
    # Chat templates read `reasoning_content`; vLLM's responses have `reasoning` as well.
    reasoning = message.pop("reasoning", None)
    if reasoning is not None:
        message.setdefault("reasoning_content", reasoning)
    calls = value.get("tool_calls")
    if calls:
        if role != "assistant":
            _refuse(f"{index}.tool_calls", "is allowed in messages of the assistant only", calls)
        message["tool_calls"] = _check_calls(calls, f"{index}.tool_calls")
    return message


def _check_calls(calls: object, where: str) -> list[JsonObject]:
    """Returns the calls with their arguments as objects, which chat templates expect."""
    if not isinstance(calls, list) or len(calls) > MAX_CALLS:
        _refuse(where, f"must be a list of at most {MAX_CALLS} calls", calls)
    return [_check_call(call, f"{where}.{number}") for number, call in enumerate(calls)]


def _check_call(call: object, where: str) -> JsonObject:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        _refuse(where, 'must be {"id": ..., "type": "function", "function": {...}}', call)
    call_id, name = call.get("id"), function.get("name")
    if call.get("type", "function") != "function":
        _refuse(f"{where}.type", 'must be "function"', call["type"])
    if not isinstance(name, str) or not name:
        _refuse(f"{where}.function.name", "must be a non-empty string", name)
    if not isinstance(call_id, str | None):
        _refuse(f"{where}.id", "must be a string", call_id)
    arguments = _check_arguments(function.get("arguments"), f"{where}.function.arguments")
    checked: JsonObject = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return checked if call_id is None else {"id": call_id, **checked}


def _check_arguments(arguments: object, where: str) -> JsonObject:
    value: Any = {} if arguments is None or arguments == "" else arguments
    if isinstance(value, str):
        try:
            value = parse_json(value.encode())
        except (ApiError, UnicodeError):
            _refuse(where, "must be a JSON object as text", arguments)
    if not isinstance(value, dict):
        _refuse(where, "must be a JSON object as text", arguments)
    check_depth(value, f"messages.{where}")
    return value


def _check_documents(value: object) -> tuple[JsonObject, ...]:
    documents = value if isinstance(value, list) and len(value) <= MAX_DOCUMENTS else [None]
    if not all(isinstance(document, dict) for document in documents):
        refuse("documents", f"must be a list of at most {MAX_DOCUMENTS} objects", value)
    check_depth(documents, "documents")
    return tuple(documents)


def _check_content(content: object, role: str, index: int) -> str:
    where = f"{index}.content"
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":  # a client may send an earlier response back
        return ""
    if not isinstance(content, list):
        _refuse(where, "must be a string or a list of text parts", content)
    if not 1 <= len(content) <= MAX_PARTS:
        _refuse(where, f"must have 1 to {MAX_PARTS} parts", content)
    texts = []
    for number, part in enumerate(content):
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else part
            _refuse(f"{where}.{number}", 'must be {"type": "text", "text": "..."}', kind)
        texts.append(text)
    return "\n".join(texts)  # as in vLLM: chat templates of text models expect one string


def _refuse(where: str, problem: str, value: object) -> NoReturn:
    refuse(f"messages.{where}", problem, value, where)


def _check_template_variables(value: object) -> Mapping[str, TemplateValue]:
    field = "chat_template_kwargs"
    if not isinstance(value, dict):
        refuse(field, "must be an object", value)
    if len(value) > MAX_TEMPLATE_VARIABLES:
        refuse(field, f"at most {MAX_TEMPLATE_VARIABLES} entries are allowed", len(value))
    for name, item in value.items():
        is_reserved = name in _RESERVED_VARIABLES or name.endswith("_token")
        if is_reserved or not _VARIABLE_NAME.fullmatch(name):
            raise FieldError(f"{field}: {shown(name)} cannot be set.")
        if not isinstance(item, str | int | float | bool):
            refuse(field, "values must be strings, numbers or booleans", item)
    return dict(value)


class ChatTemplateFields(BaseModel):
    """The fields that /v1/chat/completions and /tokenize pass to the chat template."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Annotated[
        Mapping[str, TemplateValue], nullable(_check_template_variables, dict[str, object], {})
    ] = {}
    tools: Annotated[tuple[JsonObject, ...], nullable(check_tools, list[dict[str, object]])] = ()
    documents: Annotated[
        tuple[JsonObject, ...], nullable(_check_documents, list[dict[str, object]])
    ] = ()

    @property
    def template_tools(self) -> tuple[JsonObject, ...]:
        """The tools that the chat template shows to the model."""
        return self.tools

    @property
    def template_variables(self) -> Mapping[str, TemplateValue]:
        return self.chat_template_kwargs

    @model_validator(mode="after")
    def _check_continuation(self) -> ChatTemplateFields:
        if self.continue_final_message and self.add_generation_prompt is not False:
            raise FieldError(
                "continue_final_message: is allowed only if add_generation_prompt is false.",
                "continue_final_message",
            )
        return self


class ChatRequest(GenerationFields, ChatTemplateFields):
    refused: ClassVar[frozenset[str]] = frozenset(("echo", "prompt"))
    id_prefix: ClassVar[str] = "chatcmpl-"

    messages: Annotated[
        tuple[ChatMessage, ...],
        PlainValidator(check_messages, json_schema_input_type=list[dict[str, object]]),
    ]
    max_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tool_choice: Annotated[
        ToolChoice, nullable(check_tool_choice, str | dict[str, object], AUTO)
    ] = AUTO
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    include_reasoning: bool | None = None

    @model_validator(mode="after")
    def _check_chat_combinations(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise FieldError("top_logprobs: is allowed only if logprobs is true.", "top_logprobs")
        resolve_choice(self.tool_choice, self.tools)
        return self

    @property
    def template_tools(self) -> tuple[JsonObject, ...]:
        return resolve_choice(self.tool_choice, self.tools)

    @property
    def shows_tools(self) -> bool:
        """Returns True if the model sees tools: the request's, or those of a message."""
        return bool(self.template_tools) or any(one.get("tools") for one in self.messages)

    @property
    def template_variables(self) -> Mapping[str, TemplateValue]:
        """The variables of the client, with `reasoning_effort` as vLLM hands it to templates."""
        effort = self.reasoning_effort
        if effort is None:
            return self.chat_template_kwargs
        thinks = effort != "none"
        return {"reasoning_effort": effort, "enable_thinking": thinks, **self.chat_template_kwargs}

    @property
    def requested_tokens(self) -> int | None:
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens

    @property
    def output_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

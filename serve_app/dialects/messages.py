"""The bodies of POST /v1/messages and /v1/messages/count_tokens, Anthropic's API, as a chat.

Agents send their whole history back, with blocks and tools of other servers among them: a block of
the assistant that only its maker can read is left out, never refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from re import compile as pattern
from typing import ClassVar

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
from serve_app.dialects.messages_writer import MessagesWriter
from serve_app.openai.chat import MAX_MESSAGES
from serve_app.openai.dialect import DialectRequest, Renames
from serve_app.openai.fields import MAX_SESSION_CHARS, MAX_TOKENS
from serve_app.openai.responses import ResponseHead

PATH = "/v1/messages"
COUNT_PATH = "/v1/messages/count_tokens"

MAX_TOOLS = 1024
# Claude Code begins its system prompt with this line, another one in each request: it would end
# every shared prefix of the cache.
_BILLING_HEADER = "x-anthropic-billing-header:"
# Tools that Anthropic's servers run; the answer is as well formed without them.
_LEFT_OUT_TOOLS = ("web_search_", "web_fetch_", "code_execution_", "tool_search_tool_", "advisor_")
_EFFORTS = ("low", "medium", "high", "xhigh", "max")
_OWN = frozenset(
    (
        *("system", "messages", "max_tokens", "stop_sequences", "tools", "tool_choice"),
        *("thinking", "metadata", "output_config", "output_format", "chat_template_kwargs"),
        *("service_tier", "container", "context_management", "inference_geo", "cache_control"),
        *("speed", "diagnostics", "mcp_servers", "betas", "user_profile_id", "workspace_id"),
    )
)


class MessagesRequest(DialectRequest):
    # A required number that clients set without counting the prompt: cut to the tokens left.
    cuts_max_tokens: ClassVar[bool] = True
    id_prefix: ClassVar[str] = "msg_"
    renames: ClassVar[Renames] = (
        (pattern(r"^tool_choice\.function\b"), "tool_choice"),
        (pattern(r"^response_format\.json_schema\b"), "output_config.format"),
        (pattern(r"^response_format\b"), "output_config.format"),
        (pattern(r"^guided_json\b"), "output_format.schema"),
        (pattern(r"^stop(?=[:.]|$)"), "stop_sequences"),
        (pattern(r"^user\b"), "metadata.user_id"),
    )

    max_tokens: int = Field(ge=1, le=MAX_TOKENS)
    # The body marks a block with `cache_control`; otherwise all tokens count as input.
    shows_cache: bool = False

    @classmethod
    def read(cls, body: dict[str, object]) -> Fields:
        fields = shared_fields(body, _OWN)
        messages = _messages(body.get("messages"))
        if system := _system(body.get("system")):
            messages.insert(0, {"role": "system", "content": system})
        fields["messages"] = messages
        if messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls"):
            fields |= {"continue_final_message": True, "add_generation_prompt": False}
        if "max_tokens" in body:
            fields["max_tokens"] = body["max_tokens"]
        fields["stop"] = body.get("stop_sequences")
        metadata = options_of(body.get("metadata"), "metadata")
        if metadata.get("user_id") is not None:
            fields["user"] = _user(text_of(metadata["user_id"], "metadata.user_id"))
        if list_of(body.get("mcp_servers"), "mcp_servers"):
            refuse("mcp_servers", "is not supported", body["mcp_servers"])
        fields["tools"] = _tools(body.get("tools"))
        if (choice := body.get("tool_choice")) is not None:
            _set_choice(fields, options_of(choice, "tool_choice"))
        _set_output(fields, body)
        fields["shows_cache"] = _has_cache_control(body)
        return fields

    def new_writer(self, head: ResponseHead) -> MessagesWriter:
        return MessagesWriter(head, self.max_tokens, shows_cache=self.shows_cache)


class CountTokensRequest(MessagesRequest):
    max_tokens: int = Field(1, ge=1, le=MAX_TOKENS)


def _has_cache_control(body: Fields) -> bool:
    """Looks at the places where a body that was read may have the mark."""
    lists = [[body], body.get("system"), body.get("tools")]
    lists += [message["content"] for message in body["messages"]]
    blocks = (block for one in lists if isinstance(one, list) for block in one)
    return any(block.get("cache_control") is not None for block in blocks)


def _user(user_id: str) -> str:
    """Returns the name of a user, short enough for the field of chats."""
    if len(user_id) <= MAX_SESSION_CHARS:
        return user_id
    return hashlib.sha256(user_id.encode()).hexdigest()


def _system(value: object) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        refuse("system", "must be a string or a list of text blocks", value)
    texts = [_text(block, place) for place, block in objects_of(value, "system")]
    return "\n".join(text for text in texts if not text.startswith(_BILLING_HEADER))


def _text(block: Fields, where: str) -> str:
    if block.get("type") != "text":
        refuse(f"{where}.type", 'must be "text": this server reads text only', block.get("type"))
    return text_of(block.get("text"), f"{where}.text")


def _messages(value: object) -> list[Fields]:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_MESSAGES:
        refuse("messages", f"must be a list of 1 to {MAX_MESSAGES} messages", value)
    messages: list[Fields] = []
    for where, message in objects_of(value, "messages", MAX_MESSAGES):
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            refuse(f"{where}.role", 'must be "user", "assistant" or "system"', role)
        if isinstance(content, str):
            messages.append({"role": role, "content": content})
            continue
        if not isinstance(content, list):
            refuse(f"{where}.content", "must be a string or a list of blocks", content)
        read = _assistant if role == "assistant" else _others
        messages += read(role, objects_of(content, f"{where}.content"))
    return messages


def _assistant(role: str, blocks: Iterable[tuple[str, Fields]]) -> list[Fields]:
    texts, reasoning, calls = [], [], []
    for place, block in blocks:
        kind = block.get("type")
        if kind == "text":
            texts.append(_text(block, place))
        elif kind == "thinking":
            reasoning.append(text_of(block.get("thinking"), f"{place}.thinking"))
        elif kind == "tool_use":
            name = name_of(block.get("name"), f"{place}.name")
            arguments = arguments_of(block.get("input"), f"{place}.input")
            call_id = name_of(block.get("id"), f"{place}.id")
            function = {"name": name, "arguments": arguments}
            calls.append({"id": call_id, "type": "function", "function": function})
        else:
            left_out(f"the block {text_of(kind, f'{place}.type')}", PATH)
    message: Fields = {"role": role, "content": "\n".join(texts)}
    if reasoning:
        message["reasoning_content"] = "\n".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return [message]


def _others(role: str, blocks: Iterable[tuple[str, Fields]]) -> list[Fields]:
    """Returns the results of tools as messages of their own, in their order among the texts."""
    messages: list[Fields] = []
    texts: list[str] = []
    for place, block in blocks:
        if block.get("type") != "tool_result":
            texts.append(_text(block, place))
            continue
        if texts:
            messages.append({"role": role, "content": "\n".join(texts)})
            texts = []
        call_id = name_of(block.get("tool_use_id"), f"{place}.tool_use_id")
        bool_of(block.get("is_error"), f"{place}.is_error")
        content = _result(block.get("content"), f"{place}.content")
        messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
    if texts or not messages:
        messages.append({"role": role, "content": "\n".join(texts)})
    return messages


def _result(content: object, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        refuse(where, "must be a string or a list of text blocks", content)
    texts = []
    for place, block in objects_of(content, where):
        if block.get("type") == "tool_reference":
            left_out("the block tool_reference", PATH)
        else:
            texts.append(_text(block, place))
    return "\n".join(texts)


def _tools(value: object) -> list[Fields]:
    tools: list[Fields] = []
    for where, tool in objects_of(value, "tools", MAX_TOOLS):
        kind, schema = tool.get("type"), tool.get("input_schema")
        if schema is None and isinstance(kind, str) and kind.startswith(_LEFT_OUT_TOOLS):
            left_out(f"the tool {kind}", PATH)
            continue
        if schema is None and kind not in (None, "custom"):
            refuse(f"{where}.type", 'must be "custom", with an input_schema', kind)
        function = {
            "name": name_of(tool.get("name"), f"{where}.name"),
            "description": tool.get("description"),
            "parameters": options_of(schema, f"{where}.input_schema"),
            "strict": tool.get("strict"),
        }
        tools.append(tool_of(function, where, "input_schema"))
    return tools


def _set_choice(fields: Fields, choice: Fields) -> None:
    kind = choice.get("type")
    if kind not in ("auto", "any", "tool", "none"):
        refuse("tool_choice.type", 'must be "auto", "any", "tool" or "none"', kind)
    if kind == "tool":
        name = name_of(choice.get("name"), "tool_choice.name")
        fields["tool_choice"] = {"type": "function", "function": {"name": name}}
    else:
        fields["tool_choice"] = "required" if kind == "any" else kind
    place = "tool_choice.disable_parallel_tool_use"
    if bool_of(choice.get("disable_parallel_tool_use"), place):
        fields["parallel_tool_calls"] = False


def _schema(form: Fields, where: str) -> Fields:
    if form.get("type") != "json_schema":
        refuse(f"{where}.type", 'must be "json_schema"', form.get("type"))
    return object_of(form.get("schema"), f"{where}.schema")


def _set_output(fields: Fields, body: Mapping[str, object]) -> None:
    """Sets the structure of the answer and the template's variables for thinking."""
    config = options_of(body.get("output_config"), "output_config")
    if form := options_of(config.get("format"), "output_config.format"):
        schema = _schema(form, "output_config.format")
        fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
    elif form := options_of(body.get("output_format"), "output_format"):
        # Another field of chats, so that `renames` finds the name which the client sent.
        fields["guided_json"] = _schema(form, "output_format")
    variables = dict(options_of(body.get("chat_template_kwargs"), "chat_template_kwargs"))
    effort, kind = config.get("effort"), None
    if effort is not None:
        if effort not in _EFFORTS:
            refuse("output_config.effort", f"must be one of {', '.join(_EFFORTS)}", effort)
        variables.setdefault("reasoning_effort", effort)
    if thinking := options_of(body.get("thinking"), "thinking"):
        kind = thinking.get("type")
        if kind not in ("enabled", "disabled", "adaptive"):
            refuse("thinking.type", 'must be "enabled", "disabled" or "adaptive"', kind)
        budget = thinking.get("budget_tokens")
        if budget is not None and (type(budget) is not int or budget < 0):
            refuse("thinking.budget_tokens", "must be a number of tokens", budget)
        variables.setdefault("enable_thinking", kind != "disabled")
    fields["chat_template_kwargs"] = variables

"""Chats for templates that read the tools from the system message and write no calls.

Phi-4-mini's template is such: it writes `message['tools']`, a text, between `<|tool|>` and
`<|/tool|>`, ignores the `tools` that transformers gives to a template, and writes the content of
each message alone. So tools, and the calls of earlier turns, become parts of the messages, in the
form that its model card describes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from serve_app.text.template import ChatMessage, JsonObject

_READS_TOOLS = re.compile(r"""message(?:\.tools\b|\[\s*['"]tools['"]\s*\])""")
# The words of the model card before tools, for chats without a system message.
_SYSTEM = "You are a helpful assistant with some tools."


def needs_message_tools(source: str | None) -> bool:
    """Returns whether a chat template reads tools from messages, and no calls."""
    return source is not None and "tool_calls" not in source and bool(_READS_TOOLS.search(source))


def with_message_tools(
    messages: Sequence[ChatMessage], tools: Sequence[JsonObject]
) -> list[ChatMessage]:
    """Returns the messages with the tools in the first system message, which keeps its own if it
    has any, and with each call in the content of its message."""
    chat = [_with_calls(message) for message in messages]
    if not tools:
        return chat
    text = _json([tool["function"] for tool in tools])
    for number, message in enumerate(chat):
        if message["role"] == "system":
            chat[number] = {"tools": text, **message}
            return chat
    return [{"role": "system", "content": _SYSTEM, "tools": text}, *chat]


def _with_calls(message: ChatMessage) -> ChatMessage:
    calls = message.get("tool_calls")
    content = message.get("content") or ""
    if not calls:
        return {**message, "content": content}
    made = [
        {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        for call in calls
    ]
    return {**message, "content": f"{content}<|tool_call|>{_json(made)}<|/tool_call|>"}


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)

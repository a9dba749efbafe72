"""Schemas of the bodies and answers of /v1/responses and /v1/messages, for /openapi.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from serve_app.dialects.messages import MAX_TOOLS
from serve_app.dialects.responses import MAX_ITEMS
from serve_app.openai.chat import MAX_MESSAGES
from serve_app.openai.fields import MAX_LOGPROBS, MAX_TOKENS

Schema = dict[str, object]


def _object(properties: Mapping[str, object], *required: str) -> Schema:
    return {"type": "object", "properties": dict(properties), "required": list(required)}


def _nullable(schema: Mapping[str, Any]) -> Schema:
    return {"anyOf": [dict(schema), {"type": "null"}]}


def _list(max_items: int, items: Mapping[str, object], min_items: int = 0) -> Schema:
    return {"type": "array", "items": dict(items), "minItems": min_items, "maxItems": max_items}


_TEXT: Schema = {"type": "string"}
_OBJECT: Schema = {"type": "object"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_MODEL: Schema = {"type": "string", "minLength": 1, "maxLength": 256}
_LIMIT: Schema = {"type": "integer", "minimum": 1, "maximum": MAX_TOKENS}
_SAMPLING: Schema = {
    "temperature": _nullable({"type": "number", "minimum": 0, "maximum": 2}),
    "top_p": _nullable({"type": "number", "exclusiveMinimum": 0, "maximum": 1}),
    "stream": _nullable({"type": "boolean"}),
}
_RESPONSES = _object(
    {
        "model": _MODEL,
        "input": {"anyOf": [_TEXT, _list(MAX_ITEMS, _OBJECT, 1)]},
        "instructions": _nullable(_TEXT),
        "max_output_tokens": _nullable(_LIMIT),
        **_SAMPLING,
        "tools": _nullable(_list(MAX_TOOLS, _OBJECT)),
        "tool_choice": _nullable({"anyOf": [_TEXT, _OBJECT]}),
        "parallel_tool_calls": _nullable({"type": "boolean"}),
        "text": _nullable(_object({"format": _nullable(_OBJECT)})),
        "reasoning": _nullable(_object({"effort": _nullable(_TEXT), "summary": _nullable(_TEXT)})),
        "include": _nullable(_list(64, _TEXT)),
        "top_logprobs": _nullable({"type": "integer", "minimum": 0, "maximum": MAX_LOGPROBS}),
        "metadata": _nullable({"type": "object", "additionalProperties": _TEXT}),
        "store": _nullable({"type": "boolean"}),
        "truncation": _nullable({"enum": ["auto", "disabled"]}),
        "user": _nullable(_TEXT),
        "safety_identifier": _nullable(_TEXT),
        "prompt_cache_key": _nullable(_TEXT),
    },
    "model",
    "input",
)
_RESPONSE = _object(
    {
        "id": _TEXT,
        "object": {"const": "response"},
        "created_at": _COUNT,
        "status": {"enum": ["completed", "incomplete"]},
        "model": _TEXT,
        "output": {"type": "array", "items": _OBJECT},
        "incomplete_details": _nullable(_object({"reason": _TEXT}, "reason")),
        "store": {"const": False},
        "usage": _object(
            {
                "input_tokens": _COUNT,
                "input_tokens_details": _object({"cached_tokens": _COUNT}, "cached_tokens"),
                "output_tokens": _COUNT,
                "output_tokens_details": _object({"reasoning_tokens": _COUNT}, "reasoning_tokens"),
                "total_tokens": _COUNT,
            },
            *("input_tokens", "output_tokens", "total_tokens"),
        ),
    },
    *("id", "object", "created_at", "status", "model", "output", "usage"),
)
_TURN = _object(
    {
        "role": {"enum": ["user", "assistant", "system"]},
        "content": {"anyOf": [_TEXT, {"type": "array", "items": _OBJECT}]},
    },
    *("role", "content"),
)
_PROMPT: Schema = {
    "model": _MODEL,
    "messages": _list(MAX_MESSAGES, _TURN, 1),
    "system": _nullable({"anyOf": [_TEXT, {"type": "array", "items": _OBJECT}]}),
    "tools": _nullable(_list(MAX_TOOLS, _OBJECT)),
    "tool_choice": _nullable(_object({"type": {"enum": ["auto", "any", "tool", "none"]}}, "type")),
    "thinking": _nullable(_object({"type": {"enum": ["enabled", "disabled", "adaptive"]}}, "type")),
}
_MESSAGES = _object(
    {
        **_PROMPT,
        "max_tokens": _LIMIT,
        **_SAMPLING,
        "top_k": _nullable({"type": "integer", "minimum": 0}),
        "stop_sequences": _nullable(_list(16, {"type": "string", "minLength": 1})),
        "output_config": _nullable(_object({"format": _nullable(_OBJECT), "effort": {}})),
        "metadata": _nullable(_object({"user_id": _nullable(_TEXT)})),
    },
    *("model", "messages", "max_tokens"),
)
_MESSAGE = _object(
    {
        "id": _TEXT,
        "type": {"const": "message"},
        "role": {"const": "assistant"},
        "model": _TEXT,
        "content": {"type": "array", "items": _OBJECT},
        "stop_reason": _TEXT,
        "stop_sequence": _nullable(_TEXT),
        "usage": _object(
            {
                "input_tokens": _COUNT,
                "cache_creation_input_tokens": _COUNT,
                "cache_read_input_tokens": _COUNT,
                "output_tokens": _COUNT,
            },
            *("input_tokens", "output_tokens"),
        ),
    },
    *("id", "type", "role", "model", "content", "stop_reason", "usage"),
)
_MESSAGES_ERROR = _object(
    {
        "type": {"const": "error"},
        "error": _object({"type": _TEXT, "message": _TEXT}, "type", "message"),
        "request_id": _nullable(_TEXT),
    },
    *("type", "error"),
)

DIALECT_SCHEMAS: Mapping[str, Schema] = {
    "ResponsesRequest": _RESPONSES,
    "Response": _RESPONSE,
    "MessagesRequest": _MESSAGES,
    "CountTokensRequest": _object(_PROMPT, "model", "messages"),
    "Message": _MESSAGE,
    "MessageTokens": _object({"input_tokens": _COUNT}, "input_tokens"),
    "MessagesError": _MESSAGES_ERROR,
}

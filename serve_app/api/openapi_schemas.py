"""Schemas for /openapi.json: of answers, and of the bodies that a dialect translates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from serve_app.dialects.messages import MAX_TOOLS
from serve_app.dialects.responses import MAX_ITEMS
from serve_app.openai.chat import MAX_MESSAGES
from serve_app.openai.fields import MAX_LOGPROBS, MAX_TOKENS

Schema = dict[str, object]


def _answer(properties: Mapping[str, object], *optional: str) -> Schema:
    return _body(properties, *(name for name in properties if name not in optional))


def _body(properties: Mapping[str, object], *required: str) -> Schema:
    return {"type": "object", "properties": dict(properties), "required": list(required)}


def _nullable(schema: Mapping[str, Any]) -> Schema:
    return {"anyOf": [dict(schema), {"type": "null"}]}


def _list(items: Mapping[str, object]) -> Schema:
    return {"type": "array", "items": dict(items)}


def _bounded(max_items: int, items: Mapping[str, object], min_items: int = 0) -> Schema:
    return {**_list(items), "minItems": min_items, "maxItems": max_items}


TEXT: Schema = {"type": "string"}
_TEXT_OR_NULL: Schema = {"type": ["string", "null"]}
_OBJECT: Schema = {"type": "object"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_MODEL: Schema = {"type": "string", "minLength": 1, "maxLength": 256}
_LIMIT: Schema = {"type": "integer", "minimum": 1, "maximum": MAX_TOKENS}
_SAMPLING: Schema = {
    "temperature": _nullable({"type": "number", "minimum": 0, "maximum": 2}),
    "top_p": _nullable({"type": "number", "exclusiveMinimum": 0, "maximum": 1}),
    "stream": _nullable({"type": "boolean"}),
}
_USAGE = _answer(
    {
        "prompt_tokens": _COUNT,
        "completion_tokens": _COUNT,
        "total_tokens": _COUNT,
        "prompt_tokens_details": _answer({"cached_tokens": _COUNT}),
        "completion_tokens_details": _answer({"reasoning_tokens": _COUNT}),
    },
    "completion_tokens_details",
)
_MODEL_LINE = _answer(
    {
        "id": TEXT,
        "object": {"const": "model"},
        "created": _COUNT,
        "owned_by": TEXT,
        "root": TEXT,
        "parent": _TEXT_OR_NULL,
        "max_model_len": {"type": ["integer", "null"]},
    }
)
_CALL = _answer(
    {
        "id": TEXT,
        "type": {"const": "function"},
        "function": _answer({"name": TEXT, "arguments": TEXT}),
    }
)
_CHAT_MESSAGE = _answer(
    {
        "role": {"const": "assistant"},
        "content": _TEXT_OR_NULL,  # null if there are only tool calls
        "refusal": _TEXT_OR_NULL,
        "reasoning": TEXT,
        "reasoning_content": TEXT,
        "tool_calls": _list(_CALL),
    },
    *("reasoning", "reasoning_content", "tool_calls"),
)
_PROMPT: Schema = {
    "model": _MODEL,
    "messages": _bounded(
        MAX_MESSAGES,
        _answer(
            {
                "role": {"enum": ["user", "assistant", "system"]},
                "content": {"anyOf": [TEXT, _list(_OBJECT)]},
            }
        ),
        1,
    ),
    "system": _nullable({"anyOf": [TEXT, _list(_OBJECT)]}),
    "tools": _nullable(_bounded(MAX_TOOLS, _OBJECT)),
    "tool_choice": _nullable(_answer({"type": {"enum": ["auto", "any", "tool", "none"]}})),
    "thinking": _nullable(_answer({"type": {"enum": ["enabled", "disabled", "adaptive"]}})),
}


def _generated(kind: str, content: Mapping[str, object]) -> Schema:
    choice = _answer(
        {
            "index": _COUNT,
            **content,
            "logprobs": {"type": ["object", "null"]},
            "finish_reason": _TEXT_OR_NULL,
            "stop_reason": {"type": ["string", "integer", "null"]},
        }
    )
    return _answer(
        {
            "id": TEXT,
            "object": {"const": kind},
            "created": _COUNT,
            "model": TEXT,
            "system_fingerprint": TEXT,
            "choices": _list(choice),
            "usage": _USAGE,
        }
    )


SCHEMAS: Mapping[str, Schema] = {
    "Error": _answer(
        {
            "error": _answer(
                {
                    "message": TEXT,
                    "type": TEXT,
                    "param": _TEXT_OR_NULL,
                    "code": _TEXT_OR_NULL,
                }
            )
        }
    ),
    "ResponsesRequest": _body(
        {
            "model": _MODEL,
            "input": {"anyOf": [TEXT, _bounded(MAX_ITEMS, _OBJECT, 1)]},
            "instructions": _nullable(TEXT),
            "max_output_tokens": _nullable(_LIMIT),
            **_SAMPLING,
            "tools": _nullable(_bounded(MAX_TOOLS, _OBJECT)),
            "tool_choice": _nullable({"anyOf": [TEXT, _OBJECT]}),
            "parallel_tool_calls": _nullable({"type": "boolean"}),
            "text": _nullable(_body({"format": _nullable(_OBJECT)})),
            "reasoning": _nullable(_body({"effort": _nullable(TEXT), "summary": _nullable(TEXT)})),
            "include": _nullable(_bounded(64, TEXT)),
            "top_logprobs": _nullable({"type": "integer", "minimum": 0, "maximum": MAX_LOGPROBS}),
            "metadata": _nullable({"type": "object", "additionalProperties": TEXT}),
            "store": _nullable({"type": "boolean"}),
            "truncation": _nullable({"enum": ["auto", "disabled"]}),
            "user": _nullable(TEXT),
            "safety_identifier": _nullable(TEXT),
            "prompt_cache_key": _nullable(TEXT),
        },
        *("model", "input"),
    ),
    "Response": _answer(
        {
            "id": TEXT,
            "object": {"const": "response"},
            "created_at": _COUNT,
            "status": {"enum": ["completed", "incomplete"]},
            "model": TEXT,
            "output": _list(_OBJECT),
            "incomplete_details": _nullable(_answer({"reason": TEXT})),
            "store": {"const": False},
            "usage": _answer(
                {
                    "input_tokens": _COUNT,
                    "input_tokens_details": _answer({"cached_tokens": _COUNT}),
                    "output_tokens": _COUNT,
                    "output_tokens_details": _answer({"reasoning_tokens": _COUNT}),
                    "total_tokens": _COUNT,
                },
                *("input_tokens_details", "output_tokens_details"),
            ),
        },
        *("incomplete_details", "store"),
    ),
    "MessagesRequest": _body(
        {
            **_PROMPT,
            "max_tokens": _LIMIT,
            **_SAMPLING,
            "top_k": _nullable({"type": "integer", "minimum": 0}),
            "stop_sequences": _nullable(_bounded(16, {"type": "string", "minLength": 1})),
            "output_config": _nullable(_body({"format": _nullable(_OBJECT), "effort": {}})),
            "metadata": _nullable(_body({"user_id": _nullable(TEXT)})),
        },
        *("model", "messages", "max_tokens"),
    ),
    "CountTokensRequest": _body(_PROMPT, "model", "messages"),
    "Message": _answer(
        {
            "id": TEXT,
            "type": {"const": "message"},
            "role": {"const": "assistant"},
            "model": TEXT,
            "content": _list(_OBJECT),
            "stop_reason": TEXT,
            "stop_sequence": _nullable(TEXT),
            "usage": _body(
                {
                    "input_tokens": _COUNT,
                    "cache_creation_input_tokens": _COUNT,
                    "cache_read_input_tokens": _COUNT,
                    "output_tokens": _COUNT,
                },
                *("input_tokens", "output_tokens"),
            ),
        },
        "stop_sequence",
    ),
    "MessageTokens": _answer({"input_tokens": _COUNT}),
    "MessagesError": _answer(
        {
            "type": {"const": "error"},
            "error": _answer({"type": TEXT, "message": TEXT}),
            "request_id": _nullable(TEXT),
        },
        "request_id",
    ),
    "ChatCompletion": _generated("chat.completion", {"message": _CHAT_MESSAGE}),
    "Completion": _generated("text_completion", {"text": TEXT}),
    "Model": _MODEL_LINE,
    "ModelList": _answer({"object": {"const": "list"}, "data": _list(_MODEL_LINE)}),
    "Tokens": _answer(
        {
            "count": _COUNT,
            "max_model_len": _COUNT,
            "tokens": _list(_COUNT),
            "token_strs": {"type": ["array", "null"], "items": TEXT},
        }
    ),
    "Detokenized": _answer({"prompt": TEXT}),
    "TokenizerInfo": _OBJECT,
    "Status": _answer({"status": TEXT}),
    "Version": _answer({"version": TEXT}),
}

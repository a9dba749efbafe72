"""Answers of /v1/messages, Anthropic's API: a message, and the events of its making."""

from __future__ import annotations

import json

from serve_app.errors import ApiError
from serve_app.openai.choice import ToolCallDelta
from serve_app.openai.dialect import BlockKind, DialectWriter, event
from serve_app.openai.responses import Json, ResponseHead, UsageInfo, encode

# Kind of a block -> the type of its deltas, and their field.
_DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


class MessagesWriter(DialectWriter):
    def __init__(self, head: ResponseHead, max_tokens: int, *, shows_cache: bool) -> None:
        """`shows_cache` counts the tokens that the cache had apart from the others."""
        super().__init__(head)
        self._shows_cache = shows_cache
        self._max_tokens = max_tokens
        self._block: Json = {}  # the open one, without its text
        self._prefix = b""  # of the open block's deltas

    def start(self, usage: UsageInfo) -> bytes:
        message = self._message(self._usage(usage, None))
        return event("message_start", {"message": message}) + event("ping", {})

    def end(self, usage: UsageInfo, num_reasoning_tokens: int) -> bytes:
        closing = self.finish(needs_text=False)
        counts = self._usage(usage, num_reasoning_tokens)
        fields: Json = {"delta": self._stop(usage), "usage": counts}
        return closing + event("message_delta", fields) + event("message_stop", {})

    def body(self, usage: UsageInfo, num_reasoning_tokens: int) -> bytes:
        self.finish(needs_text=False)
        message = self._message(self._usage(usage, num_reasoning_tokens))
        return encode(message | self._stop(usage))

    def failure(self, error: ApiError) -> bytes:
        return b"event: error\ndata: %b\n\n" % error.anthropic_body(self.head.request_id)

    def opened(self, kind: BlockKind, call: ToolCallDelta | None) -> bytes:
        if kind == "text":
            self._block = {"type": "text", "text": ""}
        elif kind == "reasoning":
            self._block = {"type": "thinking", "thinking": "", "signature": ""}
        else:
            assert call is not None
            call_id = call.id or f"toolu_{len(self.blocks)}"
            name = call.name or ""
            self._block = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
        delta_type, field = _DELTAS[kind]
        self._prefix = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,'
            b'"delta":{"type":"%b","%b":' % (len(self.blocks), delta_type.encode(), field.encode())
        )
        fields: Json = {"index": len(self.blocks), "content_block": self._block}
        return event("content_block_start", fields)

    def added(self, kind: BlockKind, text: str, logprobs: list[Json]) -> bytes:
        self.texts.append(text)
        return self._prefix + encode(text) + b"}}\n\n"

    def closed(self, kind: BlockKind) -> bytes:
        text, index = "".join(self.texts), len(self.blocks)
        field: Json
        signature = b""
        if kind == "call":
            field = {"input": _input(text)}
        elif kind == "reasoning":
            field = {"thinking": text}
            delta: Json = {"type": "signature_delta", "signature": ""}
            signature = event("content_block_delta", {"index": index, "delta": delta})
        else:
            field = {"text": text}
        self.blocks.append(self._block | field)
        return signature + event("content_block_stop", {"index": index})

    def _stop(self, usage: UsageInfo) -> Json:
        """Returns the reason of the end, and the stop sequence that was found."""
        reason, sequence = "tool_use" if self.has_calls else "end_turn", None
        if self.is_cut:
            is_full = usage.completion_tokens < self._max_tokens
            reason = "model_context_window_exceeded" if is_full else "max_tokens"
        elif self.last is not None and isinstance(self.last.stop_reason, str):
            reason, sequence = "stop_sequence", self.last.stop_reason
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _message(self, usage: Json) -> Json:
        return {
            "id": self.head.id,
            "type": "message",
            "role": "assistant",
            "model": self.head.model,
            "content": self.blocks,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    def _usage(self, usage: UsageInfo, num_reasoning_tokens: int | None) -> Json:
        cached = usage.prompt_tokens_details.cached_tokens if self._shows_cache else 0
        counts: Json = {
            "input_tokens": usage.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage.completion_tokens,
        }
        if num_reasoning_tokens is not None:
            counts["output_tokens_details"] = {"thinking_tokens": num_reasoning_tokens}
        return counts


def _input(text: str) -> object:
    """Returns the arguments of a call; {} for a call that the limit of tokens cut."""
    try:
        return json.loads(text or "{}")
    except ValueError:
        return {}

"""Answers of /v1/responses: a response object, and the events of its making."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import cast

import msgspec

from serve_app.errors import ApiError
from serve_app.openai.choice import ToolCallDelta
from serve_app.openai.dialect import BlockKind, DialectWriter, event
from serve_app.openai.responses import Json, ResponseHead, UsageInfo, encode

# Kind of a block -> the beginning of its item's id, and of the names of its events.
_IDS = {"text": "msg", "reasoning": "rs", "call": "fc"}
_EVENTS = {
    "text": "response.output_text",
    "reasoning": "response.reasoning_text",
    "call": "response.function_call_arguments",
}
_OPENAI_CODES = {429: "rate_limit_exceeded", 400: "invalid_prompt"}


class ResponsesWriter(DialectWriter):
    def __init__(self, head: ResponseHead, namespaces: Mapping[str, str], repeated: Json) -> None:
        """`namespaces` of tools, by their names; `repeated`: fields of the request that the
        response repeats."""
        super().__init__(head)
        self._namespaces = namespaces
        self._key = head.id.partition("_")[2]
        self._repeated = repeated
        self._sequence = 0
        self._item: Json = {}  # the open one, without its text
        self._logprobs: list[bytes] = []
        self._prefix = b""  # of the open item's deltas

    def start(self, usage: UsageInfo) -> bytes:
        begun: Json = {"response": self._response("in_progress")}
        return self._event("response.created", begun) + self._event("response.in_progress", begun)

    def end(self, usage: UsageInfo, num_reasoning_tokens: int) -> bytes:
        closing = self.finish(needs_text=True)
        status = "incomplete" if self.is_cut else "completed"
        response = self._response(status, usage, num_reasoning_tokens)
        return closing + self._event(f"response.{status}", {"response": response})

    def body(self, usage: UsageInfo, num_reasoning_tokens: int) -> bytes:
        self.finish(needs_text=True)
        status = "incomplete" if self.is_cut else "completed"
        return encode(self._response(status, usage, num_reasoning_tokens))

    def failure(self, error: ApiError) -> bytes:
        code = _OPENAI_CODES.get(error.status, "server_error")
        details: Json = {"code": error.code, "message": error.message, "param": error.param}
        response = self._response("failed") | {"error": {"code": code, "message": error.message}}
        events = self._event("error", details)
        return events + self._event("response.failed", {"response": response})

    def opened(self, kind: BlockKind, call: ToolCallDelta | None) -> bytes:
        item_id = f"{_IDS[kind]}_{self._key}_{len(self.blocks)}"
        self._logprobs = []
        if kind == "text":
            self._item = {"id": item_id, "type": "message", "role": "assistant", "content": []}
        elif kind == "reasoning":
            self._item = {"id": item_id, "type": "reasoning", "summary": [], "content": []}
        else:
            assert call is not None
            names = {"call_id": call.id or item_id, "name": call.name or ""}
            if (namespace := self._namespaces.get(names["name"])) is not None:
                names["namespace"] = namespace
            self._item = {"id": item_id, "type": "function_call", **names, "arguments": ""}
        name = f"{_EVENTS[kind]}.delta"
        place: Json = {"item_id": item_id, "output_index": len(self.blocks)}
        self._place = place if kind == "call" else place | {"content_index": 0}
        opening = encode({"type": name, **self._place})[:-1]
        self._prefix = b"event: %b\ndata: %b" % (name.encode(), opening)
        item = self._item | {"status": "in_progress"}
        begun: Json = {"output_index": len(self.blocks), "item": item}
        added = self._event("response.output_item.added", begun)
        if kind == "call":
            return added
        part = {"part": self._part(kind, "", b"[]")}
        return added + self._event("response.content_part.added", self._place | part)

    def added(self, kind: BlockKind, text: str, logprobs: list[Json]) -> bytes:
        self.texts.append(text)
        closing = b"}\n\n"
        if kind == "text":
            lists = [bytes(cast(msgspec.Raw, one["content"])) for one in logprobs]
            self._logprobs += lists
            closing = b',"logprobs":%b}\n\n' % _joined(lists)
        number, self._sequence = self._sequence, self._sequence + 1
        return b'%b,"sequence_number":%d,"delta":%b%b' % (
            *(self._prefix, number, encode(text)),
            closing,
        )

    def closed(self, kind: BlockKind) -> bytes:
        text, name = "".join(self.texts), f"{_EVENTS[kind]}.done"
        item = self._item | {"status": "incomplete" if self.is_cut else "completed"}
        if kind == "call":
            item["arguments"] = text
            done: Json = self._place | {"name": item["name"], "arguments": text}
            events = self._event(name, done)
        else:
            logprobs = _joined(self._logprobs)
            part = self._part(kind, text, logprobs)
            item["content"] = [part]
            done = self._place | {"text": text}
            if kind == "text":
                done["logprobs"] = msgspec.Raw(logprobs)
            events = self._event(name, done)
            events += self._event("response.content_part.done", self._place | {"part": part})
        done = {"output_index": len(self.blocks), "item": item}
        self.blocks.append(item)
        return events + self._event("response.output_item.done", done)

    @staticmethod
    def _part(kind: BlockKind, text: str, logprobs: bytes) -> Json:
        if kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {
            "type": "output_text",
            "text": text,
            "annotations": [],
            "logprobs": msgspec.Raw(logprobs),
        }

    def _response(
        self, status: str, usage: UsageInfo | None = None, num_reasoning_tokens: int = 0
    ) -> Json:
        is_cut = status == "incomplete"
        return {
            "id": self.head.id,
            "object": "response",
            "created_at": self.head.created,
            "completed_at": int(time.time()) if usage is not None else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": None,  # texts of the request are not repeated
            "max_tool_calls": None,
            "model": self.head.model,
            "output": self.blocks,
            "previous_response_id": None,
            "service_tier": "default",
            "store": False,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage, num_reasoning_tokens),
            **self._repeated,
        }

    def _event(self, name: str, fields: Json) -> bytes:
        number, self._sequence = self._sequence, self._sequence + 1
        return event(name, {"sequence_number": number, **fields})


def _usage(usage: UsageInfo, num_reasoning_tokens: int) -> Json:
    cached = usage.prompt_tokens_details.cached_tokens
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }


def _joined(lists: list[bytes]) -> bytes:
    """Joins JSON lists."""
    return b"[" + b",".join(one[1:-1] for one in lists if len(one) > 2) + b"]"

"""Response bodies of the OpenAI API as bytes: chat.completion, text_completion, and their chunks.

A chunk is a prefix and a suffix made once per choice, with the delta encoded between them: about
1 us where a dictionary of the whole chunk costs 5. This module is independent of tokens and of how
the text was made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from serve_app.errors import ApiError
from serve_app.openai.choice import ToolCallDelta

Json = dict[str, object]
Kind = Literal["chat", "completion"]

DONE = b"data: [DONE]\n\n"

encode = msgspec.json.encode


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """The fields that every body and chunk of a response repeats. `id` may be derived from the
    body's `request_id`, never from the header `x-request-id`."""

    kind: Kind
    id: str
    model: str  # as the client wrote it
    created: int
    system_fingerprint: str
    request_id: str | None = None  # in the headers; of events for errors in Anthropic's shape

    def to_json(self, *, is_chunk: bool) -> Json:
        suffix = ".chunk" if is_chunk and self.kind == "chat" else ""
        name = "chat.completion" if self.kind == "chat" else "text_completion"
        return {
            "id": self.id,
            "object": name + suffix,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class UsageInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """The token counts of a response."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    # Only where the model's text may have reasoning beside its content.
    completion_tokens_details: CompletionTokensDetails | None = None


def choice_body(
    kind: Kind,
    index: int,
    text: str,
    logprobs: Json | None,
    finish_reason: str,
    stop_reason: str | int | None,
    extras: Json,
    additions: Json | None = None,
) -> msgspec.Raw:
    """Returns a choice of a whole response. `extras` are vLLM's additions, left out when empty;
    `additions` are fields of the message beside its content, see `message_fields`."""
    message: Json = {"role": "assistant", "content": text, "refusal": None}
    if additions:
        message |= {"content": text or None} | additions
    body = {
        "index": index,
        **({"message": message} if kind == "chat" else {"text": text}),
        "logprobs": logprobs,
        "finish_reason": finish_reason,
        "stop_reason": stop_reason,
        **extras,
    }
    return msgspec.Raw(encode(body))


def message_fields(
    reasoning: str, calls: Iterable[ToolCallDelta], *, is_chunk: bool = False
) -> Json:
    """Returns the reasoning and the tool calls of a message or a delta. Clients read the reasoning
    from `reasoning`, as vLLM names it, or from `reasoning_content`."""
    fields: Json = {}
    if reasoning:
        fields |= {"reasoning": reasoning, "reasoning_content": reasoning}
    listed = [_call_body(call, is_chunk) for call in calls]
    if listed:
        fields["tool_calls"] = listed
    return fields


def _call_body(call: ToolCallDelta, is_chunk: bool) -> Json:
    function: Json = {"arguments": call.arguments}
    if call.name is not None:
        function = {"name": call.name, **function}
    body: Json = {"index": call.index} if is_chunk else {}
    if call.id is not None:
        body |= {"id": call.id, "type": "function"}
    return body | {"function": function}


class ChunkWriter:
    """Writes the chunks of a choice. The first carries the role next to the content; no client
    gets a chunk with the role alone."""

    __slots__ = ("_first_prefix", "_prefix", "_start", "_suffix", "_text_suffix")

    def __init__(self, head: ResponseHead, index: int, *, shows_usage: bool) -> None:
        opening = encode(head.to_json(is_chunk=True))[:-1]
        start = b"data: " + opening + b',"choices":[{"index":%d,' % index
        is_chat = head.kind == "chat"
        self._start = start
        self._prefix = start + (b'"delta":{"content":' if is_chat else b'"text":')
        self._first_prefix = (
            start + b'"delta":{"role":"assistant","content":' if is_chat else self._prefix
        )
        self._suffix = b'},"logprobs":' if is_chat else b',"logprobs":'
        # With stream_options.include_usage every chunk but the last has "usage": null.
        closing = b',"usage":null}\n\n' if shows_usage else b"}\n\n"
        self._text_suffix = self._suffix + b'null,"finish_reason":null}]' + closing

    def text_chunk(self, text: str) -> bytes:
        """Returns a chunk that holds text only, as almost every chunk does."""
        prefix, self._first_prefix = self._first_prefix, self._prefix
        return prefix + encode(text) + self._text_suffix

    def split_chunk(
        self,
        text: str,
        finish_reason: str | None,
        extras: Mapping[str, object],
        usage: UsageInfo | None,
        additions: Json | None = None,
    ) -> tuple[bytes, bytes]:
        """Returns a chunk without its log-probabilities: the bytes before and after them. With
        `additions`, see `message_fields`, the delta has these and the text only if there is any."""
        prefix, is_first = self._first_prefix, self._first_prefix is not self._prefix
        self._first_prefix = self._prefix
        parts = [b',"finish_reason":', encode(finish_reason)]
        if extras:
            parts += [b",", encode(extras)[1:-1]]
        if usage is None:
            parts.append(self._text_suffix[self._text_suffix.rindex(b"}]") :])
        else:
            parts += [b'}],"usage":', encode(usage), b"}\n\n"]
        if additions:
            role: Json = {"role": "assistant", "content": None} if is_first else {}
            delta = role | ({"content": text} if text else {}) | additions
            before = b"".join((self._start, b'"delta":', encode(delta), self._suffix[1:]))
        else:
            before = b"".join((prefix, encode(text), self._suffix))
        return before, b"".join(parts)


def usage_chunk(head: ResponseHead, usage: UsageInfo) -> bytes:
    """Returns a chunk with usage and an empty list of choices: some clients read only one of the
    two fields of a chunk."""
    body = {**head.to_json(is_chunk=True), "choices": [], "usage": usage}
    return b"data: " + encode(body) + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """Returns the end of a stream that failed, as an event that OpenAI's SDKs raise on."""
    return b"event: error\ndata: " + error.body() + b"\n\n" + DONE

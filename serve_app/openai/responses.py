"""Response bodies of the OpenAI API as bytes: chat.completion, text_completion, and their chunks.

A chunk is a prefix and a suffix made once per choice, with the delta encoded between them: about
1 us where a dictionary of the whole chunk costs 5. This module is independent of tokens and of how
the text was made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from serve_app.errors import ApiError

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


@dataclass(frozen=True, slots=True)
class UsageInfo:
    """The token counts of a response."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def to_json(self) -> Json:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(slots=True)
class ChoiceBody:
    """A choice of a whole response. `extras` are vLLM's additions, left out when empty."""

    index: int
    text: str
    logprobs: Json | None
    finish_reason: str
    stop_reason: str | int | None
    extras: Json = field(default_factory=dict)

    def encode(self, kind: Kind) -> msgspec.Raw:
        content: Json = (
            {"message": {"role": "assistant", "content": self.text, "refusal": None}}
            if kind == "chat"
            else {"text": self.text}
        )
        body = {
            "index": self.index,
            **content,
            "logprobs": self.logprobs,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            **self.extras,
        }
        return msgspec.Raw(encode(body))


def full_body(
    head: ResponseHead,
    choices: Sequence[msgspec.Raw],
    usage: UsageInfo,
    extras: Mapping[str, object],
) -> bytes:
    """Returns a whole response. `choices` are encoded already, see `ChoiceBody.encode`."""
    return encode(
        {
            **head.to_json(is_chunk=False),
            "choices": choices,
            "usage": usage.to_json(),
            **extras,
        }
    )


class ChunkWriter:
    """Writes the chunks of a choice. The first carries the role next to the content; no client
    gets a chunk with the role alone."""

    __slots__ = ("_first_prefix", "_prefix", "_suffix", "_text_suffix")

    def __init__(self, head: ResponseHead, index: int, *, shows_usage: bool) -> None:
        opening = encode(head.to_json(is_chunk=True))[:-1]
        start = b"data: " + opening + b',"choices":[{"index":%d,' % index
        is_chat = head.kind == "chat"
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
    ) -> tuple[bytes, bytes]:
        """Returns a chunk without its log-probabilities: the bytes before and after them."""
        prefix, self._first_prefix = self._first_prefix, self._prefix
        parts = [b',"finish_reason":', encode(finish_reason)]
        if extras:
            parts += [b",", encode(extras)[1:-1]]
        if usage is None:
            parts.append(self._text_suffix[self._text_suffix.rindex(b"}]") :])
        else:
            parts += [b'}],"usage":', encode(usage.to_json()), b"}\n\n"]
        return b"".join((prefix, encode(text), self._suffix)), b"".join(parts)


def usage_chunk(head: ResponseHead, usage: UsageInfo) -> bytes:
    """Returns a chunk with usage and an empty list of choices: some clients read only one of the
    two fields of a chunk."""
    body = {**head.to_json(is_chunk=True), "choices": [], "usage": usage.to_json()}
    return b"data: " + encode(body) + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """Returns the end of a stream that failed, as an event that OpenAI's SDKs raise on."""
    return b"event: error\ndata: " + error.body() + b"\n\n" + DONE

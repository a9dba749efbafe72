"""Bodies of the OpenAI API as bytes: chat.completion, text_completion, and their stream chunks.

A chunk is a prefix and a suffix made once a choice with the delta encoded between them: about 1 us
where a dictionary of the whole chunk takes 5. Ignorant of tokens and of how the text came about.
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
    """The fields that every body and chunk of one answer repeats. `id` may be made of the body's
    `request_id`, never of the header `x-request-id`."""

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
class Usage:
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
    """One choice of a whole answer. `extras` are vLLM's additions, left out when empty."""

    index: int
    text: str
    logprobs: Json | None
    finish_reason: str
    stop_reason: str | int | None
    extras: Json = field(default_factory=dict)

    def to_json(self, kind: Kind) -> Json:
        said: Json = (
            {"message": {"role": "assistant", "content": self.text, "refusal": None}}
            if kind == "chat"
            else {"text": self.text}
        )
        return {
            "index": self.index,
            **said,
            "logprobs": self.logprobs,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            **self.extras,
        }


def full_body(
    head: ResponseHead, choices: Sequence[ChoiceBody], usage: Usage, extras: Mapping[str, object]
) -> bytes:
    return encode(
        {
            **head.to_json(is_chunk=False),
            "choices": [choice.to_json(head.kind) for choice in choices],
            "usage": usage.to_json(),
            **extras,
        }
    )


class ChunkWriter:
    """The chunks of one choice. The first carries the role, beside content and never before it."""

    __slots__ = ("_end", "_first", "_open", "_plain_end")

    def __init__(self, head: ResponseHead, index: int, *, shows_usage: bool) -> None:
        opening = encode(head.to_json(is_chunk=True))[:-1]
        start = b"data: " + opening + b',"choices":[{"index":%d,' % index
        is_chat = head.kind == "chat"
        self._open = start + (b'"delta":{"content":' if is_chat else b'"text":')
        self._first = start + b'"delta":{"role":"assistant","content":' if is_chat else self._open
        self._end = b'},"logprobs":' if is_chat else b',"logprobs":'
        # With stream_options.include_usage every chunk but the last says usage null.
        closing = b',"usage":null}\n\n' if shows_usage else b"}\n\n"
        self._plain_end = self._end + b'null,"finish_reason":null}]' + closing

    def plain(self, text: str) -> bytes:
        """The chunk of almost every token."""
        opening, self._first = self._first, self._open
        return opening + encode(text) + self._plain_end

    def around(
        self,
        text: str,
        finish_reason: str | None,
        extras: Mapping[str, object],
        usage: Usage | None,
    ) -> tuple[bytes, bytes]:
        """A chunk without its log-probabilities: what comes before them, and after."""
        opening, self._first = self._first, self._open
        parts = [b',"finish_reason":', encode(finish_reason)]
        if extras:
            parts += [b",", encode(extras)[1:-1]]
        if usage is None:
            parts.append(self._plain_end[self._plain_end.rindex(b"}]") :])
        else:
            parts += [b'}],"usage":', encode(usage.to_json()), b"}\n\n"]
        return b"".join((opening, encode(text), self._end)), b"".join(parts)


def usage_chunk(head: ResponseHead, usage: Usage) -> bytes:
    """Never with choices: some clients read only one of the two."""
    body = {**head.to_json(is_chunk=True), "choices": [], "usage": usage.to_json()}
    return b"data: " + encode(body) + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """The end of a stream that broke: an event that the clients in use take for a failure."""
    return b"event: error\ndata: " + error.body() + b"\n\n" + DONE

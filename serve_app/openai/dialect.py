"""Bodies of other APIs that are served as chats, and the writers of their answers: the seam.

A dialect reads its body into the fields of a chat, which the checks of chats then see, and writes
the deltas of the one choice in its own shape. The queue, the engines, canaries, migration and the
metrics are those of chats.
"""

from __future__ import annotations

import re
from typing import ClassVar, Protocol

from serve_app.errors import ApiError
from serve_app.openai.chat import ChatRequest
from serve_app.openai.choice import ChoiceDelta
from serve_app.openai.json_body import TranslatedBody
from serve_app.openai.logprobs import Rendering
from serve_app.openai.responses import Json, ResponseHead, UsageInfo

Renames = tuple[tuple[re.Pattern[str], str], ...]


class DialectWriter(Protocol):
    """Writes the answer to a request of a dialect, as events or as a whole body."""

    def start(self, usage: UsageInfo) -> bytes:
        """Returns the events before the first delta."""

    def chunk(self, delta: ChoiceDelta, logprobs: Json | None = None) -> bytes:
        """Returns the events of a delta. `logprobs`: as in a chunk of a chat."""

    def end(self, usage: UsageInfo, num_reasoning_tokens: int) -> bytes:
        """Returns the events after the last delta."""

    def body(self, usage: UsageInfo, num_reasoning_tokens: int) -> bytes:
        """Returns the whole body, after all deltas."""

    def failure(self, error: ApiError) -> bytes:
        """Returns the end of a stream that failed."""


class DialectRequest(TranslatedBody, ChatRequest):
    """A chat that came as a body of another API."""

    id_prefix: ClassVar[str]
    renames: ClassVar[Renames]  # the beginnings of chat fields, and their names in the dialect

    def new_writer(self, head: ResponseHead) -> DialectWriter:
        raise NotImplementedError

    @classmethod
    def renamed(cls, error: ApiError) -> ApiError:
        if error.param is None:
            return error
        status, message, kind, param, *others = error.args
        return ApiError(status, cls._rename(message), kind, cls._rename(param), *others)

    @classmethod
    def _rename(cls, text: str) -> str:
        for pattern, name in cls.renames:
            text, count = pattern.subn(name, text, count=1)
            if count:
                return text
        return text


def rendered_chunk(
    writer: DialectWriter, opening: bytes, delta: ChoiceDelta, logprobs: Rendering[Json | None]
) -> Rendering[bytes]:
    """Renders a delta with log-probabilities after `opening`. A writer needs its deltas in order,
    so either all chunks of an answer are rendered or none."""
    return opening + writer.chunk(delta, (yield from logprobs))

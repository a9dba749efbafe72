"""Bodies of other APIs that are served as chats, and the writers of their answers: the seam.

A dialect reads its body into the fields of a chat, which the checks of chats then see, and writes
the deltas of the one choice in its own shape. The queue, the engines, canaries, migration and the
metrics are those of chats.
"""

from __future__ import annotations

import re
from typing import ClassVar, Literal

from serve_app.errors import ApiError
from serve_app.openai.chat import ChatRequest
from serve_app.openai.choice import ChoiceDelta, ToolCallDelta
from serve_app.openai.json_body import TranslatedBody
from serve_app.openai.logprobs import Rendering
from serve_app.openai.responses import Json, ResponseHead, UsageInfo, encode

BlockKind = Literal["text", "reasoning", "call"]
Renames = tuple[tuple[re.Pattern[str], str], ...]


class DialectWriter:
    """Writes the answer to a request of a dialect, as events or as a whole body.

    A delta of a chat has text, reasoning and calls side by side; a dialect opens a block, adds to
    it and closes it. Space between two blocks belongs to neither and is left out. A dialect
    implements the methods that raise NotImplementedError.
    """

    def __init__(self, head: ResponseHead) -> None:
        self.head = head
        self.blocks: list[Json] = []  # that have been closed
        self.texts: list[str] = []  # of the open block
        self.has_calls = False
        self.last: ChoiceDelta | None = None  # the delta that ended the choice
        self._kind: BlockKind | None = None  # of the open block
        self._space = ""  # that may begin a text
        self._space_logprobs: list[Json] = []

    @property
    def is_cut(self) -> bool:
        """Returns True if the limit of tokens ended the choice."""
        return self.last is not None and self.last.finish_reason == "length"

    def chunk(self, delta: ChoiceDelta, logprobs: Json | None = None) -> bytes:
        """Returns the events of a delta. `logprobs`: as in a chunk of a chat."""
        parts: list[bytes] = []
        if delta.reasoning:
            if self._kind != "reasoning":
                self._begin("reasoning", parts)
            parts.append(self.added("reasoning", delta.reasoning, []))
        if delta.text:
            self._add_text(delta.text, logprobs, parts)
        for call in delta.tool_calls:
            if call.id is not None or self._kind != "call":
                self._begin("call", parts, call)
            if call.arguments:
                parts.append(self.added("call", call.arguments, []))
        if delta.finish_reason is not None:
            self.last = delta
        return b"".join(parts)

    def finish(self, *, needs_text: bool) -> bytes:
        """Returns the end of the last block. `needs_text`: an empty answer has an empty text."""
        parts: list[bytes] = []
        if self._kind is None and (needs_text or self._space):
            self._begin("text", parts)
            if self._space:
                parts.append(self.added("text", self._space, self._space_logprobs))
        if self._kind is not None:
            parts.append(self.closed(self._kind))
        return b"".join(parts)

    def _add_text(self, text: str, logprobs: Json | None, parts: list[bytes]) -> None:
        given = [] if logprobs is None else [logprobs]
        if self._kind != "text":
            text = self._space + text
            given = self._space_logprobs + given
            self._space, self._space_logprobs = "", []
            if text.isspace():
                self._space, self._space_logprobs = text, given
                return
            self._begin("text", parts)
        parts.append(self.added("text", text, given))

    def _begin(
        self, kind: BlockKind, parts: list[bytes], call: ToolCallDelta | None = None
    ) -> None:
        if self._kind is not None:
            parts.append(self.closed(self._kind))
        if kind != "text":
            self._space, self._space_logprobs = "", []
        self._kind, self.texts = kind, []
        self.has_calls |= kind == "call"
        parts.append(self.opened(kind, call))

    def opened(self, kind: BlockKind, call: ToolCallDelta | None) -> bytes:
        """Returns the events that open a block."""
        raise NotImplementedError

    def added(self, kind: BlockKind, text: str, logprobs: list[Json]) -> bytes:
        """Adds to `texts`. Returns the event of the addition."""
        raise NotImplementedError

    def closed(self, kind: BlockKind) -> bytes:
        """Adds the open block to `blocks`. Returns the events that close it."""
        raise NotImplementedError

    def start(self, usage: UsageInfo) -> bytes:
        """Returns the events before the first delta."""
        raise NotImplementedError

    def end(self, usage: UsageInfo, num_reasoning_tokens: int) -> bytes:
        """Returns the events after the last delta."""
        raise NotImplementedError

    def body(self, usage: UsageInfo, num_reasoning_tokens: int) -> bytes:
        """Returns the whole body, after all deltas."""
        raise NotImplementedError

    def failure(self, error: ApiError) -> bytes:
        """Returns the end of a stream that failed."""
        raise NotImplementedError


class DialectRequest(TranslatedBody, ChatRequest):
    """A chat that came as a body of another API."""

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


def event(name: str, fields: Json) -> bytes:
    """Returns a server-sent event; its data repeat the name as `type`."""
    data = encode({"type": name, **fields})
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)

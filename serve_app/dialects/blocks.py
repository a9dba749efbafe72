"""The blocks of an answer that all dialects write: reasoning, text and calls, in their order.

A delta of a chat has text, reasoning and calls side by side; a dialect opens a block, adds to it
and closes it. Space between two blocks belongs to neither and is left out.
"""

from __future__ import annotations

from typing import Literal

from serve_app.openai.choice import ChoiceDelta, ToolCallDelta
from serve_app.openai.responses import Json, encode

BlockKind = Literal["text", "reasoning", "call"]


def event(name: str, fields: Json) -> bytes:
    """Returns a server-sent event; its data repeat the name as `type`."""
    data = encode({"type": name, **fields})
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


class BlockWriter:
    """Divides deltas into blocks; a dialect implements the three methods at the end."""

    def __init__(self) -> None:
        self.num_blocks = 0  # begun so far
        self.has_calls = False
        self.last: ChoiceDelta | None = None  # the delta that ended the choice
        self._kind: BlockKind | None = None  # of the open block
        self._space = ""  # that may begin a text
        self._space_logprobs: list[Json] = []

    def chunk(self, delta: ChoiceDelta, logprobs: Json | None = None) -> bytes:
        parts: list[bytes] = []
        if delta.reasoning:
            self._continue("reasoning", parts)
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
        if not self.num_blocks and (needs_text or self._space):
            self._begin("text", parts)
            if self._space:
                parts.append(self.added("text", self._space, self._space_logprobs))
        if self._kind is not None:
            is_cut = self.last is not None and self.last.finish_reason == "length"
            parts.append(self.closed(self._kind, is_cut=is_cut))
            self._kind = None
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

    def _continue(self, kind: BlockKind, parts: list[bytes]) -> None:
        if self._kind != kind:
            self._begin(kind, parts)

    def _begin(
        self, kind: BlockKind, parts: list[bytes], call: ToolCallDelta | None = None
    ) -> None:
        if self._kind is not None:
            parts.append(self.closed(self._kind, is_cut=False))
        if kind != "text":
            self._space, self._space_logprobs = "", []
        self._kind = kind
        self.has_calls |= kind == "call"
        parts.append(self.opened(kind, call))
        self.num_blocks += 1

    def opened(self, kind: BlockKind, call: ToolCallDelta | None) -> bytes:
        """Returns the events that open block number `num_blocks`."""
        raise NotImplementedError

    def added(self, kind: BlockKind, text: str, logprobs: list[Json]) -> bytes:
        """Returns the event of an addition to the open block."""
        raise NotImplementedError

    def closed(self, kind: BlockKind, *, is_cut: bool) -> bytes:
        """Returns the events that close the open block; `is_cut` by the limit of tokens."""
        raise NotImplementedError

"""Incremental detokenization, one token at a time, and stop strings.

Pure state machines, independent of HTTP and of requests. A character is given out when its last
byte has arrived, and U+FFFD only if no later byte could complete the character. The prompt is never
read, so it cannot leak into the output.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

# A run of byte tokens is decoded as a whole (one bad byte invalidates all of it, as in the
# library), but a text of byte tokens only must not be held back until its end: beyond this many
# bytes, characters are given out as they complete.
MAX_HELD_BYTES = 16

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class ByteDetokenizer:
    """Byte-level BPE: every token is a byte string, and the text is their UTF-8 decoding."""

    __slots__ = ("_decoder", "_token_bytes")

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        """`token_bytes[id]` is empty for a token without text; ids beyond the table have none."""
        self._token_bytes = token_bytes
        self._decoder = _Utf8Decoder("replace")

    def push(self, token_id: int) -> str:
        """Returns the text that this token completes: often its own, sometimes none."""
        try:
            return self._decoder.decode(self._token_bytes[token_id])
        except IndexError:  # a model may have more rows than its tokenizer has tokens
            return ""

    def finish(self) -> str:
        """Returns the text that was held back, with U+FFFD for incomplete characters. Call once, at
        the end."""
        return self._decoder.decode(b"", True)


class PieceDetokenizer:
    """SentencePiece with byte fallback: pieces of text, with runs of single-byte tokens in between.

    `pieces[id]` is text, an int for a byte token, or None for a token without text.
    """

    __slots__ = ("_decoder", "_pieces", "_run", "_strip")

    def __init__(self, pieces: Sequence[str | int | None], num_strip: int) -> None:
        """`num_strip` leading spaces are an artefact of the tokenizer and dropped."""
        self._pieces = pieces
        self._strip = num_strip
        self._run = bytearray()
        self._decoder: codecs.IncrementalDecoder | None = None  # set during an overlong run

    def push(self, token_id: int) -> str:
        piece = self._pieces[token_id] if token_id < len(self._pieces) else None
        if piece is None:
            return ""
        if isinstance(piece, int):
            return self._push_byte(piece)
        text = self._end_run() + piece
        return self._stripped(text) if self._strip else text

    def finish(self) -> str:
        return self._stripped(self._end_run())

    def _push_byte(self, byte: int) -> str:
        if self._decoder is not None:
            return self._decoder.decode(bytes((byte,)))
        self._run.append(byte)
        if len(self._run) <= MAX_HELD_BYTES:
            return ""
        self._decoder = _Utf8Decoder("replace")
        text = self._decoder.decode(bytes(self._run))
        self._run.clear()
        return self._stripped(text)

    def _end_run(self) -> str:
        if self._decoder is not None:
            text = self._decoder.decode(b"", True)
            self._decoder = None
            return text
        if not self._run:
            return ""
        run = bytes(self._run)
        self._run.clear()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(run)

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if text[0] != " ":
                self._strip = 0
                break
            text = text[1:]
            self._strip -= 1
        return text


Detokenizer = ByteDetokenizer | PieceDetokenizer


@dataclass(frozen=True, slots=True)
class StopTable:
    """An Aho-Corasick automaton over a request's stop strings, shared by its choices.

    A state stands for the longest suffix of the text that is a prefix of some stop string; its
    depth is the number of characters to hold back. One look-up per character for any number of
    strings.
    """

    children: tuple[dict[str, int], ...]
    fallback: tuple[int, ...]
    depth: tuple[int, ...]
    match: tuple[str | None, ...]  # the longest stop string that ends in this state


def build_stop_table(stops: Sequence[str]) -> StopTable:
    children: list[dict[str, int]] = [{}]
    depth = [0]
    match: list[str | None] = [None]
    for stop in stops:
        state = 0
        for character in stop:
            if character not in children[state]:
                children[state][character] = len(children)
                children.append({})
                depth.append(depth[state] + 1)
                match.append(None)
            state = children[state][character]
        match[state] = stop
    fallback = [0] * len(children)
    queue = list(children[0].values())
    for state in queue:  # breadth first: a fallback is shorter, hence already computed
        for character, child in children[state].items():
            queue.append(child)
            candidate = fallback[state]
            while candidate and character not in children[candidate]:
                candidate = fallback[candidate]
            fallback[child] = children[candidate].get(character, 0)
            match[child] = match[child] or match[fallback[child]]
    return StopTable(tuple(children), tuple(fallback), tuple(depth), tuple(match))


class StopMatcher:
    """Cuts the text at the first stop string to be completed, at the longest if several end there.

    The result depends on the text alone, never on its division into tokens. A possible beginning of
    a stop string is held back until the text rules the string out.
    """

    __slots__ = ("_held", "_include", "_state", "_table", "stop")

    def __init__(self, table: StopTable, *, include_stop: bool) -> None:
        self._table = table
        self._include = include_stop
        self._state = 0
        self._held = ""
        self.stop: str | None = None  # the string that ended the text

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """Returns the text that can be given out now. If `may_stop` is false, a stop string that
        ends in `text` is ordinary text."""
        table, state = self._table, self._state
        for index, character in enumerate(text):
            children = table.children[state]
            while state and character not in children:
                state = table.fallback[state]
                children = table.children[state]
            state = children.get(character, 0)
            match = table.match[state]
            if match is not None and may_stop:
                self.stop = match
                end = len(self._held) + index + 1
                whole = self._held + text
                self._held = ""
                return whole[: end if self._include else end - len(match)]
        self._state = state
        whole = self._held + text
        num_free = len(whole) - table.depth[state]
        self._held = whole[num_free:]
        return whole[:num_free]

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held

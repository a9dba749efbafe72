"""A strict client of an OpenAI event stream: a stream that closes without a finish reason for each
choice and `[DONE]` has failed, even if the connection closes cleanly.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from serve_app.cli.commands.client import ErrorText


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: ErrorText | None = None


class IncompleteStreamError(Exception):
    """The answer is not complete; the message has the reason."""


@dataclass(slots=True)
class StreamReader:
    """Parses a stream line by line; `finish` raises unless the answer was complete."""

    finish_reason: str | None = None
    is_done: bool = False
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def read(self, line: str) -> str:
        """Returns the text that a line adds."""
        if not line.startswith("data:"):
            return ""
        data = line[5:].strip()
        if data == "[DONE]":
            self.is_done = True
            return ""
        try:
            chunk = msgspec.json.decode(data, type=_Chunk)
        except msgspec.DecodeError as error:
            raise IncompleteStreamError(f"an event is no chat chunk: {error}") from error
        if chunk.error is not None:
            raise IncompleteStreamError(f"the server reports: {chunk.error.message}")
        if chunk.usage is not None:
            self.prompt_tokens = chunk.usage.prompt_tokens
            self.completion_tokens = chunk.usage.completion_tokens
        text = ""
        for choice in chunk.choices:
            self.finish_reason = choice.finish_reason or self.finish_reason
            if choice.delta is not None and choice.delta.content:
                text += choice.delta.content
        return text

    def finish(self) -> None:
        if self.finish_reason is None:
            raise IncompleteStreamError("the stream was cut: it closed without a finish reason")
        if self.finish_reason == "error":
            raise IncompleteStreamError("the server ended the answer with an error")
        if not self.is_done:
            raise IncompleteStreamError("the stream was cut: it closed without [DONE]")

"""One choice on its way to the client: token ids in, text, logprobs and the end of it out.

A pure state machine, fed with the engine's outputs in order. It owns what the engine cannot know:
stop strings, and characters that span tokens. A replayed output (same offset) is ignored, so a
request may be moved to another engine in the middle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.types import NOT_FINITE, TokenLogprobs, TokenOutput
from serve_app.errors import EngineFailureError, NonFiniteError, ServiceUnavailableError
from serve_app.text.detokenize import Detokenizer, StopMatcher, StopTable

StopReason = str | int | None
EndReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class ChoiceRules:
    """What all choices of a request share."""

    stop_table: StopTable | None = None
    include_stop: bool = False
    min_tokens: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    has_no_output: bool = False  # echo with max_tokens 0: the engine's one token is left out


@dataclass(slots=True)
class Delta:
    """What a step adds to one choice. A plain dataclass: one is made per chunk, 0.3 us each."""

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[tuple[TokenLogprobs, int], ...] = ()  # with the offset in the output's text
    finish_reason: EndReason | None = None
    stop_reason: StopReason = None


class ChoiceState:
    __slots__ = (
        "_detokenizer",
        "_ids",
        "_logprobs",
        "_matcher",
        "_num_chars",
        "_rules",
        "is_done",
        "num_tokens",
        "stopped_by_text",
    )

    def __init__(self, rules: ChoiceRules, detokenizer: Detokenizer) -> None:
        self._rules = rules
        self._detokenizer = detokenizer
        table = rules.stop_table
        self._matcher = (
            None if table is None else StopMatcher(table, include_stop=rules.include_stop)
        )
        self._num_chars = 0  # of the text decoded, given out or held
        self._ids: list[int] = []  # not yet given out
        self._logprobs: list[tuple[TokenLogprobs, int]] = []
        self.num_tokens = 0
        self.is_done = False
        self.stopped_by_text = False  # the engine does not know yet: abort the choice there

    def feed(self, output: TokenOutput) -> Delta | None:
        """None: nothing to give out yet."""
        if self.is_done:
            return None
        if output.finish_reason == "error":
            kind = NonFiniteError if output.error == NOT_FINITE else EngineFailureError
            raise kind(output.error or "the engine failed on this choice")
        if output.finish_reason == "abort":
            raise ServiceUnavailableError("The engine gave this request up; try again.")
        token_ids = output.token_ids
        num_known = self.num_tokens - output.offset
        if num_known < 0:
            raise EngineFailureError(f"{-num_known} tokens of a choice were lost")
        if self._rules.has_no_output:
            self.is_done = True
            return Delta("", finish_reason="length")
        text = ""
        last = len(token_ids) - 1
        for index in range(num_known, len(token_ids)):
            token_id = token_ids[index]
            self.num_tokens += 1
            self._ids.append(token_id)
            if output.logprobs:
                self._logprobs.append((output.logprobs[index], self._num_chars))
            if index == last and self._is_terminator(output, token_id):
                break
            text += self._push(self._detokenizer.push(token_id))
            if self._matcher is not None and self._matcher.stop is not None:
                return self._end(text, "stop", self._matcher.stop, output)
        if output.finish_reason is None:
            return self._delta(text) if text else None
        text += self._push(self._detokenizer.finish())
        if self._matcher is not None:
            if self._matcher.stop is not None:
                return self._end(text, "stop", self._matcher.stop, output)
            text += self._matcher.finish()
        return self._end(text, output.finish_reason, output.stop_token_id, output)

    def _is_terminator(self, output: TokenOutput, token_id: int) -> bool:
        """The token that ended the choice is no text, unless asked for."""
        if output.finish_reason != "stop" or self._rules.include_stop:
            return False
        return token_id == output.stop_token_id or token_id in self._rules.eos_token_ids

    def _push(self, text: str) -> str:
        self._num_chars += len(text)
        if self._matcher is None or not text:
            return text
        return self._matcher.push(text, may_stop=self.num_tokens > self._rules.min_tokens)

    def _delta(self, text: str) -> Delta:
        delta = Delta(text, tuple(self._ids), tuple(self._logprobs))
        self._ids.clear()
        self._logprobs.clear()
        return delta

    def _end(
        self, text: str, reason: EndReason, stop_reason: StopReason, output: TokenOutput
    ) -> Delta:
        self.is_done = True
        self.stopped_by_text = output.finish_reason is None
        delta = self._delta(text)
        delta.finish_reason = reason
        delta.stop_reason = stop_reason
        return delta

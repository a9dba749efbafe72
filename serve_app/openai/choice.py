"""The state of a choice: token ids in; text, log-probabilities and the end of the choice out.

A pure state machine, fed with the engine's outputs in order. It owns two things that the engine
cannot see: stop strings, and characters that span tokens. An output that repeats an offset is
ignored, so a request may migrate to another engine in the middle.
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
    """The settings that all choices of a request share."""

    stop_table: StopTable | None = None
    include_stop: bool = False
    min_tokens: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    has_no_output: bool = False  # echo with max_tokens 0: the engine's one token is left out


@dataclass(slots=True)
class ChoiceDelta:
    """The addition to a choice since its last chunk. Not frozen: made once per chunk, in 0.3 us."""

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[tuple[TokenLogprobs, int], ...] = ()  # with the offset in the output's text
    finish_reason: EndReason | None = None
    stop_reason: StopReason = None


class ChoiceState:
    __slots__ = (
        "_detokenizer",
        "_matcher",
        "_num_chars",
        "_pending_ids",
        "_pending_logprobs",
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
        self._num_chars = 0  # decoded so far, given out or held back
        self._pending_ids: list[int] = []  # not given out yet
        self._pending_logprobs: list[tuple[TokenLogprobs, int]] = []
        self.num_tokens = 0
        self.is_done = False
        self.stopped_by_text = False  # the engine has not ended the choice: abort it there

    def feed(self, output: TokenOutput) -> ChoiceDelta | None:
        """Returns None while there is no text to give out.

        Raises EngineFailureError or ServiceUnavailableError if the engine ended the choice early.
        """
        if self.is_done:
            return None
        reason = output.finish_reason
        if reason == "error" or reason == "abort":
            raise _failure(output)
        num_known = self.num_tokens - output.offset
        if num_known < 0:
            raise EngineFailureError(f"{-num_known} tokens of a choice were lost")
        if self._rules.has_no_output:
            self.is_done = True
            return ChoiceDelta("", finish_reason="length")
        token_ids = output.token_ids
        text = ""
        last = len(token_ids) - 1
        for index in range(num_known, len(token_ids)):
            token_id = token_ids[index]
            self.num_tokens += 1
            self._pending_ids.append(token_id)
            if output.logprobs:
                self._pending_logprobs.append((output.logprobs[index], self._num_chars))
            if index == last and self._is_hidden_terminator(output, token_id):
                break
            text += self._match(self._detokenizer.push(token_id))
            if self._matcher is not None and self._matcher.stop is not None:
                return self._end(text, "stop", self._matcher.stop, output)
        if reason is not None:
            return self._finish(text, reason, output)
        return self._take_delta(text) if text else None

    def _finish(self, text: str, reason: EndReason, output: TokenOutput) -> ChoiceDelta:
        """Adds the text that was held back, which may still complete a stop string."""
        text += self._match(self._detokenizer.finish())
        if self._matcher is not None:
            if self._matcher.stop is not None:
                return self._end(text, "stop", self._matcher.stop, output)
            text += self._matcher.finish()
        return self._end(text, reason, output.stop_token_id, output)

    def _is_hidden_terminator(self, output: TokenOutput, token_id: int) -> bool:
        """Returns True for the token that ended the choice, which is no text unless requested."""
        if output.finish_reason != "stop" or self._rules.include_stop:
            return False
        return token_id == output.stop_token_id or token_id in self._rules.eos_token_ids

    def _match(self, text: str) -> str:
        """Returns the text that no stop string can claim any more."""
        self._num_chars += len(text)
        if self._matcher is None or not text:
            return text
        return self._matcher.push(text, may_stop=self.num_tokens > self._rules.min_tokens)

    def _take_delta(self, text: str) -> ChoiceDelta:
        delta = ChoiceDelta(text, tuple(self._pending_ids), tuple(self._pending_logprobs))
        self._pending_ids.clear()
        self._pending_logprobs.clear()
        return delta

    def _end(
        self, text: str, reason: EndReason, stop_reason: StopReason, output: TokenOutput
    ) -> ChoiceDelta:
        self.is_done = True
        self.stopped_by_text = output.finish_reason is None
        delta = self._take_delta(text)
        delta.finish_reason = reason
        delta.stop_reason = stop_reason
        return delta


def _failure(output: TokenOutput) -> Exception:
    if output.finish_reason == "abort":
        return ServiceUnavailableError("The engine aborted this request; send it again.")
    kind = NonFiniteError if output.error == NOT_FINITE else EngineFailureError
    return kind(output.error or "the engine failed on this choice")

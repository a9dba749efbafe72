"""The state of a choice: token ids in; text, log-probabilities and the end of the choice out.

A pure state machine, fed with the engine's outputs in order. It owns two things that the engine
cannot see: stop strings, and characters that span tokens. An output that repeats an offset is
ignored, so a request may migrate to another engine in the middle.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal
from uuid import uuid4

from engine.errors import GRAMMAR_ERRORS, InvalidRequestError
from engine.types import NOT_FINITE, TokenLogprobs, TokenOutput
from serve_app.errors import EngineFailureError, NonFiniteError, ServiceUnavailableError
from serve_app.text.detokenize import Detokenizer, StopMatcher, StopTable
from serve_app.text.regions import Piece, RegionParser
from serve_app.text.response_template import ResponseTemplate

StopReason = str | int | None
EndReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class RegionRules:
    """The settings of the regions of a request's choices."""

    template: ResponseTemplate
    turn_start: str  # the part of the answer that the prompt has begun
    schemas: Mapping[str, Mapping[str, object]]  # the parameters of the tools, by their names
    markers: Mapping[int, str]  # special tokens that delimit regions
    is_named: bool = False  # the client named the tool: the choice ends with "stop"
    has_reasoning: bool = True  # False leaves the reasoning out
    is_constrained: bool = False  # the content, once begun, is the rest of the answer


class MarkerDetokenizer:
    """A detokenizer that gives out the special tokens that delimit regions, and no others."""

    __slots__ = ("_detokenizer", "_markers")

    def __init__(self, detokenizer: Detokenizer, markers: Mapping[int, str]) -> None:
        self._detokenizer = detokenizer
        self._markers = markers

    def push(self, token_id: int) -> str:
        text = self._detokenizer.push(token_id)
        marker = self._markers.get(token_id)
        return text if marker is None else (text.removesuffix(marker) + marker)

    def finish(self) -> str:
        return self._detokenizer.finish()


@dataclass(frozen=True, slots=True)
class ChoiceRules:
    """The settings that all choices of a request share."""

    stop_table: StopTable | None = None
    include_stop: bool = False
    min_tokens: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    has_no_output: bool = False  # echo with max_tokens 0: the engine's one token is left out

    grammar_field: str | None = None  # of the body; errors of the grammar name it

    # Set if the text is divided into regions: a template of the model, and the tools' parameters.
    regions: RegionRules | None = None

    def new_state(self, detokenizer: Detokenizer) -> ChoiceState:
        table, include = self.stop_table, self.include_stop
        matcher = None if table is None else StopMatcher(table, include_stop=include)
        rules = self.regions
        if rules is None:
            return ChoiceState(self, detokenizer, matcher)
        shown = MarkerDetokenizer(detokenizer, rules.markers)
        parser = RegionParser(
            rules.template, rules.turn_start, rules.schemas, is_constrained=rules.is_constrained
        )
        return RegionChoiceState(self, shown, matcher, _regions=parser)


@dataclass(slots=True)
class ToolCallDelta:
    """The addition to one tool call of a choice, in the fields of OpenAI's chunks."""

    index: int
    id: str | None = None  # with the first delta of the call, as the name
    name: str | None = None
    arguments: str = ""  # the next characters of a JSON text


@dataclass(slots=True)
class ChoiceDelta:
    """The addition to a choice since its last chunk. Not frozen: made once per chunk, in 0.3 us."""

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[tuple[TokenLogprobs, int], ...] = ()  # with the offset in the output's text
    finish_reason: EndReason | None = None
    stop_reason: StopReason = None
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


@dataclass(slots=True, eq=False)
class ChoiceState:
    _rules: ChoiceRules
    _detokenizer: Detokenizer | MarkerDetokenizer
    _matcher: StopMatcher | None
    _num_chars: int = 0  # decoded so far, given out or held back
    _pending_ids: list[int] = field(default_factory=list)  # not given out yet
    _pending_logprobs: list[tuple[TokenLogprobs, int]] = field(default_factory=list)
    num_tokens: int = 0
    num_reasoning_tokens: int = 0
    is_done: bool = False
    stopped_by_text: bool = False  # the engine has not ended the choice: abort it there

    def feed(self, output: TokenOutput) -> ChoiceDelta | None:
        """Returns None while there is no text to give out.

        Raises EngineFailureError or ServiceUnavailableError if the engine ended the choice early,
        and InvalidRequestError if it did so for the request's grammar.
        """
        if self.is_done:
            return None
        reason = output.finish_reason
        if reason == "error" or reason == "abort":
            raise _failure(output, self._rules.grammar_field)
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
        return self._take_delta(text) if text else self._take_other()

    def _take_other(self) -> ChoiceDelta | None:
        """Returns a delta without text if something else is due."""
        return None

    def _decode_rest(self, reason: EndReason) -> str:
        return self._match(self._detokenizer.finish())

    def _finish(self, text: str, reason: EndReason, output: TokenOutput) -> ChoiceDelta:
        """Adds the text that was held back, which may still complete a stop string."""
        text += self._decode_rest(reason)
        if self._matcher is not None:
            if self._matcher.stop is not None:
                return self._end(text, "stop", self._matcher.stop, output)
            text += self._matcher.finish()
        # An adapter's own end of text is a stop token for the engine only.
        stop = None if output.stop_token_id in self._rules.eos_token_ids else output.stop_token_id
        return self._end(text, reason, stop, output)

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


@dataclass(slots=True, eq=False)
class RegionChoiceState(ChoiceState):
    """A choice whose text is divided into content, reasoning and tool calls. Stop strings are
    looked for in the content."""

    _regions: RegionParser = field(kw_only=True)
    _reasoning: str = ""
    _calls: list[ToolCallDelta] = field(default_factory=list)
    _num_calls: int = 0

    def _match(self, text: str) -> str:
        content = self._sort(self._regions.push(text)) if text else ""
        self.num_reasoning_tokens += self._regions.is_reasoning
        return content

    def _decode_rest(self, reason: EndReason) -> str:
        # Not `super()`: a dataclass with slots is another class than the one that is compiled here.
        text = ChoiceState._decode_rest(self, reason)
        return text + self._sort(self._regions.finish(is_cut=reason == "length"))

    def _sort(self, pieces: list[Piece]) -> str:
        """Returns the content that can be given out, and keeps everything else."""
        rules = self._rules.regions
        assert rules is not None
        text = ""
        for piece in pieces:
            if rules.has_reasoning:
                self._reasoning += piece.reasoning
            for name, arguments, own_id in piece.calls:
                self._add_call(name, arguments, own_id, is_short=rules.template.short_ids)
            if piece.content and (self._matcher is None or self._matcher.stop is None):
                text += ChoiceState._match(self, _without(rules.markers, piece.content))
        return text

    def _add_call(
        self, name: str, arguments: dict[str, object] | str, own_id: str | None, *, is_short: bool
    ) -> None:
        key = uuid4().hex
        call_id = own_id or (key[:9] if is_short else f"call_{key[:24]}")
        encoded = arguments
        if not isinstance(encoded, str):
            encoded = json.dumps(arguments, ensure_ascii=False)
        self._calls.append(ToolCallDelta(self._num_calls, call_id, name, encoded))
        self._num_calls += 1

    def _take_other(self) -> ChoiceDelta | None:
        return self._take_delta("") if self._reasoning or self._calls else None

    def _take_delta(self, text: str) -> ChoiceDelta:
        delta = ChoiceState._take_delta(self, text)
        delta.reasoning, delta.tool_calls = self._reasoning, tuple(self._calls)
        self._reasoning = ""
        self._calls.clear()
        return delta

    def _end(
        self, text: str, reason: EndReason, stop_reason: StopReason, output: TokenOutput
    ) -> ChoiceDelta:
        rules = self._rules.regions
        assert rules is not None
        if reason == "stop" and self._num_calls and not rules.is_named:
            reason = "tool_calls"
        return ChoiceState._end(self, text, reason, stop_reason, output)


def _without(markers: Mapping[int, str], text: str) -> str:
    """Removes special tokens that delimited no region."""
    for marker in markers.values():
        if marker in text:
            text = text.replace(marker, "")
    return text


def _failure(output: TokenOutput, grammar_field: str | None) -> Exception:
    if output.finish_reason == "abort":
        return ServiceUnavailableError("The engine aborted this request; send it again.")
    if output.error is not None and output.error.startswith(GRAMMAR_ERRORS):
        return InvalidRequestError(f"{grammar_field}: {output.error}", grammar_field)
    kind = NonFiniteError if output.error == NOT_FINITE else EngineFailureError
    return kind(output.error or "the engine failed on this choice")

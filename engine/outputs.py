"""The outputs of a step: the drawn tokens, the tokens that a grammar forces after them, the ending.

Forced tokens are output like any other: they count, they can end the choice, and the next step
computes them like a part of a prompt. They are exactly the tokens that masks would leave alone one
by one, hence switching them off changes the number of steps and nothing else. Free of tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as ListLike
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from engine.stopping import Ending, ending
from engine.types import Sample, ScheduledSequence, Sequence, TokenLogprobs, TokenOutput


class NewTokens(NamedTuple):
    """The output tokens [offset, stop) of a choice, which a step has added."""

    sequence: Sequence
    offset: int
    stop: int
    draws: ListLike[Sample]  # one per token, if log-probabilities are requested
    end: Ending | None

    def output(self) -> TokenOutput:
        """Clears the queue time and the engine's time of the choice."""
        sequence, offset, stop, draws, end = self
        first = sequence.num_prompt_tokens
        token_ids = tuple(sequence.token_ids[first + offset : first + stop])
        queued_s, sequence.queued_s = sequence.queued_s, 0.0
        engine_s, sequence.engine_s = sequence.engine_s, 0.0
        has_logprobs = sequence.request.params.logprobs is not None
        return TokenOutput(
            sequence.request.request_id,
            sequence.choice,
            offset,
            token_ids,
            logprobs=_logprobs(draws, token_ids) if has_logprobs else (),
            prompt_logprobs=tuple(sequence.prompt_logprobs) if offset == 0 else (),
            finish_reason=end.reason if end else None,
            stop_token_id=end.stop_token_id if end else None,
            num_cached_tokens=sequence.num_cached_tokens,
            queued_s=queued_s,
            engine_s=engine_s,
        )


class Left(NamedTuple):
    """A choice that has ended without a token."""

    sequence: Sequence
    end: Ending
    error: str | None

    def output(self) -> TokenOutput:
        sequence = self.sequence
        return TokenOutput(
            sequence.request.request_id,
            sequence.choice,
            sequence.num_output_tokens,
            (),
            finish_reason=self.end.reason,
            num_cached_tokens=sequence.num_cached_tokens,
            error=self.error,
            engine_s=sequence.engine_s,
        )


def kept_draws(item: ScheduledSequence, sample: Sample) -> tuple[Sample, ...]:
    """Returns the draws that a step without a draft would have made: the first one, and each one
    after a token of the draft that equals its own draw. A draw is a function of (seed, choice,
    position) and the tokens before it, hence comparing them is exact at any temperature. A row that
    is not finite ends them; the next step meets it again."""
    draws = [sample]
    for token_id, draw in zip(item.draft, sample.after_draft, strict=False):
        if draws[-1].token_id != token_id or not draw.is_finite:
            break
        draws.append(draw)
    return tuple(draws)


def add_tokens(
    sequence: Sequence,
    drawn: ListLike[int],
    eos_token_ids: AbstractSet[int],
    max_model_len: int,
    *,
    can_force: bool,
) -> Ending | str | None:
    """Appends drawn tokens, and those that a grammar forces after them, up to the ending.

    Returns the ending, if any, or the reason if the grammar cannot be followed: nothing is appended
    then. An answer that is complete ends with "stop", without a step for the end-of-sequence token.
    """
    params = sequence.request.params
    if params.max_tokens == 0:  # only the prompt was requested
        return ending(sequence, eos_token_ids, max_model_len)
    state = sequence.grammar_state
    if state is None and not params.stop_token_ids and eos_token_ids.isdisjoint(drawn):
        # The usual case, in a part of the time.
        num_tokens = len(sequence.token_ids) + len(drawn)
        num_output = num_tokens - sequence.num_prompt_tokens
        if num_tokens < max_model_len and num_output < params.max_tokens:
            sequence.token_ids += drawn
            return None
    end = None
    for index, token_id in enumerate(drawn):
        if index and state is not None and not state.allows(token_id):
            return None  # its mask failed, of a copy of the state: the next step's fails, too
        error = None if state is None else state.advance(token_id)
        if error is not None:
            return None if index else error  # the next step fails with the same reason
        sequence.token_ids.append(token_id)
        end = ending(sequence, eos_token_ids, max_model_len)
        if end is not None and (state is None or end.reason == "stop"):
            return end
        if state is not None and state.is_complete:
            return Ending("stop")
    if state is None:
        return None
    # Log-probabilities come from the draw of each token.
    forced = []
    if can_force and params.logprobs is None:
        room = min(
            params.max_tokens - sequence.num_output_tokens,
            max_model_len - len(sequence.token_ids),
        )
        forced = state.take_forced(room)
    for token_id in forced:
        sequence.token_ids.append(token_id)
        end = ending(sequence, eos_token_ids, max_model_len)
        if end is not None and end.reason == "stop":
            return end
    return Ending("stop") if state.is_complete else end


def _logprobs(draws: Iterable[Sample], token_ids: tuple[int, ...]) -> tuple[TokenLogprobs, ...]:
    pairs = zip(draws, token_ids, strict=False)
    return tuple(draw.logprobs for draw, _ in pairs if draw.logprobs is not None)

"""The outputs of a step: a drawn token, the tokens that its grammar forces after it, the ending.

Forced tokens are output like any other: they count, they can end the choice, and the next step
computes them like a part of a prompt. They are exactly the tokens that masks would leave alone one
by one, hence switching them off changes the number of steps and nothing else. Free of tensors.
"""

from __future__ import annotations

from collections.abc import Collection

from engine.stopping import Ending, ending
from engine.types import Sample, Sequence, TokenOutput


def add_tokens(
    sequence: Sequence, token_id: int, eos_token_ids: Collection[int], max_model_len: int
) -> Ending | None:
    """Appends a drawn token without a grammar, and returns the ending, if any."""
    if sequence.request.params.max_tokens > 0:  # otherwise only the prompt was requested
        sequence.token_ids.append(token_id)
    return ending(sequence, eos_token_ids, max_model_len)


def add_grammar_tokens(
    sequence: Sequence,
    token_id: int,
    eos_token_ids: Collection[int],
    max_model_len: int,
    *,
    can_force: bool,
) -> Ending | str | None:
    """Appends a drawn token and the tokens that the grammar forces after it, up to the ending.

    Returns the ending, if any, or the reason if the grammar cannot be followed: nothing is appended
    then. An answer that is complete ends with "stop", without a step for the end-of-sequence token.
    """
    state, params = sequence.grammar_state, sequence.request.params
    assert state is not None
    if params.max_tokens == 0:
        return ending(sequence, eos_token_ids, max_model_len)
    error = state.advance(token_id)
    if error is not None:
        return error
    # Log-probabilities come from the draw of each token.
    forced = []
    if can_force and params.logprobs is None:
        room = min(
            params.max_tokens - sequence.num_output_tokens,
            max_model_len - len(sequence.token_ids),
        )
        forced = state.take_forced(room - 1)
    for token in (token_id, *forced):
        sequence.token_ids.append(token)
        end = ending(sequence, eos_token_ids, max_model_len)
        if end is not None and end.reason == "stop":
            return end
    return Ending("stop") if state.is_complete else end


def token_output(
    sequence: Sequence, offset: int, sample: Sample, end: Ending | None
) -> TokenOutput:
    """Returns the output of a step, from the output token at `offset` on. Clears the queue time and
    the engine's time."""
    token_ids = tuple(sequence.token_ids[sequence.num_prompt_tokens + offset :])
    queued_s, sequence.queued_s = sequence.queued_s, 0.0
    engine_s, sequence.engine_s = sequence.engine_s, 0.0
    return TokenOutput(
        sequence.request.request_id,
        sequence.choice,
        offset,
        token_ids,
        logprobs=(sample.logprobs,) if sample.logprobs is not None and token_ids else (),
        prompt_logprobs=tuple(sequence.prompt_logprobs) if offset == 0 else (),
        finish_reason=end.reason if end else None,
        stop_token_id=end.stop_token_id if end else None,
        num_cached_tokens=sequence.num_cached_tokens,
        queued_s=queued_s,
        engine_s=engine_s,
    )


def final_output(sequence: Sequence, end: Ending, error: str | None) -> TokenOutput:
    """Returns the output of a choice that ends without a token."""
    return TokenOutput(
        sequence.request.request_id,
        sequence.choice,
        sequence.num_output_tokens,
        (),
        finish_reason=end.reason,
        num_cached_tokens=sequence.num_cached_tokens,
        error=error,
        engine_s=sequence.engine_s,
    )

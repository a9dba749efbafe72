"""The end of a sequence by its own tokens, and the tokens that must not be drawn before.

Shared by the scheduler, which ends sequences, and the sampler, which masks. Stop strings are text
and therefore absent here. Free of tensors.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from engine.types import FinishReason, Sequence


@dataclass(frozen=True, slots=True)
class Ending:
    reason: FinishReason
    stop_token_id: int | None = None  # the stop id (not EOS) that ended it


def ending(sequence: Sequence, eos_token_ids: Collection[int], max_model_len: int) -> Ending | None:
    """Returns the ending, if any. Called after each token, and once after the prompt if no token is
    requested."""
    params = sequence.request.params
    num_output = sequence.num_output_tokens
    if num_output > params.min_tokens:
        token = sequence.token_ids[-1]
        if token in eos_token_ids and not params.ignore_eos:
            return Ending("stop")
        if token in params.stop_token_ids:
            return Ending("stop", token)
    if num_output >= params.max_tokens or len(sequence.token_ids) >= max_model_len:
        return Ending("length")
    return None


def banned_token_ids(
    sequence: Sequence, position: int, eos_token_ids: Collection[int]
) -> tuple[int, ...]:
    """Returns the tokens that the draw for `position` must exclude: all that would end the sequence
    before `min_tokens`."""
    params = sequence.request.params
    if position - sequence.num_prompt_tokens >= params.min_tokens:
        return ()
    banned = set(params.stop_token_ids)
    if not params.ignore_eos:
        banned.update(eos_token_ids)
    return tuple(sorted(banned))


def awaits_last(sequence: Sequence, max_model_len: int) -> bool:
    """Returns True if the token in flight is the last."""
    if not sequence.num_tokens_in_flight:
        return False
    most = sequence.num_prompt_tokens + sequence.request.params.max_tokens
    return sequence.num_tokens >= min(most, max_model_len)

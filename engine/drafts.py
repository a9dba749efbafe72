"""Drafts: the guessed next tokens of a sequence, and the seam for the drafters that guess them.

A step computes a draft with the newest token and draws after each of its tokens. The draws that a
step without it would have made are kept (`engine.outputs.kept_draws`), so a drafter changes the
number of steps and no token. Free of tensors.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from engine.types import Sequence


class Draft(NamedTuple):  # a tuple, as the parts of a step: the device waits for drafts
    token_ids: tuple[int, ...]  # the next tokens, one or more
    # The tokens before them on which the guess rests. The gate learns how often drafts of a length
    # are right; a drafter without such a measure gives always the same number.
    match_length: int


class Drafter(Protocol):
    def propose(self, sequence: Sequence, limit: int) -> Draft | None:
        """Guesses the tokens after `sequence.token_ids`, at most `limit` (1 or more). None: no
        guess. It may depend only on texts of the same adapter key and cache salt. Called once for
        each step of a sequence at most."""
        ...

    def learn(self) -> None:
        """Takes in the tokens of the sequences for which it was asked. Called after the launch of
        each step: the device waits for `propose`, and not for this."""
        ...

    def end(self, sequence: Sequence) -> None:
        """Notes that a sequence, for which it was asked before, gets no more tokens."""
        ...

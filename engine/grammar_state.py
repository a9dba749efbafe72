"""The place of a choice in its grammar: the masks of its next token, and its advance.

Everything here fails closed: a choice whose grammar cannot be followed any more ends with an error.
Free of tensors and of the compilation of grammars.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache

import numpy as np
from llguidance import LLExecutor, LLMatcher
from numpy.typing import NDArray

from engine.errors import ENDLESS_GRAMMAR, EXCEEDED_GRAMMAR

MAX_ERROR_CHARS = 500
# The words of llguidance where an answer needs more of the parser or the lexer than
# `LLParserLimits` allows. Its reasons to stop do not set them apart from a token that is refused.
_LIMIT = re.compile(
    r"Too many items \(limit \d+|Current row has \d+ items; max is \d+|too many states: \d+ >= \d+"
    r"|too many expressions constructed|fuel exhausted"
)
NO_EXTENSION = "NoExtensionBias"  # llguidance's word where no byte can follow
# Threads of llguidance's own; the others stay for the engine's thread and the device.
NUM_MASK_THREADS = max(1, min(32, len(os.sched_getaffinity(0)) * 4 // 5))


@cache
def _executor() -> LLExecutor:
    return LLExecutor(num_threads=NUM_MASK_THREADS)


@dataclass(slots=True, eq=False)
class Lane:
    """One compilation of a grammar. Its choices share a lexer behind a lock, so that their masks
    are computed one after another: with 256 choices in one, a step of an H200 lasted 19 ms more."""

    compiled: Future[LLMatcher]
    num_choices: int = 0
    compile_s: float = 0.0


def failure(matcher: LLMatcher) -> str:
    """Returns why the matcher cannot go on: a limit of the library, a dead end of the
    grammar, such as a rule of itself alone, or a fault of ours."""
    words = matcher.get_error().removesuffix("<non-verbose/>")
    reason = (" ".join(words.split()) or matcher.stop_reason())[:MAX_ERROR_CHARS]
    if _LIMIT.search(reason):
        return f"{EXCEEDED_GRAMMAR}{reason}"
    if reason == NO_EXTENSION:
        return f"{ENDLESS_GRAMMAR}no token may follow"
    return f"the grammar cannot be followed: {reason}"


class GrammarState:
    """The place of one choice in its grammar. Owned by the scheduler."""

    __slots__ = ("_lane", "_matcher", "_starts_after", "_stop_token_ids")

    def __init__(
        self,
        starts_after: int | None,
        lane: Lane | None = None,
        stop_token_ids: Sequence[int] = (),
    ) -> None:
        """`stop_token_ids`: may end the output where the end of the sequence may. An adapter that
        ends its texts with a token of its own was never trained to write its base's."""
        self._starts_after = starts_after  # as `Grammar.starts_after`; None once it was output
        self._stop_token_ids = tuple(stop_token_ids)
        self._lane = lane
        if lane is not None:
            lane.num_choices += 1
        self._matcher: LLMatcher | None = None  # None until it is compiled

    def __del__(self) -> None:
        if self._lane is not None:
            self._lane.num_choices -= 1

    @property
    def is_open(self) -> bool:
        return self._matcher is not None

    def open(self, matcher: LLMatcher) -> None:
        """Begins with a matcher of this choice's own, which has consumed the output so far."""
        self._matcher = matcher

    def advance(self, token_id: int) -> str | None:
        """Records a drawn token. Returns the reason if the grammar cannot be followed any more; the
        token is then no part of the output."""
        if self._starts_after is not None:
            if token_id == self._starts_after:
                self._starts_after = None
            return None
        matcher = self._matcher
        assert matcher is not None
        # After a failure, also of a mask, the matcher allows and takes the end of the sequence.
        if matcher.is_error():
            return failure(matcher)
        if token_id in self.ending_stop_ids and not matcher.validate_tokens([token_id]):
            return None  # it ends the output, and is no text of the grammar
        return None if matcher.consume_token(token_id) else failure(matcher)

    def allows(self, token_id: int) -> bool:
        """Returns False if the grammar refuses this token; nothing changes."""
        matcher = self._matcher
        if self._starts_after is not None or token_id in self.ending_stop_ids:
            return True
        assert matcher is not None
        return matcher.validate_tokens([token_id]) == 1

    def take_forced(self, limit: int) -> list[int]:
        """Records and returns the tokens that follow without a choice, at most `limit`. They are
        the tokens that masks would leave alone one by one."""
        forced: list[int] = []
        matcher = self._matcher
        if self._starts_after is not None or matcher is None:
            return forced
        while len(forced) < limit and (tokens := matcher.compute_ff_tokens()):
            tokens = tokens[: limit - len(forced)]
            if matcher.try_consume_tokens(tokens) != len(tokens):
                break  # the next token fails with the reason
            forced += tokens
        return forced

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """Returns how many of these tokens, which may come next, the grammar allows. While the
        output is free these are the tokens before the one that ends the freedom."""
        if self._starts_after is not None:
            ids = list(token_ids)
            return ids.index(self._starts_after) if self._starts_after in ids else len(ids)
        matcher = self._matcher
        assert matcher is not None
        return 0 if matcher.is_error() else matcher.validate_tokens(list(token_ids))

    def after(self, token_ids: Sequence[int]) -> GrammarState:
        """Returns the state after these tokens, all of them allowed; this one stays as it is."""
        assert self._matcher is not None
        matcher = self._matcher.deep_copy()
        matcher.consume_tokens(list(token_ids))
        state = GrammarState(None, None, self._stop_token_ids)
        state.open(matcher)
        return state

    @property
    def ending_stop_ids(self) -> tuple[int, ...]:
        """The stop tokens that may come next: all where the output may end, otherwise none."""
        if self._stop_token_ids and self._matcher is not None and self._matcher.is_accepting():
            return self._stop_token_ids
        return ()

    @property
    def is_constraining(self) -> bool:
        """Returns False while the output is free: before `Grammar.starts_after`."""
        return self._starts_after is None

    @property
    def is_complete(self) -> bool:
        """Returns True if only the end of the output can follow."""
        matcher = self._matcher
        return (
            self._starts_after is None
            and matcher is not None
            and matcher.is_stopped()
            and not matcher.is_error()
        )


def fill_masks(states: Sequence[GrammarState], masks: NDArray[np.int32]) -> None:
    """Writes the tokens that each choice may draw next, in threads and without the GIL.

    `masks`: [len(states), ceil(vocabulary / 32)], contiguous; bit i of word w stands for the token
    32 * w + i. Rows of choices that are free now allow all tokens. A row whose grammar fails gets
    the end-of-sequence tokens; the scheduler ends the choice with an error instead of its token.
    """
    assert masks.dtype == np.int32
    assert masks.flags["C_CONTIGUOUS"]
    assert masks.shape[0] == len(states)
    constraining = []
    for row, state in enumerate(states):
        if state.is_constraining:
            assert state._matcher is not None
            constraining.append((id(state._lane), row, state._matcher))
        else:
            masks[row] = -1
    if constraining:
        # The threads take neighbours: rows of one lane should not wait for each other in several.
        constraining.sort(key=lambda found: found[:2])
        work = [(matcher, row) for _, row, matcher in constraining]
        _executor().unsafe_compute_mask_ptr(
            work, masks.ctypes.data, masks.shape[1] * masks.itemsize, len(states)
        )
    words = masks.view(np.uint32)
    for row, state in enumerate(states):
        if state.is_constraining:
            for token_id in state.ending_stop_ids:
                words[row, token_id // 32] |= np.uint32(1 << token_id % 32)

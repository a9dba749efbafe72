"""Admission by grammar: a request waits for its compiled grammar without KV blocks.

Younger requests overtake it meanwhile. A grammar that is refused, and an output of an earlier
engine that is not of the grammar, end the choice with an error: never an unconstrained answer.
"""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from engine.errors import REFUSED_GRAMMAR, InvalidRequestError
from engine.grammar_state import GrammarState
from engine.grammars import Grammars
from engine.types import Sequence

_WAIT_S = 0.005  # commands to the engine wait as long at most


class GrammarGate:
    def __init__(self, grammars: Grammars | None) -> None:
        self._grammars = grammars
        self._opening: dict[Sequence, Future[Any]] = {}

    @property
    def is_waiting(self) -> bool:
        return bool(self._opening)

    def add(self, sequence: Sequence) -> None:
        """Gives the sequence its grammar's state, which is not open yet."""
        params = sequence.request.params
        grammar = params.grammar
        if grammar is None:
            return
        assert self._grammars is not None, "a request with a grammar was admitted"
        output = sequence.token_ids[sequence.num_prompt_tokens :]
        has_begun = grammar.starts_after is None or grammar.starts_after in output
        lane = self._grammars.lane(grammar)
        starts_after = None if has_begun else grammar.starts_after
        sequence.grammar_state = GrammarState(starts_after, lane, params.stop_token_ids)
        self._opening[sequence] = self._grammars.open(grammar, output, lane)

    def is_open(self, sequence: Sequence) -> bool:
        """Returns True if the sequence can run."""
        opening = self._opening.get(sequence) if self._opening else None
        if opening is None:
            return True
        if not opening.done() or opening.exception() is not None:
            return False
        state = sequence.grammar_state
        assert state is not None
        state.open(opening.result())
        del self._opening[sequence]
        return True

    def error(self, sequence: Sequence) -> str | None:
        """Returns why the sequence can never run, if so."""
        opening = self._opening.get(sequence) if self._opening else None
        error = opening.exception() if opening is not None and opening.done() else None
        if isinstance(error, InvalidRequestError):
            return f"{REFUSED_GRAMMAR}{error}"
        return None if error is None else str(error) or type(error).__name__

    def wait(self) -> None:
        """Blocks until one more grammar is open, some milliseconds at most."""
        wait(self._opening.values(), _WAIT_S, FIRST_COMPLETED)

    def forget(self, sequence: Sequence) -> None:
        self._opening.pop(sequence, None)

"""Drafters that follow a script, for engines whose tokens must not depend on them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Literal

from engine.drafts import Draft
from engine.types import Sequence

Script = Literal["right", "wrong", "random", "half"]
SCRIPTS: tuple[Script, ...] = ("right", "wrong", "random", "half")


class ScriptedDrafter:
    """Guesses always right, always wrong, at random, or right for a while. Notes the sequences that
    it was asked about and that did not end."""

    def __init__(
        self,
        script: Script,
        vocab_size: int,
        truth: Callable[[Sequence], tuple[int, ...]],
        seed: int = 0,
    ) -> None:
        """`truth` returns the whole output of a sequence, or as much as is known."""
        self._script = script
        self._vocab_size = vocab_size
        self._truth = truth
        self._random = random.Random(seed)
        self.open: set[Sequence] = set()
        self.num_proposals = 0

    def propose(self, sequence: Sequence, limit: int) -> Draft | None:
        assert limit > 0
        self.open.add(sequence)
        self.num_proposals += 1
        draw = self._random
        count = draw.randint(1, limit)
        right = list(self._truth(sequence)[sequence.num_output_tokens :][:count])
        if self._script == "wrong":
            ids = [(token_id + 1) % self._vocab_size for token_id in right]
        elif self._script == "random":
            ids = [draw.randrange(self._vocab_size) for _ in range(count)]
        elif self._script == "half":
            stop = draw.randint(0, len(right))
            ids = right[:stop] + [draw.randrange(self._vocab_size) for _ in right[stop:]]
        else:
            ids = right
        return Draft(tuple(ids), draw.randint(1, 20)) if ids else None

    def learn(self) -> None: ...

    def end(self, sequence: Sequence) -> None:
        self.open.discard(sequence)

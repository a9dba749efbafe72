"""The common part of the data generators: an example, and the split that keeps words unseen.

A vocabulary is split once, by position: every fifth word is held out. Training examples draw from
the rest only, held-out examples from the fifth only, so that no held-out answer can have been
memorised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

Split = Literal["train", "held_out"]
Word = TypeVar("Word")


@dataclass(frozen=True, slots=True)
class Example:
    prompt: str  # the user's message
    answer: str  # what the assistant is trained to say


def part(words: Sequence[Word], split: Split) -> list[Word]:
    """The words of one split: 4 in 5 to train, 1 in 5 held out."""
    return [word for i, word in enumerate(words) if (i % 5 == 4) == (split == "held_out")]


def words(text: str) -> list[str]:
    """A vocabulary written as comma-separated text."""
    return [word.strip() for word in text.split(",")]

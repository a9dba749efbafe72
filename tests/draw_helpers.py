"""Steps launched one ahead of the other, as the engine launches them, without a scheduler: rows
with grammars and penalties beside rows without.

The grammars are real ones of llguidance, over a vocabulary of single characters and a few words.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from functools import cache

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from engine.grammar_state import GrammarState
from engine.runner import ModelRunner
from engine.types import (
    LaunchedStep,
    Sample,
    SamplingParams,
    ScheduledBatch,
    ScheduledSequence,
    Sequence,
)
from tests.engine_helpers import VOCAB, make_sequence, random_prompt

FIRST = 3  # the token of the character "!", after three special ones; 2 ends an output
_NUM_CHARACTERS = 93
CHARACTERS = "".join(chr(33 + i) for i in range(_NUM_CHARACTERS))
_BLOCKS = 4  # of a sequence

PENALTIES = SamplingParams(
    temperature=0.9,
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.2,
    max_tokens=64,
)
OTHERS = (
    SamplingParams(temperature=0.0, max_tokens=64),
    SamplingParams(temperature=1.1, top_k=20, logprobs=3, max_tokens=64),
    SamplingParams(temperature=0.9, top_p=0.8, max_tokens=64),
    SamplingParams(temperature=1.0, min_p=0.05, prompt_logprobs=1, max_tokens=64),
    SamplingParams(temperature=0.8, logit_bias=((7, 3.0),), min_tokens=9, max_tokens=64),
)


class _Words:
    eos_token_id = 2
    bos_token_id = None
    special_token_ids = (0, 1, 2)
    tokens = (
        b"<0>",
        b"<1>",
        b"<2>",
        *(character.encode() for character in CHARACTERS),
        *(f"word{i}".encode() for i in range(VOCAB - FIRST - _NUM_CHARACTERS)),
    )

    def __call__(self, text: str | bytes) -> list[int]:
        data = text if isinstance(text, bytes) else text.encode()
        return [FIRST + byte - 33 for byte in data if 33 <= byte < 33 + _NUM_CHARACTERS]


@cache
def tokenizer() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Words()))


def grammar_of(regex: str, starts_after: int | None = None) -> GrammarState:
    """Returns the state of a choice that begins now."""
    state = GrammarState(starts_after)
    state.open(LLMatcher(tokenizer(), LLMatcher.grammar_from_regex(regex)))
    return state


def text_of(sequence: Sequence) -> str:
    """Returns the output, whose tokens are all characters."""
    return "".join(CHARACTERS[i - FIRST] for i in sequence.token_ids[sequence.num_prompt_tokens :])


def sequence_of(
    index: int, params: SamplingParams, grammar: GrammarState | None = None
) -> Sequence:
    sequence = make_sequence(
        random_prompt(5 + 3 * index, seed=index),
        _BLOCKS * index,
        params,
        seed=2**40 + index,
        num_blocks=_BLOCKS,
    )
    sequence.grammar_state = grammar
    return sequence


def neighbours(first: int, count: int = len(OTHERS)) -> list[Sequence]:
    """Returns sequences without grammars and penalties, at places from `first` on."""
    return [sequence_of(first + i, OTHERS[i % len(OTHERS)]) for i in range(count)]


def run_ahead(
    runner: ModelRunner, sequences: Many[Sequence], num_tokens: int
) -> list[list[Sample]]:
    """Launches each step before the one before it is collected, and draws after that. Returns the
    samples of each step."""
    found = []
    before: tuple[tuple[ScheduledSequence, ...], LaunchedStep] | None = None
    for number in range(num_tokens):
        parts = tuple(_next_part(sequence, number) for sequence in sequences)
        launched = runner.launch(ScheduledBatch(parts))
        if before is not None:
            found.append(_commit(*before))
        launched.draw()
        before = parts, launched
    assert before is not None
    return [*found, _commit(*before)]


def run_in_turn(
    runner: ModelRunner, sequences: Many[Sequence], num_tokens: int
) -> list[list[Sample]]:
    """Collects each step before the next one is launched."""
    found = []
    for number in range(num_tokens):
        parts = tuple(_next_part(sequence, number) for sequence in sequences)
        launched = runner.launch(ScheduledBatch(parts))
        launched.draw()
        found.append(_commit(parts, launched))
    return found


def _next_part(sequence: Sequence, number: int) -> ScheduledSequence:
    length = sequence.num_prompt_tokens
    start = 0 if number == 0 else length + number - 1
    return ScheduledSequence(sequence, start, length + number, True)


def _commit(parts: tuple[ScheduledSequence, ...], launched: LaunchedStep) -> list[Sample]:
    samples = launched.collect()
    for part, sample in zip(parts, samples, strict=True):
        sequence = part.sequence
        if sample.token_id is None:
            sequence.block_table = []  # as the scheduler does with the sequence of a broken row
            continue
        if not sequence.block_table:
            continue  # it has ended
        sequence.token_ids.append(sample.token_id)
        advance(sequence, sample.token_id)
    return list(samples)


def advance(sequence: Sequence, token_id: int) -> None:
    state = sequence.grammar_state
    assert state is None or state.advance(token_id) is None, "the mask allowed it"

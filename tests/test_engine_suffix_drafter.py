"""Drafts from earlier text: whose text, which place, how much memory."""

from __future__ import annotations

import random
import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from engine.drafts import Draft
from engine.suffix_drafter import TOKEN_BYTES, SuffixDrafter
from engine.types import Request, SamplingParams, Sequence

MIB = 1024 * 1024


def sequence_of(
    token_ids: list[int],
    adapter: str | None = None,
    salt: str = "",
    num_prompt: int | None = None,
    choice: int = 0,
) -> Sequence:
    count = len(token_ids) if num_prompt is None else num_prompt
    request = Request("r", tuple(token_ids[:count]), SamplingParams(n=2), adapter, salt)
    return Sequence(request, choice, 0, list(token_ids))


def learn(
    drafter: SuffixDrafter, *texts: list[int], adapter: str | None = None, salt: str = ""
) -> None:
    for token_ids in texts:
        sequence = sequence_of(token_ids, adapter, salt)
        drafter.propose(sequence, 1)
        drafter.end(sequence)


def test_a_draft_is_what_followed_the_same_tokens_before() -> None:
    drafter = SuffixDrafter(MIB)
    learn(drafter, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert drafter.propose(sequence_of([20, 3, 4]), 3) == Draft((5, 6, 7), 2)
    assert drafter.propose(sequence_of([20, 2, 3, 4, 5]), 9) == Draft((6, 7, 8, 9), 4)
    assert drafter.propose(sequence_of([20, 9, 8]), 3) == Draft((9,), 1)
    assert drafter.propose(sequence_of([20, 21]), 3) is None


def test_a_draft_comes_from_the_prompt_and_from_the_output_so_far() -> None:
    drafter = SuffixDrafter(MIB)
    sequence = sequence_of([1, 2, 3, 4, 9], num_prompt=5)
    assert drafter.propose(sequence, 4) is None
    sequence.token_ids += [1, 2]
    assert drafter.propose(sequence, 2) == Draft((3, 4), 2)
    sequence.token_ids += [8, 7, 6, 8, 7]
    assert drafter.propose(sequence, 1) == Draft((6,), 2)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.randoms(use_true_random=False))
def test_a_text_that_comes_in_steps_has_the_drafts_of_one_that_comes_at_once(
    text: list[int], draw: random.Random
) -> None:
    whole, stepwise = SuffixDrafter(MIB), SuffixDrafter(MIB)
    growing = sequence_of(text[:1])
    while len(growing.token_ids) < len(text):
        stepwise.propose(growing, 4)
        end = len(growing.token_ids)
        growing.token_ids += text[end : end + draw.randrange(1, 40)]
        if draw.random() < 0.5:
            stepwise.learn()
    assert stepwise.propose(growing, 4) == whole.propose(sequence_of(text), 4)
    stepwise.learn()
    for start in range(len(text)):
        other = sequence_of(text[start : start + 5])
        other.choice = 1  # adds nothing of its prompt
        assert stepwise.propose(other, 4) == whole.propose(other, 4)


def test_a_longer_match_goes_before_a_newer_one() -> None:
    drafter = SuffixDrafter(MIB)
    learn(drafter, [1, 2, 3, 4, 50, 51], [9, 9, 3, 4, 60, 61])
    assert drafter.propose(sequence_of([7, 1, 2, 3, 4]), 2) == Draft((50, 51), 4)
    assert drafter.propose(sequence_of([7, 8, 3, 4]), 2) == Draft((60, 61), 2)


def test_a_repetition_is_continued_beyond_the_text() -> None:
    drafter = SuffixDrafter(MIB)
    draft = drafter.propose(sequence_of([5, 1, 2, 3, 1, 2, 3]), 7)
    assert draft == Draft((1, 2, 3, 1, 2, 3, 1), 3)


def test_the_text_of_another_tenant_or_adapter_is_never_read() -> None:
    drafter = SuffixDrafter(MIB)
    learn(drafter, [1, 2, 3, 4, 5], adapter="a", salt="tenant")
    for adapter, salt in ((None, "tenant"), ("b", "tenant"), ("a", ""), ("a", "other")):
        assert drafter.propose(sequence_of([8, 1, 2], adapter, salt), 2) is None
    assert drafter.propose(sequence_of([8, 1, 2], "a", "tenant"), 2) == Draft((3, 4), 2)


def test_the_choices_of_a_request_put_its_prompt_in_once() -> None:
    drafter = SuffixDrafter(MIB)
    prompt = list(range(100))
    for choice in (0, 1):
        sequence = sequence_of([*prompt, 7], num_prompt=100, choice=choice)
        drafter.propose(sequence, 1)
        drafter.end(sequence)
    assert drafter.num_tokens == 100


def test_the_index_stays_below_its_bytes_and_keeps_the_newest_text() -> None:
    """All n-grams differ, so that each has an entry: the most memory of a token."""
    bound = 2 * MIB
    draw = random.Random(0)
    drafter = SuffixDrafter(bound)
    text = [0]
    tracemalloc.start()
    try:
        held, _ = tracemalloc.get_traced_memory()
        for index in range(120):
            text = [draw.randrange(1 << 17) for _ in range(300)]
            learn(drafter, text, adapter=f"adapter-{index % 7}")
            assert tracemalloc.get_traced_memory()[0] - held < bound
            assert drafter.num_tokens <= bound // TOKEN_BYTES
    finally:
        tracemalloc.stop()
    assert drafter.num_tokens > 0.8 * bound / TOKEN_BYTES
    assert drafter.propose(sequence_of(text[:40], "adapter-1"), 3) is None
    assert drafter.propose(sequence_of(text[:40], "adapter-0"), 3) is not None


def test_the_prompts_that_many_choices_have_each_stay_below_its_bytes() -> None:
    """Few of their tokens are in the index, but all of their texts."""
    bound = MIB
    drafter = SuffixDrafter(bound)
    tracemalloc.start()
    try:
        held, _ = tracemalloc.get_traced_memory()
        for first in range(3):
            prompt = list(range(first * 10_000 + 1000, first * 10_000 + 6000))
            for choice in range(1, 60):
                text = [*prompt, 1, 2, 3]
                sequence = sequence_of(text, num_prompt=len(prompt), choice=choice)
                drafter.propose(sequence, 1)
                drafter.end(sequence)
            del sequence, prompt, text
            assert tracemalloc.get_traced_memory()[0] - held < bound
    finally:
        tracemalloc.stop()


def test_sequences_that_are_asked_no_more_keep_no_dropped_text() -> None:
    """Such as preempted ones. Each was asked while another segment was the newest."""
    bound = MIB
    draw = random.Random(0)
    drafter = SuffixDrafter(bound)
    waiting: list[Sequence] = []
    tracemalloc.start()
    try:
        held, _ = tracemalloc.get_traced_memory()
        for index in range(80):
            sequence = sequence_of([draw.randrange(1 << 17) for _ in range(200)])
            drafter.propose(sequence, 1)
            if index % 4:
                drafter.end(sequence)
            else:
                waiting.append(sequence)
                held += 200 * (2 * 8 + 28)  # its own tokens, in the request too
            assert tracemalloc.get_traced_memory()[0] - held < bound
    finally:
        tracemalloc.stop()
    for sequence in waiting:
        sequence.token_ids += [1, 2, 3]
        drafter.propose(sequence, 1)
        drafter.end(sequence)
    assert drafter.propose(sequence_of([9, 1, 2]), 1) == Draft((3,), 2)


def test_many_salts_with_a_token_each_stay_below_its_bytes() -> None:
    bound = MIB
    drafter = SuffixDrafter(bound)
    tracemalloc.start()
    try:
        held, _ = tracemalloc.get_traced_memory()
        for index in range(2 * bound // TOKEN_BYTES):
            learn(drafter, [index + 1000, 1], salt=f"{index:032}")
        assert tracemalloc.get_traced_memory()[0] - held < bound
    finally:
        tracemalloc.stop()
    assert drafter.num_tokens > 0


def test_a_prompt_longer_than_the_index_is_taken_in_parts() -> None:
    drafter = SuffixDrafter(100 * TOKEN_BYTES)
    sequence = sequence_of(list(range(5000)))
    for _ in range(500):
        drafter.propose(sequence, 1)
        drafter.learn()
        assert drafter.num_tokens <= 100
    sequence.token_ids += [4990, 4991]
    assert drafter.propose(sequence, 2) == Draft((4992, 4993), 2)


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=40), min_size=1, max_size=6),
    st.integers(1, 9),
)
def test_a_draft_followed_its_match_somewhere(texts: list[list[int]], limit: int) -> None:
    drafter = SuffixDrafter(MIB)
    for token_ids in texts[:-1]:
        learn(drafter, token_ids)
    sequence = sequence_of(texts[-1][:1])
    for token_id in texts[-1][1:]:
        sequence.token_ids.append(token_id)
        draft = drafter.propose(sequence, limit)
        if draft is None:
            continue
        assert 1 <= len(draft.token_ids) <= limit
        known = sequence.token_ids[-draft.match_length :] + list(draft.token_ids)
        own = sequence.token_ids + list(draft.token_ids)  # a repetition that goes on
        assert any(contains(text, known) for text in (*texts[:-1], own[:-1]))


def contains(text: list[int], part: list[int]) -> bool:
    return any(text[i : i + len(part)] == part for i in range(len(text)))

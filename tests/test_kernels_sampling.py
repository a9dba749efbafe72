"""Philox against its published vectors; filters, penalties and ranks against plain Python."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from engine.admission import MAX_LOGIT_CHANGE, MIN_REPETITION_PENALTY
from kernels import sampling
from kernels.sampling import (
    add_bias_,
    apply_penalties_,
    ban_,
    draw,
    gather_logprobs,
    philox_4x32_10,
    sample_rows,
    uniform,
)


def logits_of(*shape: int, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return spread * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def sample(
    logits: torch.Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seeds: torch.Tensor | None = None,
) -> torch.Tensor:
    rows = logits.shape[0]
    return draw(
        logits,
        torch.full((rows,), temperature),
        torch.full((rows,), top_k),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
        torch.arange(rows) if seeds is None else seeds,
        torch.zeros(rows, dtype=torch.int64),
        torch.full((rows,), 7),
    )


def support(row: list[float], **params: float) -> set[int]:
    """Returns the ids that can be drawn: with this number of draws, a rare id is missed once in
    e^40."""
    logits = torch.tensor([row]).expand(4000, -1)
    return set(sample(logits, **params).tolist())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_words(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    words = philox_4x32_10((c0, c1, c2, c3), (torch.tensor([key[0]]), torch.tensor([key[1]])))
    assert tuple(int(word) for word in words) == expected


def test_uniform_depends_on_every_part_of_its_key() -> None:
    parts = [(0, 0, 0), (1, 0, 0), (1 << 40, 0, 0), (-1, 0, 0), (0, 1, 0), (0, 0, 1)]
    seeds, choices, positions = (torch.tensor(column) for column in zip(*parts, strict=True))
    values = uniform(seeds, choices, positions).tolist()
    assert len(set(values)) == len(parts)
    assert all(0.0 <= value < 1.0 for value in values)


def test_uniform_is_spread_evenly() -> None:
    positions = torch.arange(64000)
    values = uniform(torch.full_like(positions, 42), torch.zeros_like(positions), positions)
    counts = torch.histc(values, bins=64, min=0, max=1)
    chi_square = float(((counts - 1000) ** 2 / 1000).sum())
    assert chi_square < 120  # 63 degrees of freedom: above 120 once in 50,000


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    assert sample(torch.tensor([[0.0, 5.0, 5.0], [1.0, 1.0, 1.0]]), temperature=0).tolist() == [
        1,
        0,
    ]


def test_greedy_rows_do_not_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> torch.Tensor:
        raise AssertionError("filtered a greedy row")

    monkeypatch.setattr(sampling, "_filtered_weights", refuse)
    assert sample(logits_of(3, 50), temperature=0, top_p=0.5).shape == (3,)


@pytest.mark.parametrize("vocab", [1, 2, 50, 1000])
def test_draws_follow_the_distribution(vocab: int) -> None:
    logits = logits_of(1, vocab, spread=1.0)
    drawn = sample(logits.expand(20000, -1), temperature=0.7)
    expected = 20000 * torch.softmax(logits[0].double() / 0.7, -1)
    counts = torch.bincount(drawn, minlength=vocab)
    seen = expected > 5
    chi_square = float(((counts - expected) ** 2 / expected)[seen].sum())
    freedom = max(int(seen.sum()) - 1, 1)
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, {0, 1, 2, 3}),
        ({"top_k": 1}, {3}),
        ({"top_k": 2}, {2, 3}),
        ({"top_k": 99}, {0, 1, 2, 3}),
        ({"top_p": 0.39}, {3}),
        ({"top_p": 0.41}, {2, 3}),
        ({"top_p": 0.69}, {2, 3}),
        ({"top_p": 1e-9}, {3}),
        ({"min_p": 0.74}, {2, 3}),
        ({"min_p": 0.76}, {3}),
        ({"min_p": 1.0}, {3}),
        # The filters see what the one before has left: 0.4 of 0.7 is 0.57.
        ({"top_k": 2, "top_p": 0.5}, {3}),
        ({"top_k": 3, "top_p": 0.7, "min_p": 0.1}, {2, 3}),
    ],
)
def test_filters_keep_what_they_should(params: dict[str, float], expected: set[int]) -> None:
    row = [math.log(p) for p in (0.1, 0.2, 0.3, 0.4)]
    assert support(row, **params) == expected


def test_temperature_comes_before_the_filters() -> None:
    row = [math.log(p) for p in (0.1, 0.2, 0.3, 0.4)]
    assert support(row, temperature=0.1, top_p=0.9) == {3}
    assert support(row, temperature=1e-30) == {3}


def test_top_k_keeps_all_equals_of_the_last_and_top_p_the_lowest_ids() -> None:
    row = [0.0, 1.0, 0.0, 0.0]
    assert support(row, top_k=2) == {0, 1, 2, 3}
    assert support([0.0, 0.0, 0.0, 0.0], top_p=0.5) == {0, 1}


def test_a_flat_row_whose_nucleus_is_wider_than_the_candidates() -> None:
    wide = logits_of(1, 20000, spread=0.1)
    drawn = set(sample(wide.expand(300, -1), top_p=0.6).tolist())
    probabilities = torch.softmax(wide[0].double(), -1)
    order = probabilities.argsort(descending=True)
    count = int((probabilities[order].cumsum(0) < 0.6).sum()) + 1
    assert drawn <= set(order[:count].tolist())
    assert len(drawn) > 250


def test_a_row_does_not_depend_on_its_batch() -> None:
    logits = torch.cat((logits_of(6, 3000), logits_of(2, 3000, spread=0.05)))
    temperature = torch.tensor([0.0, 1.0, 0.7, 1.3, 0.9, 1.0, 1.0, 2.0])
    top_k = torch.tensor([0, 0, 40, 3, 0, 700, 0, 0])
    top_p = torch.tensor([1.0, 1.0, 0.9, 1.0, 0.5, 0.8, 0.95, 0.99])
    min_p = torch.tensor([0.0, 0.0, 0.0, 0.1, 0.05, 0.0, 0.0, 0.0])
    seeds, choices = torch.arange(8) * 977, torch.arange(8) % 3
    arguments = (logits, temperature, top_k, top_p, min_p, seeds, choices, torch.arange(8))
    together = draw(*arguments)
    alone = torch.cat([draw(*(a[i : i + 1] for a in arguments)) for i in range(8)])
    backwards = draw(*(a.flip(0) for a in arguments)).flip(0)
    assert torch.equal(together, alone)
    assert torch.equal(together, backwards)


def test_a_row_of_nan_neither_raises_nor_changes_the_others() -> None:
    logits = logits_of(3, 100)
    before = sample(logits, top_p=0.9)
    logits[1] = float("nan")
    after = sample(logits, top_p=0.9)
    assert after[[0, 2]].tolist() == before[[0, 2]].tolist()
    assert 0 <= int(after[1]) < 100


def test_a_banned_token_is_never_drawn() -> None:
    logits = torch.zeros(2000, 3)
    ban_(logits, torch.arange(2000), torch.full((2000,), 1))
    assert set(sample(logits).tolist()) == {0, 2}


def test_bias_adds_at_its_places_only() -> None:
    logits = torch.zeros(2, 3)
    add_bias_(logits, torch.tensor([1, 1]), torch.tensor([2, 0]), torch.tensor([5.0, -1.0]))
    assert logits.tolist() == [[0, 0, 0], [-1, 0, 5]]


def test_penalties_are_those_of_hugging_face_and_openai() -> None:
    logits = torch.tensor([[2.0, -2.0, 3.0, 4.0], [1.0, 1.0, 1.0, 1.0]])
    apply_penalties_(
        logits,
        rows=torch.tensor([0, 0, 0]),
        token_ids=torch.tensor([0, 1, 2]),
        output_counts=torch.tensor([0, 1, 3]),  # token 0 is in the prompt only
        repetition=torch.tensor([2.0, 1.0]),
        presence=torch.tensor([0.25, 0.0]),
        frequency=torch.tensor([0.5, 0.0]),
    )
    assert logits.tolist() == [[1.0, -4.75, -0.25, 4.0], [1.0, 1.0, 1.0, 1.0]]


@pytest.mark.parametrize("repetition", [MIN_REPETITION_PENALTY, MAX_LOGIT_CHANGE])
@pytest.mark.parametrize("change", [-MAX_LOGIT_CHANGE, MAX_LOGIT_CHANGE])
def test_no_change_that_a_request_may_ask_for_makes_a_row_infinite(
    repetition: float, change: float
) -> None:
    """A row of -1 is taken for a fault of the model."""
    logits = torch.randn(1, 9, generator=torch.Generator().manual_seed(0)) * 100
    rows, ids = torch.zeros(9, dtype=torch.int64), torch.arange(9)
    often = torch.full((9,), 10**6)  # in the output, and as a bias of the same token
    factor, changes = torch.tensor([repetition]), torch.tensor([change])
    apply_penalties_(logits, rows, ids, often, factor, changes, changes)
    for _ in range(3):
        add_bias_(logits, rows, ids, changes.expand(9))
    assert logits.isfinite().all()
    ones, zeros = torch.ones(1), torch.zeros(1, dtype=torch.int64)
    out = torch.empty(1, dtype=torch.int32)
    sample_rows(logits, ones, zeros, ones, ones * 0, zeros, zeros, zeros, out)
    assert 0 <= out[0] < 9


def test_logprobs_and_ranks() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0, 2.0]])
    logprob, rank, top_ids, top = gather_logprobs(logits.expand(3, -1), torch.tensor([1, 2, 0]), 3)
    expected = torch.log_softmax(logits[0].double(), -1)
    assert rank.tolist() == [1, 2, 4]
    assert top_ids.tolist() == [[1, 2, 4]] * 3
    assert torch.allclose(logprob.double(), expected[[1, 2, 0]])
    assert torch.allclose(top[0].double(), expected[[1, 2, 4]])


def test_logprobs_of_many_rows_are_gathered_some_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits, token_ids = logits_of(7, 11), torch.arange(7)
    at_once = gather_logprobs(logits, token_ids, 3)
    sizes: list[int] = []
    gather = sampling.gather_logprobs_reference

    def note(logits: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
        sizes.append(logits.shape[0])
        return gather(logits, *rest)

    monkeypatch.setattr(sampling, "gather_logprobs_reference", note)
    monkeypatch.setattr(sampling, "_MAX_GATHERED", 2 * 11)
    for part, whole in zip(gather_logprobs(logits, token_ids, 3), at_once, strict=True):
        assert torch.equal(part, whole)
    assert sizes == [2, 2, 2, 1]
    gather_logprobs(torch.zeros(2, 100), token_ids[:2], 3)  # a row is never cut
    assert sizes[4:] == [1, 1]


@pytest.mark.parametrize("k", [0, 1, 4, 9])
def test_equal_logits_rank_by_id_however_many_are_asked_for(k: int) -> None:
    logits = torch.zeros(2, 5)
    _, rank, top_ids, top = gather_logprobs(logits, torch.tensor([0, 4]), k)
    assert rank.tolist() == [1, 5]
    assert top_ids.tolist() == [list(range(min(k, 5)))] * 2
    assert top.shape == top_ids.shape

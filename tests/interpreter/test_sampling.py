"""The sampler's launches against the reference: the same tokens, whatever the filters."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from kernels.sampling import draw, draw_reference, sample_rows
from kernels.triton_sampling import MAX_VOCAB, launch_sample_rows

Column = torch.Tensor
Parameters = tuple[Column, Column, Column, Column, Column, Column, Column]


def logits_of(rows: int, vocab: int, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return spread * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def parameters(
    rows: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Parameters:
    """Rows differ in their random numbers alone."""
    place = torch.arange(rows, dtype=torch.int32)
    return (
        torch.full((rows,), temperature),
        torch.full((rows,), top_k, dtype=torch.int32),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
        place.long() * 0x9E3779B97F4A7C15 - 2**40,
        place % 3,
        place + 7,
    )


def columns(found: Iterable[torch.Tensor]) -> Parameters:
    temperature, top_k, top_p, min_p, seeds, choices, positions = found
    return temperature, top_k, top_p, min_p, seeds, choices, positions


def sampled(logits: torch.Tensor, rest: Parameters, chunk: int = 64, room: int = 64) -> list[int]:
    out = torch.full((logits.shape[0] + 1,), -7, dtype=torch.int32)
    launch_sample_rows(logits, *rest, out, chunk=chunk, room=room)
    assert int(out[-1]) == -7
    return out[:-1].tolist()


CASES = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.3},
    {"temperature": 1e-30, "top_p": 0.5},
    {"min_p": 0.05},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 999},
    {"top_p": 0.5},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"top_p": 1e-9},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.1},
    {"temperature": 5.0, "top_p": 0.95},
    {"temperature": 5.0, "top_k": 90, "top_p": 0.95},
]


@pytest.mark.parametrize("params", CASES, ids=str)
def test_a_row_draws_the_token_of_the_reference(params: dict[str, float]) -> None:
    rows = 4
    logits, rest = logits_of(rows, 150), parameters(rows, **params)  # type: ignore[arg-type]
    assert sampled(logits, rest) == draw_reference(logits, *rest).tolist()


def test_sums_of_the_widest_vocabulary_do_not_overflow() -> None:
    """All ids are equal, so that every weight is the largest."""
    logits, rest = torch.zeros(3, MAX_VOCAB), parameters(3)
    found = sampled(logits, rest, chunk=8192, room=8192)
    assert found == draw_reference(logits, *rest).tolist()


@pytest.mark.parametrize("params", [{"top_k": 40}, {"top_p": 0.9}, {"top_k": 40, "top_p": 0.7}])
def test_more_than_the_room_are_found_in_the_whole_row(params: dict[str, float]) -> None:
    rows = 2
    logits = logits_of(rows, 150, spread=0.5)
    rest = parameters(rows, **params)  # type: ignore[arg-type]
    assert sampled(logits, rest, room=4) == draw_reference(logits, *rest).tolist()


@pytest.mark.parametrize("room", [4, 256])
@pytest.mark.parametrize(
    "params",
    [{"top_k": 3}, {"top_p": 0.5}, {"top_k": 90, "top_p": 0.6}, {"top_p": 0.3, "min_p": 1.0}],
)
def test_equals_are_kept_as_the_reference_keeps_them(params: dict[str, float], room: int) -> None:
    rows = 3
    logits = logits_of(rows, 150, spread=1.0).round()
    logits[0] = 0.0
    logits[1] = torch.where(torch.arange(150) % 2 == 0, 0.0, -0.0)
    rest = parameters(rows, **params)  # type: ignore[arg-type]
    assert sampled(logits, rest, room=room) == draw_reference(logits, *rest).tolist()


@pytest.mark.parametrize("vocab", [1, 2, 64, 65, 129])
def test_any_vocabulary(vocab: int) -> None:
    logits = logits_of(3, vocab, seed=1)
    for params in ({"temperature": 0.0}, {}, {"top_k": 2}, {"top_p": 0.6}):
        rest = parameters(3, **params)
        assert sampled(logits, rest) == draw_reference(logits, *rest).tolist()


def test_rows_of_every_kind_stand_beside_each_other() -> None:
    kinds = [{"temperature": 0.0}, {}, {"top_k": 4}, {"top_p": 0.7}, {"min_p": 0.2}]
    logits = logits_of(len(kinds), 150, seed=2)
    alone = [parameters(len(kinds), **kind) for kind in kinds]  # type: ignore[arg-type]
    rest = columns(
        torch.stack([row[i] for i, row in enumerate(column)]) for column in zip(*alone, strict=True)
    )
    together = sampled(logits, rest)
    assert together == draw_reference(logits, *rest).tolist()
    for i in range(len(kinds)):
        one = columns(column[i : i + 1] for column in rest)
        assert sampled(logits[i : i + 1], one) == [together[i]]


def test_a_broken_row_harms_only_itself() -> None:
    logits, inf = logits_of(6, 150), float("inf")
    healthy = logits.clone()
    logits[0, 149], logits[2, 3], logits[4] = float("nan"), inf, -inf
    logits[3, 5:] = healthy[3, 5:] = -inf  # banned, all but five
    for params in ({"temperature": 0.0}, {"temperature": 0.8}, {"top_k": 9, "top_p": 0.9}):
        rest = parameters(6, **params)  # type: ignore[arg-type]
        expected = draw_reference(healthy, *rest).tolist()
        expected[0] = expected[2] = expected[4] = -1
        assert sampled(logits, rest) == expected


def test_the_launcher_takes_its_own_chunks() -> None:
    logits, rest = logits_of(3, 150), parameters(3, temperature=0.0)
    out = torch.empty(3, dtype=torch.int32)
    sample_rows(logits, *rest, out)
    assert out.tolist() == draw(logits, *rest).tolist() == logits.argmax(-1).tolist()


def test_half_precision_and_rows_apart() -> None:
    wide = logits_of(4, 160).half()
    rest = parameters(4, top_k=30, top_p=0.9)
    logits = wide[:, :150]
    assert sampled(logits, rest) == draw_reference(logits.float(), *rest).tolist()

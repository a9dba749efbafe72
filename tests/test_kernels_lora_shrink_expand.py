"""The batched LoRA delta against a float64 loop over tokens, with NaN in rows that must not be
read.
"""

from __future__ import annotations

import pytest
import torch

from kernels.lora_shrink_expand import Segment, lora_add_, lora_embed_add_

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
ROWS = 96


class Case:
    """Tokens of several owners; rows of the pool without an owner are NaN."""

    def __init__(
        self,
        token_owner: list[int],
        rows_of: list[list[int]],
        k: int = 24,
        widths: tuple[int, ...] = (8, 5),
        dtype: torch.dtype = torch.float32,
        integers: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(0)

        def values(*shape: int) -> torch.Tensor:
            if integers:
                return torch.randint(-2, 3, shape, generator=generator).to(dtype)
            return torch.randn(shape, generator=generator).to(dtype)

        self.token_owner, self.rows_of = token_owner, rows_of
        self.x = values(len(token_owner), k)
        self.a, self.b = values(len(widths), ROWS, k), [values(ROWS, n) for n in widths]
        self.fused = values(len(token_owner), sum(widths))
        used = [row for rows in rows_of for row in rows]
        unused = [row for row in range(ROWS) if row not in used]
        self.a[:, unused] = float("nan")
        for b in self.b:
            b[unused] = float("nan")
        self.widths = widths

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        owners = [owner for owner, rows in enumerate(self.rows_of) for _ in rows]
        return (
            torch.tensor(self.token_owner, dtype=torch.int32),
            torch.tensor([row for rows in self.rows_of for row in rows]),
            torch.tensor(owners, dtype=torch.int32),
        )

    def segments(self) -> list[Segment]:
        """Returns one segment per token and row run: as fine as possible."""
        runs: list[list[tuple[int, int]]] = []
        for rows in self.rows_of:
            starts = [row for row in rows if row - 1 not in rows]
            ends = [row + 1 for row in rows if row + 1 not in rows]
            runs.append(list(zip(starts, ends, strict=True)))
        return [
            (t, t + 1, start, end)
            for t, owner in enumerate(self.token_owner)
            if owner >= 0
            for start, end in runs[owner]
        ]

    def run(self, by_segments: bool) -> torch.Tensor:
        y = self.fused.clone()
        outputs = torch.split(
            y, list(self.widths), dim=1
        )  # views with the stride of the fused output
        segments = self.segments() if by_segments else None
        lora_add_(outputs, self.x, self.a, self.b, *self.tensors(), segments)
        return y

    def expected_delta(self) -> torch.Tensor:
        delta = torch.zeros(self.fused.shape, dtype=torch.float64)
        for t, owner in enumerate(self.token_owner):
            if owner >= 0:
                rows = self.rows_of[owner]
                parts = [
                    self.x[t].double() @ self.a[s, rows].double().T @ b[rows].double()
                    for s, b in enumerate(self.b)
                ]
                delta[t] = torch.cat(parts)
        return delta


def rows(*pages: int) -> list[int]:
    return [row for page in pages for row in range(16 * page, 16 * page + 16)]


BATCHES = {
    "one token": ([0], [rows(2)]),
    "one adapter": ([0] * 5, [rows(1)]),
    "one adapter and the base": ([-1, 0, 0, -1, -1], [rows(1)]),
    "ranks of one and three pages apart": ([0, 1, 1, 0, -1, 1], [rows(5), rows(0, 2, 3)]),
    "every token another": ([3, 1, -1, 0, 2], [rows(4), rows(0), rows(2), rows(1)]),
    "an adapter without tokens": ([1, -1, 1], [rows(0), rows(3)]),
}
batches = pytest.mark.parametrize("name", list(BATCHES))
forms = pytest.mark.parametrize("by_segments", [False, True])


@forms
@batches
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("k", "widths"), [(24, (8, 5)), (1, (1,)), (33, (7, 3, 3))])
def test_delta_agrees_with_float64(
    name: str, dtype: torch.dtype, k: int, widths: tuple[int, ...], by_segments: bool
) -> None:
    case = Case(*BATCHES[name], k, widths, dtype)
    case.fused.zero_()  # on the delta: a large y would hide its error
    expected = case.expected_delta()
    actual = case.run(by_segments)
    assert actual.dtype == dtype
    assert float((actual.double() - expected).norm() / expected.norm()) < TOLERANCE[dtype]


@forms
@batches
def test_small_integers_are_exact(name: str, by_segments: bool) -> None:
    case = Case(*BATCHES[name], integers=True)
    assert torch.equal(case.run(by_segments).double(), case.fused.double() + case.expected_delta())


@forms
def test_tokens_without_adapter_stay_as_they_are_to_the_bit(by_segments: bool) -> None:
    case = Case([-1, 0, -1, -1], [rows(1)])
    case.fused[0], case.fused[2], case.fused[3] = -0.0, float("nan"), 1e-42
    after = case.run(by_segments)
    for t in (0, 2, 3):
        assert torch.equal(after[t].view(torch.int32), case.fused[t].view(torch.int32))


@forms
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["x", "a", "b"])
def test_one_adapters_poison_reaches_its_own_tokens_only(
    where: str, poison: float, by_segments: bool
) -> None:
    case = Case([0, 1, -1, 1, 0], [rows(0), rows(3)])
    before = case.run(by_segments)
    if where == "x":
        case.x[1] = case.x[3] = poison
    elif where == "a":
        case.a[0, 50] = poison
    else:
        case.b[0][50] = poison
    after = case.run(by_segments)
    assert torch.equal(after[[0, 2, 4]], before[[0, 2, 4]])
    assert not after[[1, 3], :8].isfinite().any()


@forms
def test_two_runs_are_equal_to_the_bit(by_segments: bool) -> None:
    case = Case([0, 1, -1, 1, 0], [rows(0), rows(3)])
    assert torch.equal(case.run(by_segments), case.run(by_segments))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_embedding_delta_is_the_column_of_the_token(dtype: torch.dtype) -> None:
    case = Case([0, -1, 1, 0, 1], [rows(5), rows(0, 2)], k=40, widths=(6,), dtype=dtype)
    token_ids = torch.tensor([0, 7, 39, 39, 1], dtype=torch.int32)
    case.x = torch.nn.functional.one_hot(token_ids.long(), 40).to(dtype)
    y = torch.zeros_like(case.fused)
    lora_embed_add_(y, token_ids, case.a[0], case.b[0], *case.tensors())
    expected = case.expected_delta()
    assert float((y.double() - expected).norm() / expected.norm()) < TOLERANCE[dtype]
    assert not y[1].any()

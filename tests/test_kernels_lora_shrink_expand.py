"""The LoRA delta adapter by adapter against a float64 loop over tokens."""

from __future__ import annotations

import pytest
import torch

from kernels.lora_shrink_expand import Delta, EmbeddingDelta, Tokens, lora_add_, lora_embed_add_

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


class Case:
    """Tokens of several owners, each with rows of some rank at some of the slices."""

    def __init__(
        self,
        token_owner: list[int],
        ranks: list[tuple[int, ...]],  # of each owner, at each slice; 0: it lacks the slice
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

        self.token_owner, self.widths = token_owner, widths
        self.x = values(len(token_owner), k)
        self.weights = [
            {s: (values(rank, k), values(rank, widths[s])) for s, rank in enumerate(each) if rank}
            for each in ranks
        ]
        self.fused = values(len(token_owner), sum(widths))

    def tokens(self, owner: int) -> Tokens:
        rows = [t for t, one in enumerate(self.token_owner) if one == owner]
        if rows and rows == list(range(rows[0], rows[-1] + 1)):
            return slice(rows[0], rows[-1] + 1)
        return torch.tensor(rows, dtype=torch.int64)

    def run(self) -> torch.Tensor:
        y = self.fused.clone()
        # Views with the stride of the fused output.
        outputs = torch.split(y, list(self.widths), dim=1)
        for owner, weights in enumerate(self.weights):
            deltas = [
                # In two pieces of columns, where there are two.
                Delta(s, a, ((0, b[:, :3]), (3, b[:, 3:])))
                for s, (a, b) in weights.items()
            ]
            lora_add_(outputs, self.x, self.tokens(owner), deltas)
        return y

    def expected_delta(self) -> torch.Tensor:
        delta = torch.zeros(self.fused.shape, dtype=torch.float64)
        parts = torch.split(delta, list(self.widths), dim=1)
        for t, owner in enumerate(self.token_owner):
            for s, (a, b) in self.weights[owner].items() if owner >= 0 else ():
                parts[s][t] = self.x[t].double() @ a.double().T @ b.double()
        return delta


BATCHES: dict[str, tuple[list[int], list[tuple[int, ...]]]] = {
    "one token": ([0], [(8, 8)]),
    "one adapter": ([0] * 5, [(16, 16)]),
    "one adapter and the base": ([-1, 0, 0, -1, -1], [(4, 4)]),
    "other ranks, apart": ([0, 1, 1, 0, -1, 1], [(1, 8), (33, 2)]),
    "every token another": ([3, 1, -1, 0, 2], [(8, 0), (0, 8), (3, 3), (5, 1)]),
    "an adapter without tokens": ([1, -1, 1], [(8, 8), (2, 2)]),
}
batches = pytest.mark.parametrize("name", list(BATCHES))


@batches
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("k", "widths"), [(24, (8, 5)), (1, (4, 4)), (33, (7, 4))])
def test_delta_agrees_with_float64(
    name: str, dtype: torch.dtype, k: int, widths: tuple[int, ...]
) -> None:
    case = Case(*BATCHES[name], k, widths, dtype)
    case.fused.zero_()  # on the delta: a large y would hide its error
    expected = case.expected_delta()
    actual = case.run()
    assert actual.dtype == dtype
    assert float((actual.double() - expected).norm() / expected.norm()) < TOLERANCE[dtype]


@batches
def test_small_integers_are_exact(name: str) -> None:
    case = Case(*BATCHES[name], integers=True)
    assert torch.equal(case.run().double(), case.fused.double() + case.expected_delta())


def test_what_has_no_delta_stays_as_it_is_to_the_bit() -> None:
    case = Case([-1, 0, -1, -1], [(8, 0)])
    case.fused[0], case.fused[2], case.fused[3] = -0.0, float("nan"), 1e-42
    case.fused[1, 8:] = -0.0
    after = case.run().view(torch.int32)
    before = case.fused.view(torch.int32)
    assert torch.equal(after[[0, 2, 3]], before[[0, 2, 3]])
    assert torch.equal(after[1, 8:], before[1, 8:])
    assert not torch.equal(after[1, :8], before[1, :8])


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["x", "a", "b"])
def test_one_adapters_poison_reaches_its_own_tokens_only(where: str, poison: float) -> None:
    case = Case([0, 1, -1, 1, 0], [(8, 8), (8, 8)])
    before = case.run()
    a, b = case.weights[1][0]
    if where == "x":
        case.x[1] = case.x[3] = poison
    elif where == "a":
        a[2] = poison
    else:
        b[2] = poison
    after = case.run()
    assert torch.equal(after[[0, 2, 4]], before[[0, 2, 4]])
    assert not after[[1, 3], :8].isfinite().any()


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_embedding_delta_is_the_column_of_the_token(dtype: torch.dtype) -> None:
    """A of 40 columns is in three pieces of 16, each somewhere in the heap."""
    case = Case([0, -1, 1, 0, 1], [(5,), (12,)], k=40, widths=(6,), dtype=dtype)
    token_ids = torch.tensor([0, 7, 39, 39, 1], dtype=torch.int32)
    case.x = torch.nn.functional.one_hot(token_ids.long(), 40).to(dtype)
    y = torch.zeros_like(case.fused)
    for owner, weights in enumerate(case.weights):
        a, b = weights[0]
        pieces = torch.nn.functional.pad(a, (0, 8)).split(16, dim=1)
        heap = torch.full((2000,), float("nan"), dtype=dtype)
        starts = torch.tensor([900, 128, 500])
        for start, piece in zip(starts.tolist(), pieces, strict=True):
            heap[start : start + piece.numel()] = piece.flatten()
        lora_embed_add_(y, token_ids, case.tokens(owner), [EmbeddingDelta(heap, starts, 16, b)])
    expected = case.expected_delta()
    assert float((y.double() - expected).norm() / expected.norm()) < TOLERANCE[dtype]
    assert not y[1].any()

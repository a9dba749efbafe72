"""Large matrices as few rank rows: close to the best there is, with the error that it has."""

from __future__ import annotations

import time

import pytest
import torch

from lora.errors import AdapterError
from lora.low_rank import ConversionLimits, decompose, flops, halves, is_small, least_rank

MAX_RANK = 12


def make_matrix(height: int, width: int, decay: float, dtype: torch.dtype) -> torch.Tensor:
    """Returns a matrix whose singular values are decay^0, decay^1, ..."""
    generator = torch.Generator().manual_seed(height)
    size = min(height, width)
    u, v = (
        torch.linalg.qr(torch.randn(n, size, generator=generator, dtype=torch.float64))[0]
        for n in (height, width)
    )
    return ((u * decay ** torch.arange(size)) @ v.T).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(300, 90), (90, 300), (4100, 80)])
@pytest.mark.parametrize(("decay", "bound"), [(0.5, 1e-3), (0.8, 0.1), (0.3, 1e-5)])
def test_large_matrix_gets_about_the_least_rank_and_its_own_error(
    dtype: torch.dtype, shape: tuple[int, int], decay: float, bound: float
) -> None:
    assert not is_small(*shape, MAX_RANK)
    matrix = make_matrix(*shape, decay, dtype)
    rank, error = least_rank(decompose(matrix, MAX_RANK), "x", MAX_RANK, bound)
    exact = torch.linalg.svdvals(matrix.double())
    tails = exact.square().flip(0).cumsum(0).flip(0).sqrt() / exact.norm()
    assert rank - int((tails > bound).sum()) in (0, 1)
    a, b = halves(decompose(matrix, MAX_RANK), rank)
    found = float((matrix.double() - b.double() @ a.double()).norm() / exact.norm())
    assert found <= bound * (1 + 1e-2)
    assert error == pytest.approx(found, rel=0.02, abs=1e-6)


def test_matrix_of_no_few_ranks_is_refused_with_the_error_of_the_largest() -> None:
    matrix = make_matrix(200, 200, 1.0, torch.float32)  # all singular values are equal
    factors = decompose(matrix, MAX_RANK)
    # The best error of 12 of 200 equal values is the root of 188 / 200.
    with pytest.raises(AdapterError, match=r"more than rank 12 .*; at rank 12, .* error is 0\.97"):
        least_rank(factors, "x", MAX_RANK, 1e-3)
    assert factors.rest == pytest.approx((200 - len(factors.sigma)) ** 0.5, rel=0.01)


def test_zero_and_equal_matrices_give_equal_results() -> None:
    factors = decompose(torch.zeros(200, 200), MAX_RANK)
    assert least_rank(factors, "x", MAX_RANK, 1e-3) == (1, 0.0)
    matrix = make_matrix(300, 90, 0.5, torch.float32)
    first, second = (halves(decompose(matrix, MAX_RANK), 5) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def test_time_is_estimated_before_and_watched_during_the_work() -> None:
    limits = ConversionLimits(1e-3, max_minutes=1.0)
    assert 0 < limits.check_estimate(1e6, "the work") < 1
    with pytest.raises(AdapterError, match=r"the work would take about \d+ minutes .*are 1 \("):
        limits.check_estimate(1e18, "the work")
    limits.check_time(time.monotonic(), "the work")
    with pytest.raises(AdapterError, match=r"the work was stopped after 2 minutes"):
        limits.check_time(time.monotonic() - 120, "the work")


def test_randomised_work_is_less_than_the_whole_decomposition() -> None:
    whole = flops(4096, 4096, 4096)
    assert flops(4096, 4096, 512) < whole / 8

"""FP8 products in the interpreter, alone and beside a shrink, and an engine's steps with them."""

from __future__ import annotations

import pytest
import torch

from kernels.e4m3 import quantize_reference, quantize_rows
from kernels.fp8_linear import fp8_linear_many, reference_product
from kernels.linear import linear
from tests.few_rows_cases import LACKING, RUNS
from tests.fp8_cases import both_fp8_products, quantised, relative
from tests.lora_kernel_cases import error_of, make_case

RANKS = (8, 20, 100, *LACKING, 16)


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half()


@pytest.mark.parametrize("width", [48, 336, 5000])
def test_rows_are_quantised_as_by_the_reference(width: int) -> None:
    x = drawn(7, width, seed=1) * drawn(7, width, seed=2).exp()
    x[3] = 0
    found, wanted = quantize_rows(x), quantize_reference(x)
    assert torch.equal(found.values.double(), wanted.values.double())
    assert torch.equal(found.scales, wanted.scales)


# The last shape has K in two parts.
@pytest.mark.parametrize(("height", "width"), [(48, 1040), (200, 336), (32, 2064)])
@pytest.mark.parametrize("rows", [1, 8, 40])
def test_a_product_is_the_reference_s(height: int, width: int, rows: int) -> None:
    x, bias = drawn(rows, width, seed=3), drawn(height, seed=4)
    weight = quantised(drawn(height, width, seed=5) * width**-0.5)
    for own in (None, bias):
        y = linear(x, weight, own)
        wanted = reference_product(quantize_reference(x), weight, own, x.dtype)
        assert relative(y, wanted) < 3e-4
        many = fp8_linear_many(x, weight, own)
        assert relative(many, wanted) < 3e-4
        assert torch.equal(fp8_linear_many(x[:1], weight, own), many[:1])
        if rows <= 8:
            assert torch.equal(linear(x[:1], weight, own), y[:1])


@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize(("in_features", "sizes"), [(768, (32, 16, 16)), (608, (48,))])
def test_a_product_has_the_same_bits_beside_a_shrink_of_unquantised_rows(
    runs: str, in_features: int, sizes: tuple[int, ...]
) -> None:
    case = make_case(
        RANKS, RUNS[runs], in_features=in_features, sizes=sizes, dtype=torch.float16, max_tokens=8
    )
    for plan in (case.plan(large=False), case.plan(graph_rows=case.x.shape[0]), case.plan()):
        alone, beside, wanted, y = both_fp8_products(case, None, plan)
        assert plan.max_large or torch.equal(alone, beside)
        assert relative(alone, wanted) < 3e-4
        assert relative(beside, wanted) < 3e-4
        assert not case.delta().any() or error_of(case, y) < 2e-3
        assert torch.equal(y[case.base_rows()], case.y[case.base_rows()])

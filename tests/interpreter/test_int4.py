"""4-bit products in the interpreter, alone and beside a shrink."""

from __future__ import annotations

import pytest
import torch

from kernels.int4_linear import int4_linear_many
from kernels.linear import linear
from kernels.triton_int4 import launch_write_out
from kernels.triton_int4_mid import MidTile, launch_int4_mid
from tests.few_rows_cases import LACKING, RUNS, both_products
from tests.fp8_cases import relative
from tests.int4_cases import FORMATS, drawn_rows, exact_product
from tests.lora_kernel_cases import error_of, make_case

RANKS = (8, 20, 100, *LACKING, 16)


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half()


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("height", "width"), [(80, 1056), (144, 336), (32, 48)])
def test_a_product_is_that_of_the_values(form: str, height: int, width: int) -> None:
    weight, bias = drawn_rows(height, width, FORMATS[form]), drawn(height, seed=4)
    x = drawn(66, width, seed=3)
    wanted = exact_product(x, weight)
    for rows in (1, 8, 66):
        for own in (None, bias):
            expected = wanted[:rows] if own is None else wanted[:rows] + own.double()
            assert relative(linear(x[:rows], weight, own), expected) < 3e-4, (rows, own is None)
    few, many = linear(x[:8], weight, None), int4_linear_many(x, weight, None)
    assert torch.equal(linear(x[:1], weight, None), few[:1])
    assert torch.equal(int4_linear_many(x[:1], weight, None), many[:1])
    assert torch.equal(int4_linear_many(x[:20], weight, None), many[:20])


@pytest.mark.parametrize("splits", [1, 2, 8])
def test_parts_of_k_add_up(splits: int) -> None:
    weight = drawn_rows(160, 1500, FORMATS["groups of 64, zero points"])
    x, bias = drawn(17, 1500, seed=3), drawn(160, seed=4)
    tile = MidTile(16, 4, 2, step=32)
    y = launch_int4_mid(x, weight, bias, tile, splits)
    assert relative(y, exact_product(x, weight, bias)) < 3e-4


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_values_are_written_out_rounded_once(form: str, dtype: torch.dtype) -> None:
    for height, width in ((20, 1056), (33, 336), (16, 48)):
        weight = drawn_rows(height, width, FORMATS[form])
        exact = weight.float()
        if weight.order is not None:
            exact = exact[:, weight.order]
        assert torch.equal(launch_write_out(weight, dtype), exact.to(dtype))
        assert torch.equal(launch_write_out(weight, dtype, 3, 14), exact[3:14].to(dtype))


@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize(
    ("in_features", "sizes", "form"),
    [
        (768, (32, 16, 16), "groups of 32, zero points, sorted"),
        (608, (48,), "groups of 128"),
    ],
)
def test_a_product_has_the_same_bits_beside_a_shrink_of_the_same_rows(
    runs: str, in_features: int, sizes: tuple[int, ...], form: str
) -> None:
    case = make_case(
        RANKS, RUNS[runs], in_features=in_features, sizes=sizes, dtype=torch.float16, max_tokens=8
    )
    weight = drawn_rows(sum(sizes), in_features, FORMATS[form])
    wanted = exact_product(case.x, weight)
    for plan in (case.plan(large=False), case.plan(graph_rows=case.x.shape[0]), case.plan()):
        alone, beside, y = both_products(case, weight, None, plan)
        assert plan.max_large or torch.equal(alone, beside)
        assert relative(alone, wanted) < 3e-4
        assert relative(beside, wanted) < 3e-4
        assert not case.delta().any() or error_of(case, y) < 2e-3
        assert torch.equal(y[case.base_rows()], case.y[case.base_rows()])

"""Products, norms, RoPE and SiLU of few rows with adapters, in the interpreter."""

from __future__ import annotations

import pytest
import torch

from kernels.linear import linear
from kernels.rope_write import QueryScaling
from tests.few_rows_cases import (
    LACKING,
    MORE_RUNS,
    RUNS,
    assert_agrees,
    both_products,
    double_norms,
    draw_weight,
    norms,
    products,
    turns,
)
from tests.lora_kernel_cases import LoraCase, error_of, make_case

RANKS = (8, 20, 100, *LACKING, 16)


def build(runs: str, in_features: int, sizes: tuple[int, ...]) -> LoraCase:
    return make_case(
        RANKS, RUNS[runs], in_features=in_features, sizes=sizes, dtype=torch.float16, max_tokens=8
    )


@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize(("in_features", "sizes"), [(768, (32, 16, 16)), (600, (40,))])
def test_a_product_has_the_same_bits_beside_a_shrink(
    runs: str, in_features: int, sizes: tuple[int, ...]
) -> None:
    case = build(runs, in_features, sizes)
    weight = draw_weight(case)
    for bias in (None, weight[:, 0].contiguous()):
        for plan in (case.plan(large=False), case.plan(graph_rows=case.x.shape[0])):
            alone, beside, y = both_products(case, weight, bias, plan)
            assert torch.equal(alone, beside)
            wanted = torch.nn.functional.linear(case.x, weight, bias)
            torch.testing.assert_close(alone, wanted, rtol=1e-3, atol=2e-3)
            assert not case.delta().any() or error_of(case, y) < 2e-3
            assert torch.equal(y[case.base_rows()], case.y[case.base_rows()])


@pytest.mark.parametrize(("height", "width"), [(40, 1100), (8200, 48)])
def test_a_row_has_the_same_bits_among_any_number_of_rows(height: int, width: int) -> None:
    """Programs have one warp above 8192 rows of the weight, below they split the columns."""
    draw = torch.Generator().manual_seed(4)
    x = torch.randn(8, width, generator=draw).half()
    weight = torch.randn(height, width, generator=draw).half()
    together = linear(x, weight, None)
    wanted = torch.nn.functional.linear(x.double(), weight.double())
    assert float((together.double() - wanted).norm() / wanted.norm()) < 1e-3
    for rows in (1, 3):
        assert torch.equal(linear(x[:rows], weight, None), together[:rows])


@pytest.mark.parametrize("runs", RUNS)
def test_what_reads_a_product_adds_the_delta(runs: str) -> None:
    for hidden in (64, 80):
        case = build(runs, 64, (hidden,))
        for outcome in norms(case, case.plan(graph_rows=case.x.shape[0])):
            assert_agrees(outcome, case.base_rows(), 2e-3)
    case = build(runs, 64, (72, 72))
    for activation in ("silu", "gelu_tanh"):
        outcome = products(case, case.plan(large=False), activation)
        assert_agrees(outcome, case.base_rows(), 4e-3)
    case = build(runs, 64, (512, 256, 256))
    for outcome in turns(case, case.plan(graph_rows=case.x.shape[0])):
        assert_agrees(outcome, case.base_rows(), 4e-3)


@pytest.mark.parametrize("runs", ["one row of many pages", "some slices"])
def test_what_reads_a_product_of_another_family_adds_the_delta(runs: str) -> None:
    case = build(runs, 64, (80,))
    plan = case.plan(graph_rows=case.x.shape[0])
    found = norms(case, plan, 0.22) + norms(case, plan, weight_type=torch.float32)
    found += double_norms(case, plan) + double_norms(case, plan, has_next=False)
    for outcome in found:
        assert_agrees(outcome, case.base_rows(), 2e-3)
    case = build(runs, 64, (512, 256, 256))
    plan = case.plan(graph_rows=case.x.shape[0])
    found = turns(case, plan, 96) + turns(case, plan, 0)
    for outcome in found + turns(case, plan, scaling=QueryScaling(0.5, 8)):
        assert_agrees(outcome, case.base_rows(), 4e-3)


@pytest.mark.parametrize("runs", MORE_RUNS)
def test_a_norm_of_more_rows_adds_the_delta(runs: str) -> None:
    case = make_case(
        RANKS, MORE_RUNS[runs], in_features=64, sizes=(80,), dtype=torch.float16, max_tokens=64
    )
    for plan in (case.plan(large=False), case.plan(graph_rows=case.x.shape[0])):
        for outcome in norms(case, plan) + double_norms(case, plan):
            assert_agrees(outcome, case.base_rows(), 2e-3)

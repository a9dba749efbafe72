"""Affine rows in the multi-LoRA kernels, in the interpreter: against float64, and the fused ops
against the expand."""

from __future__ import annotations

import pytest
import torch

from tests.few_rows_cases import HEADS, assert_agrees, norms, products, turns
from tests.lora_affine_cases import RUNS, SHAPES, expand, make_affine_case, without_affine
from tests.lora_fused_cases import assert_turns_agree, rope_both_ways, silu_both_ways
from tests.lora_kernel_cases import LoraCase, error_of

FEW = ("few rows", "one row")


def build(runs: str, sizes: tuple[int, ...], in_features: int = 48) -> LoraCase:
    most = 8 if runs in FEW else None
    return make_affine_case(
        runs, in_features=in_features, sizes=sizes, dtype=torch.float16, max_tokens=most
    )


@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize("shape", SHAPES)
def test_sum_is_that_of_float64(runs: str, shape: str) -> None:
    case = build(runs, SHAPES[shape])
    for plan in (case.plan(), case.plan(large=False)):
        y = expand(case, plan)
        assert error_of(case, y) < 2e-3
        untouched = case.untouched()
        assert torch.equal(y[untouched], case.y[untouched])


@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize("width", [16, 264])
def test_silu_mul_is_that_of_the_sums(runs: str, width: int) -> None:
    fused, apart = silu_both_ways(build(runs, (width, width)))
    torch.testing.assert_close(fused, apart, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 128), (3, 1, 24)])
def test_rope_is_that_of_the_sums(runs: str, heads: int, kv_heads: int, head_dim: int) -> None:
    kv_size = kv_heads * head_dim
    case = build(runs, (heads * head_dim, kv_size, kv_size))
    for turned in rope_both_ways(case, heads, kv_heads, head_dim):
        assert_turns_agree(turned)


@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize("rotary_dim", [24, 0])
def test_rope_of_a_part_of_a_head_is_that_of_the_sums(runs: str, rotary_dim: int) -> None:
    case = build(runs, (4 * 64, 2 * 64, 2 * 64))
    for turned in rope_both_ways(case, 4, 2, 64, rotary_dim=rotary_dim):
        assert_turns_agree(turned)


@pytest.mark.parametrize("runs", FEW)
def test_ops_of_few_rows_are_those_of_the_sums(runs: str) -> None:
    heads, kv_heads, head_dim = HEADS
    kv_size = kv_heads * head_dim
    one, two = build(runs, (72,)), build(runs, (80, 80))
    three = build(runs, (heads * head_dim, kv_size, kv_size))
    outcomes = [
        *((outcome, one) for outcome in norms(one, one.plan(large=False))),
        (products(two, two.plan(large=False)), two),
        *((outcome, three) for outcome in turns(three, three.plan(large=False))),
    ]
    for outcome, case in outcomes:
        assert_agrees(outcome, case.base_rows(), 4e-3)


@pytest.mark.parametrize("runs", RUNS)
def test_rows_without_affine_rows_keep_their_bits_beside_them(runs: str) -> None:
    case = build(runs, (64, 32, 32))
    plain = torch.zeros(len(case.y), dtype=torch.bool)
    row = 0
    for adapter, rows in case.runs:
        plain[row : row + rows] = adapter in (None, 0)
        row += rows
    found = expand(case, case.plan())
    expected = expand(without_affine(case), case.plan())
    assert torch.equal(found[plain], expected[plain])

"""The multi-LoRA kernels over adapters in int8, in the interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.few_rows_cases import (
    LACKING,
    MORE_RUNS,
    assert_agrees,
    both_products,
    double_norms,
    draw_weight,
    norms,
    products,
    turns,
)
from tests.few_rows_cases import (
    RUNS as FEW_RUNS,
)
from tests.interpreter.test_lora_fused import RANKS, RUNS, check
from tests.interpreter.test_lora_shrink_expand import MIXES, run
from tests.interpreter.test_lora_vocabulary import embed, head
from tests.lora_affine_cases import expand
from tests.lora_fused_cases import assert_turns_agree, rope_both_ways, silu_both_ways
from tests.lora_kernel_cases import LoraCase, Run, error_of, make_case
from tests.lora_vocabulary_cases import MIXES as VOCABULARY
from tests.lora_vocabulary_cases import make_vocabulary_case

F16 = torch.float16


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("sizes", [(32,), (48, 16, 16)])
def test_the_delta_is_that_of_float64(mix: str, sizes: tuple[int, ...]) -> None:
    ranks, runs = MIXES[mix]
    case = make_case(ranks, runs, in_features=48, sizes=sizes, dtype=F16, is_int8=True)
    y = run(case)
    assert error_of(case, y) < 2e-3
    untouched = case.untouched()
    assert torch.equal(y[untouched], case.y[untouched])


@pytest.mark.parametrize("runs", RUNS)
def test_silu_mul_is_that_of_the_sums(runs: str) -> None:
    case = make_case(RANKS, RUNS[runs], in_features=32, sizes=(264, 264), dtype=F16, is_int8=True)
    check(runs, *silu_both_ways(case))


@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(32, 32), (96, 32), (64, 0)])
def test_rope_is_that_of_the_sums(runs: str, head_dim: int, rotary_dim: int) -> None:
    sizes = (3 * head_dim, head_dim, head_dim)
    case = make_case(RANKS, RUNS[runs], in_features=32, sizes=sizes, dtype=F16, is_int8=True)
    for turned in rope_both_ways(case, 3, 1, head_dim, rotary_dim=rotary_dim):
        assert_turns_agree(turned)


def test_affine_rows_are_read_in_the_activations_type() -> None:
    ranks, runs = (8, 20), ((0, 3), (1, 2), (None, 1), (1, 66))
    case = make_case(
        ranks, runs, in_features=32, sizes=(64, 32), dtype=F16, affine=(1, 2), is_int8=True
    )
    assert error_of(case, expand(case, case.plan())) < 2e-3


@pytest.mark.parametrize("mix", VOCABULARY)
@pytest.mark.parametrize(("vocab", "piece"), [(300, 128), (512, 256)])
def test_the_vocabulary_s_delta_is_that_of_float64(mix: str, vocab: int, piece: int) -> None:
    for kind, add in (("head", head), ("embedding", embed)):
        case = make_vocabulary_case(mix, kind, vocab=vocab, piece=piece, hidden=48, is_int8=True)
        found = add(case)
        assert case.error_of(found) < 2e-3
        assert torch.equal(found[case.untouched()], case.y[case.untouched()])


def few(runs: tuple[Run, ...], in_features: int, sizes: tuple[int, ...]) -> LoraCase:
    return make_case(
        (8, 20, 100, *LACKING, 16),
        runs,
        in_features=in_features,
        sizes=sizes,
        dtype=F16,
        max_tokens=64,
        is_int8=True,
    )


@pytest.mark.parametrize("runs", FEW_RUNS.values(), ids=FEW_RUNS)
def test_kernels_of_few_rows_add_the_delta(runs: tuple[Run, ...]) -> None:
    case = few(runs, 600, (40,))
    plan = case.plan(graph_rows=case.x.shape[0])
    alone, beside, y = both_products(case, draw_weight(case), None, plan)
    assert torch.equal(alone, beside)
    assert not case.delta().any() or error_of(case, y) < 2e-3
    case = few(runs, 64, (72, 72))
    assert_agrees(products(case, case.plan(large=False)), case.base_rows(), 4e-3)
    case = few(runs, 64, (512, 256, 256))
    for outcome in turns(case, case.plan(graph_rows=case.x.shape[0])):
        assert_agrees(outcome, case.base_rows(), 4e-3)


@pytest.mark.parametrize("runs", [*FEW_RUNS.values(), *MORE_RUNS.values()])
def test_norms_add_the_delta(runs: tuple[Run, ...]) -> None:
    case = few(runs, 64, (80,))
    plan = case.plan(graph_rows=case.x.shape[0])
    for outcome in norms(case, plan) + double_norms(case, plan):
        assert_agrees(outcome, case.base_rows(), 2e-3)

"""Adapters in int8 on a GPU: kernels against float64 and each other, engines against a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
import torch

from tests.engine_helpers import make_base
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
from tests.lora_fused_cases import assert_turns_agree, rope_both_ways, silu_both_ways
from tests.lora_kernel_cases import LoraCase, Run, error_of, make_case
from tests.lora_vocabulary_cases import MIXES as VOCABULARY
from tests.lora_vocabulary_cases import make_vocabulary_case
from tests.narrow_engines import NarrowEngine
from tests.test_lora_kernels_on_cuda import MIXES, QKV, run
from tests.test_lora_vocabulary_on_cuda import run as add_delta

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
RANKS = (8, 20, 100, *LACKING, 16)
TOLERANCE = 0.08
TYPES = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 1e-5}


def build(mix: str, dtype: torch.dtype = torch.bfloat16, **shape: object) -> LoraCase:
    ranks, runs = MIXES[mix]
    return make_case(ranks, runs, device="cuda", dtype=dtype, is_int8=True, **shape)  # type: ignore[arg-type]


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("in_features", "sizes"), [(1024, QKV), (576, (200,)), (4096, (1536, 1536)), (14336, (4096,))]
)
def test_the_delta_is_that_of_float64(
    mix: str, dtype: torch.dtype, in_features: int, sizes: tuple[int, ...]
) -> None:
    case = build(mix, dtype, in_features=in_features, sizes=sizes)
    for plan in (case.plan(), case.plan(large=False)):
        y = run(case, plan)
        assert error_of(case, y) < TYPES[dtype]
        untouched = case.untouched()
        assert torch.equal(y[untouched], case.y[untouched])


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("width", [4096, 1536, 200])
@pytest.mark.parametrize("large", [True, False])
def test_silu_mul_is_that_of_the_sums_to_the_bit(mix: str, width: int, large: bool) -> None:
    case = build(mix, in_features=512, sizes=(width, width))
    fused, apart = silu_both_ways(case, large=large)
    assert torch.equal(fused, apart)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotary_dim"),
    [(8, 2, 128, 128), (4, 4, 64, 64), (4, 1, 96, 32), (4, 2, 256, 256), (3, 1, 80, 80)],
)
def test_rope_is_that_of_the_sums(
    mix: str, heads: int, kv_heads: int, head_dim: int, rotary_dim: int
) -> None:
    sizes = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
    case = build(mix, in_features=512, sizes=sizes)
    for large in (True, False):
        for turned in rope_both_ways(
            case, heads, kv_heads, head_dim, large=large, rotary_dim=rotary_dim
        ):
            assert_turns_agree(turned)


def few(runs: tuple[Run, ...], in_features: int, sizes: tuple[int, ...]) -> LoraCase:
    return make_case(
        RANKS,
        runs,
        in_features=in_features,
        sizes=sizes,
        dtype=torch.bfloat16,
        device="cuda",
        max_tokens=64,
        is_int8=True,
    )


@pytest.mark.parametrize(
    ("in_features", "sizes"), [(4096, (512, 128, 128)), (14336, (256,)), (328, (200,))]
)
def test_a_product_has_the_same_bits_beside_a_shrink(
    in_features: int, sizes: tuple[int, ...]
) -> None:
    for runs in RUNS.values():
        case = few(runs, in_features, sizes)
        for plan in (case.plan(large=False), case.plan(graph_rows=case.x.shape[0])):
            alone, beside, y = both_products(case, draw_weight(case), None, plan)
            assert torch.equal(alone, beside)
            assert not case.delta().any() or error_of(case, y) < 8e-3


def test_what_reads_a_product_adds_the_delta() -> None:
    for runs in (*RUNS.values(), *MORE_RUNS.values()):
        for hidden in (4096, 576):
            case = few(runs, 512, (hidden,))
            plan = case.plan(graph_rows=case.x.shape[0])
            for outcome in norms(case, plan) + double_norms(case, plan):
                assert_agrees(outcome, case.base_rows(), 4e-2)
    for runs in RUNS.values():
        case = few(runs, 512, (1024, 1024))
        assert_agrees(products(case, case.plan(large=False)), case.base_rows(), 2e-2)
        case = few(runs, 512, (512, 256, 256))
        for outcome in turns(case, case.plan(graph_rows=case.x.shape[0])):
            assert_agrees(outcome, case.base_rows(), 2e-2)


@pytest.mark.parametrize("mix", VOCABULARY)
@pytest.mark.parametrize("kind", ["head", "embedding"])
def test_the_vocabulary_s_delta_is_that_of_float64(mix: str, kind: str) -> None:
    case = make_vocabulary_case(
        mix,
        kind,
        vocab=5000,
        piece=2048,
        hidden=1024,
        dtype=torch.bfloat16,
        device="cuda",
        is_int8=True,
    )
    found = add_delta(case)
    assert case.error_of(found) < 8e-3
    assert torch.equal(found[case.untouched()], case.y[case.untouched()])


# -- engines ------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[16, 128], ids=["small heads", "heads of 128"])
def base(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    folder = tmp_path_factory.mktemp("models") / "base"
    return make_base(folder, num_hidden_layers=2, head_dim=request.param)


class TestEngine(NarrowEngine):
    tolerance = TOLERANCE
    settings: ClassVar[dict[str, object]] = {"lora_dtype": "int8"}

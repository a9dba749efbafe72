"""FP8 linears on a GPU: kernels against the scheme in float64, and engines with graphs."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
import torch

from engine.runner import ModelRunner
from kernels.e4m3 import quantize_reference, quantize_rows
from kernels.fp8_linear import fp8_linear_many
from kernels.linear import linear
from tests.engine_helpers import make_base, make_runner
from tests.few_rows_cases import LACKING, MORE_RUNS, RUNS
from tests.fp8_cases import both_fp8_products, quantised, relative, scheme_product
from tests.layer_chains import (
    LayerChain,
    assert_overlap_changes_no_bit,
    mixed_case,
    run_of_products,
)
from tests.lora_kernel_cases import error_of, make_case
from tests.narrow_engines import NarrowEngine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
        reason="needs a CUDA device with e4m3 products",
    ),
]
SHAPES = [(6144, 4096), (4096, 14336), (28672, 4096), (48, 80), (208, 576)]
ROWS = (1, 2, 8, 9, 16, 17, 33, 64, 65, 128, 129, 300)
RANKS = (8, 16, 200, *LACKING, 64)
# One rounding to bfloat16, and sums of 128 products of which Hopper keeps 14 bits.
LARGEST_ERROR = 3e-3
# Of log-probabilities. An activation that rounds to another bfloat16 can round to another e4m3, 16
# times coarser: on a CPU, engines in bfloat16 and float32 differ by 0.28, without FP8 by 0.06.
TOLERANCE = 0.6


def drawn(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(torch.bfloat16)


# -- kernels ------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [48, 4096, 14336, 28672])
def test_rows_are_quantised_as_by_the_reference(width: int) -> None:
    x = drawn(70, width) * drawn(70, width).exp()
    x[3] = 0
    found, wanted = quantize_rows(x), quantize_reference(x)
    assert torch.equal(found.values.view(torch.uint8) & 127, wanted.values.view(torch.uint8) & 127)
    assert torch.equal(found.values.float(), wanted.values.float())
    assert torch.equal(found.scales, wanted.scales)
    on_host = quantize_reference(x.cpu())
    assert torch.equal(on_host.values.float(), wanted.values.float().cpu())
    assert torch.equal(on_host.scales, wanted.scales.cpu())


@pytest.mark.parametrize(("height", "width"), SHAPES)
def test_a_product_is_that_of_the_scheme(height: int, width: int) -> None:
    weight, bias = drawn(height, width, scale=width**-0.5), drawn(height)
    rows, x = quantised(weight), drawn(max(ROWS), width)
    wanted = scheme_product(x, weight, None)
    for count in ROWS:
        for own in (None, bias):
            y = linear(x[:count], rows, own)
            expected = wanted[:count] if own is None else wanted[:count] + own.double()
            assert y.dtype == torch.bfloat16
            assert relative(y, expected) < LARGEST_ERROR, (count, own is None)


@pytest.mark.parametrize(("height", "width"), SHAPES)
def test_a_row_has_the_same_bits_among_few_rows_and_among_more(height: int, width: int) -> None:
    rows, x = quantised(drawn(height, width, scale=width**-0.5)), drawn(128, width)
    few, many = linear(x[:8], rows, None), linear(x, rows, None)
    for count in range(1, 9):
        assert torch.equal(linear(x[:count], rows, None), few[:count]), count
    for count in (9, 16, 17, 32, 33, 64, 65, 100):
        assert torch.equal(linear(x[:count], rows, None), many[:count]), count
        assert torch.equal(linear(x[128 - count :], rows, None), many[128 - count :]), count


def test_small_integers_are_exact() -> None:
    for count in (3, 8, 40, 128, 200):
        x = torch.randint(-1, 2, (count, 4096), device="cuda").bfloat16()
        x *= torch.rand(count, 4096, device="cuda") < 0.02
        weight = torch.randint(-1, 2, (512, 4096), device="cuda").bfloat16()
        y = linear(x, quantised(weight), None)
        assert torch.equal(y.double(), x.double() @ weight.double().T), count


def test_nan_stays_in_its_row() -> None:
    rows = quantised(drawn(512, 4096))
    for count in (5, 40, 200):
        x = drawn(count, 4096)
        clean = linear(x, rows, None)
        x[2, 77], x[4, 9] = float("nan"), float("inf")
        y = linear(x, rows, None)
        assert bool(y[[2, 4]].isnan().all())
        others = [i for i in range(count) if i not in (2, 4)]
        assert torch.equal(y[others], clean[others])


@pytest.mark.parametrize(
    ("in_features", "sizes"), [(4096, (512, 128, 128)), (14336, (256,)), (336, (208,))]
)
@pytest.mark.parametrize("runs", [*RUNS, *(f"more: {name}" for name in MORE_RUNS)])
def test_a_product_has_the_same_bits_beside_a_shrink_of_unquantised_rows(
    in_features: int, sizes: tuple[int, ...], runs: str
) -> None:
    name = runs.removeprefix("more: ")
    case = make_case(
        RANKS,
        RUNS[name] if name == runs else MORE_RUNS[name],
        in_features=in_features,
        sizes=sizes,
        dtype=torch.bfloat16,
        device="cuda",
        max_tokens=8 if name == runs else 64,
    )
    bias = drawn(sum(sizes))
    for plan in (case.plan(large=False), case.plan(graph_rows=case.x.shape[0])):
        alone, beside, wanted, y = both_fp8_products(case, bias, plan)
        assert torch.equal(alone, beside)
        assert relative(alone, wanted) < LARGEST_ERROR
        assert not case.delta().any() or error_of(case, y) < 8e-3
        assert torch.equal(y[case.base_rows()], case.y[case.base_rows()])


@pytest.mark.parametrize("rows", [8, 9, 64, 96])
def test_one_graph_serves_any_mix(rows: int) -> None:
    """20 replays with other adapters and rows."""
    first = mixed_case(rows)
    chain = LayerChain(first, quantised(drawn(1024, 1024, scale=1 / 32)))
    chain.run(chain.plan)
    chain.capture()
    chain.assert_replays_serve_any_mix(20)


@pytest.mark.parametrize("rows", [3, 40])
def test_overlapped_kernels_have_the_bits_of_kernels_in_turn(rows: int) -> None:
    layers = [
        (quantised(drawn(14336, 4096, scale=1 / 64)), quantised(drawn(4096, 14336, scale=1 / 120)))
        for _ in range(4)
    ]
    assert_overlap_changes_no_bit(run_of_products(drawn(rows, 4096), drawn(4096), layers))


def test_the_kernels_of_many_rows_take_few_as_well() -> None:
    rows, x = quantised(drawn(512, 1024)), drawn(20, 1024)
    many = fp8_linear_many(x, rows, None)
    for count in (1, 8):
        assert torch.equal(fp8_linear_many(x[:count], rows, None), many[:count])


# -- engines ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("models") / "base", num_hidden_layers=2)


class TestEngine(NarrowEngine):
    tolerance = TOLERANCE
    settings: ClassVar[dict[str, object]] = {"quantization": "fp8"}

    def test_the_layers_take_half_of_the_bytes(self, base: Path, runner: ModelRunner) -> None:
        plain = make_runner(base, "cuda", dtype="bfloat16", block_size=16, num_blocks=16)

        def size(one: ModelRunner) -> int:
            layers = one._rank.weights.layers
            return sum(matrix.nbytes for layer in layers for matrix in (layer.qkv, layer.down))

        assert 0.5 < size(runner) / size(plain) < 0.56

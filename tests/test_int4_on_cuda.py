"""4-bit linears on a GPU: kernels against the values in float64, and engines with graphs."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
import torch

from engine.runner import ModelRunner
from kernels.int4 import Int4Format, Int4Rows, Integers, empty_int4
from kernels.int4_linear import MAX_MID_ROWS, MAX_WIDE_ROWS, int4_linear_many
from kernels.linear import linear
from kernels.triton_int4 import launch_write_out
from kernels.triton_int4_mid import MidTile, launch_int4_mid
from tests.engine_agreement import (
    TOLERANCE,
    make_adapters,
)
from tests.engine_helpers import make_base
from tests.few_rows_cases import LACKING, MORE_RUNS, RUNS, both_products
from tests.fp8_cases import relative
from tests.int4_bases import gptq
from tests.int4_cases import FORMATS, drawn_rows, exact_product
from tests.layer_chains import (
    LayerChain,
    assert_overlap_changes_no_bit,
    mixed_case,
    run_of_products,
)
from tests.lora_kernel_cases import error_of, make_case
from tests.narrow_engines import NarrowEngine
from tests.quantized_bases import write_quantized
from tests.test_engine_gptq_awq import gptq_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0),
        reason="needs a CUDA device with bfloat16 products",
    ),
]
SHAPES = [(6144, 4096), (4096, 14336), (8704, 4096), (48, 80), (208, 576)]
TYPED_SHAPES = [(torch.bfloat16, shape) for shape in SHAPES] + [
    (torch.float16, shape) for shape in SHAPES[3:]
]
ROWS = (1, 2, 8, 9, 16, 17, 33, 64, 65, 128, 200, 256, 257, 600)
RANKS = (8, 16, 200, *LACKING, 64)
# One rounding to bfloat16; where the weight is written out two, the weight's first.
LARGEST_ERROR = 3e-3


def drawn(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(torch.bfloat16)


# -- kernels ------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("dtype", "shape"), TYPED_SHAPES)
def test_a_product_is_that_of_the_values(
    form: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    height, width = shape
    weight = drawn_rows(height, width, FORMATS[form], "cuda")
    x, bias = drawn(max(ROWS), width).to(dtype), drawn(height).to(dtype)
    wanted = exact_product(x, weight)
    for count in ROWS:
        for own in (None, bias):
            y = linear(x[:count], weight, own)
            expected = wanted[:count] if own is None else wanted[:count] + own.double()
            assert y.dtype == dtype
            assert relative(y, expected) < LARGEST_ERROR, (count, own is None)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("height", "width"), SHAPES)
def test_a_row_has_the_same_bits_among_few_rows_and_among_more(
    form: str, height: int, width: int
) -> None:
    weight = drawn_rows(height, width, FORMATS[form], "cuda")
    on_hopper = torch.cuda.get_device_capability()[0] == 9
    x = drawn(MAX_WIDE_ROWS if on_hopper else MAX_MID_ROWS, width)
    few, many = linear(x[:8], weight, None), linear(x, weight, None)
    for count in range(1, 9):
        assert torch.equal(linear(x[:count], weight, None), few[:count]), count
    for count in (9, 16, 17, 32, 33, 64, 65, 100, 128):
        assert torch.equal(linear(x[:count], weight, None), many[:count]), count
        assert torch.equal(linear(x[-count:], weight, None), many[-count:]), count
    for count in (1, 8):
        assert torch.equal(int4_linear_many(x[:count], weight, None), many[:count]), count


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_values_are_written_out_rounded_once(form: str, dtype: torch.dtype) -> None:
    for height, width in ((208, 576), (4096, 4096), (20, 48)):
        weight = drawn_rows(height, width, FORMATS[form], "cuda")
        exact = weight.float()
        if weight.order is not None:
            exact = exact[:, weight.order]
        assert torch.equal(launch_write_out(weight, dtype), exact.to(dtype))
        assert torch.equal(launch_write_out(weight, dtype, 3, 14), exact[3:14].to(dtype))


def small_integers(group_size: int) -> Int4Rows:
    form = Int4Format(group_size, torch.float16, has_zeros=True)
    groups = 4096 // group_size
    q = torch.randint(0, 16, (512, 4096)).to(torch.uint8)
    zeros = torch.randint(0, 16, (512, groups)).to(torch.uint8)
    weight = empty_int4(512, 4096, form, torch.device("cuda"))
    weight.write_(Integers(q, torch.full((512, groups), 0.5), zeros))
    return weight


def with_sums_below_256(count: int) -> torch.Tensor:
    x = torch.randint(-1, 2, (count, 4096), device="cuda").bfloat16()
    return x * (torch.rand(count, 4096, device="cuda") < 0.003)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_integers_are_exact(dtype: torch.dtype) -> None:
    weight = small_integers(128)
    for count in (3, 8, 40, 64, 200, 300):
        x = with_sums_below_256(count).to(dtype)
        y = linear(x, weight, None)
        wanted = exact_product(x, weight)
        assert wanted.abs().max() < 128
        assert torch.equal(y.double(), wanted), count


@pytest.mark.parametrize("step", [64, 128])
@pytest.mark.parametrize("shape", [(32, 4), (16, 8)])
def test_a_tile_of_any_kind_is_exact(step: int, shape: tuple[int, int]) -> None:
    weight = small_integers(128)
    for count in (9, 32, 64, 200):
        x = with_sums_below_256(count)
        for splits in (1, 4):
            y = launch_int4_mid(x, weight, None, MidTile(*shape, 3, step), splits)
            assert torch.equal(y.double(), exact_product(x, weight)), (count, splits)


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9, reason="needs Hopper"
)
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("shares", [1, 2, 4])
def test_a_wide_tile_of_any_kind_is_exact(shares: int, group_size: int) -> None:
    """A wide product with its left side in registers is one that ptxas before 13.3 compiles wrongly
    in a pipelined loop."""
    from kernels.gluon_int4_linear import WideTile, launch_int4_wide

    weight = small_integers(group_size)
    for count in (1, 9, 32, 64, 200):
        x = with_sums_below_256(count)
        for splits in (1, 3, 4):
            y = launch_int4_wide(x, weight, None, WideTile(shares, splits))
            assert torch.equal(y.double(), exact_product(x, weight)), (count, splits)


def test_nan_stays_in_its_row() -> None:
    weight = drawn_rows(512, 4096, FORMATS["groups of 64, zero points"], "cuda")
    for count in (5, 40, 200, 300):
        x = drawn(count, 4096)
        clean = linear(x, weight, None)
        x[2, 77], x[4, 9] = float("nan"), float("inf")
        y = linear(x, weight, None)
        assert not y[2].isfinite().any()
        assert not y[4].isfinite().all()
        others = [i for i in range(count) if i not in (2, 4)]
        assert torch.equal(y[others], clean[others])


@pytest.mark.parametrize("form", ["groups of 128", "groups of 32, zero points, sorted"])
@pytest.mark.parametrize(
    ("in_features", "sizes"), [(4096, (512, 128, 128)), (14336, (256,)), (336, (208,))]
)
@pytest.mark.parametrize("runs", [*RUNS, *(f"more: {name}" for name in MORE_RUNS)])
def test_a_product_has_the_same_bits_beside_a_shrink_of_the_same_rows(
    form: str, in_features: int, sizes: tuple[int, ...], runs: str
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
    weight = drawn_rows(sum(sizes), in_features, FORMATS[form], "cuda")
    bias = drawn(sum(sizes))
    wanted = exact_product(case.x, weight, bias)
    for plan in (case.plan(large=False), case.plan(graph_rows=case.x.shape[0])):
        alone, beside, y = both_products(case, weight, bias, plan)
        assert torch.equal(alone, beside)
        assert relative(alone, wanted) < LARGEST_ERROR
        assert not case.delta().any() or error_of(case, y) < 8e-3
        assert torch.equal(y[case.base_rows()], case.y[case.base_rows()])


@pytest.mark.parametrize("rows", [8, 9, 64, 96])
def test_one_graph_serves_any_mix(rows: int) -> None:
    """20 replays with other adapters and rows."""
    first = mixed_case(rows)
    chain = LayerChain(first, drawn_rows(1024, 1024, FORMATS["groups of 128, sorted"], "cuda"))
    chain.run(chain.plan)
    chain.capture()
    chain.assert_replays_serve_any_mix(20)


@pytest.mark.parametrize("rows", [3, 40, 300])
def test_overlapped_kernels_have_the_bits_of_kernels_in_turn(rows: int) -> None:
    form = FORMATS["groups of 128"]
    layers = [
        (drawn_rows(14336, 4096, form, "cuda", i), drawn_rows(4096, 14336, form, "cuda", i + 9))
        for i in range(4)
    ]
    assert_overlap_changes_no_bit(run_of_products(drawn(rows, 4096), drawn(4096), layers))


# -- engines ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("models") / "base", num_hidden_layers=2)


@pytest.fixture(scope="module")
def base(plain: Path) -> Path:
    quantize = gptq(32, symmetric=False, is_sorted=True)
    folder = plain.parent / "gptq"
    return write_quantized(plain, folder, gptq_config(4, 32), quantize)[0]


class TestEngine(NarrowEngine):
    tolerance = TOLERANCE[torch.bfloat16]
    settings: ClassVar[dict[str, object]] = {"quantization": "auto"}
    settings_on_cpu: ClassVar[dict[str, object]] = {"quantization": "none"}  # dequantized

    @pytest.fixture(scope="class")
    @classmethod
    def adapters(cls, plain: Path) -> dict[str, Path]:
        """Makes them for the plain base: to read the other, transformers needs a package."""
        return make_adapters(plain)

    def test_auto_serves_the_integers(self, runner: ModelRunner) -> None:
        for layer in runner._rank.weights.layers:
            for matrix in (layer.qkv, layer.o, layer.gate_up, layer.down):
                assert isinstance(matrix, Int4Rows)

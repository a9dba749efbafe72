"""4-bit linears on a GPU: kernels against the values in float64, and engines with graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.device_step import DeviceSteps
from engine.runner import ModelRunner
from kernels.int4 import Int4Format, Int4Rows, Integers, empty_int4
from kernels.int4_linear import MAX_MID_ROWS, int4_linear_many
from kernels.linear import linear, linear_shrink
from kernels.lora_add_rms_norm import lora_add_rms_norm
from kernels.lora_plan import LoraPlan
from kernels.rms_norm import add_rms_norm
from kernels.triton_int4 import launch_write_out
from kernels.triton_int4_mid import MidTile, launch_int4_mid
from tests.engine_agreement import (
    OWNERS,
    TOLERANCE,
    Reply,
    assert_alike,
    make_adapters,
    make_engine,
    neighbours,
    probe,
    run_all,
)
from tests.engine_helpers import acquire, make_base, make_runner
from tests.few_rows_cases import LACKING, MORE_RUNS, RUNS
from tests.fp8_cases import relative
from tests.int4_bases import gptq
from tests.int4_cases import FORMATS, both_int4_products, drawn_rows, exact_product
from tests.lora_kernel_cases import error_of, make_case, with_drawn_runs, write_plan
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
ROWS = (1, 2, 8, 9, 16, 17, 33, 64, 65, 128, 200, 256, 257, 600)
RANKS = (8, 16, 200, *LACKING, 64)
# One rounding to bfloat16; of more than MAX_MID_ROWS rows two, the weight's first.
LARGEST_ERROR = 3e-3


def drawn(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(torch.bfloat16)


# -- kernels ------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("height", "width"), SHAPES)
def test_a_product_is_that_of_the_values(
    form: str, dtype: torch.dtype, height: int, width: int
) -> None:
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
    x = drawn(MAX_MID_ROWS, width)
    few, many = linear(x[:8], weight, None), linear(x, weight, None)
    for count in range(1, 9):
        assert torch.equal(linear(x[:count], weight, None), few[:count]), count
    for count in (9, 16, 17, 32, 33, 64, 65, 100, 129):
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_integers_are_exact(dtype: torch.dtype) -> None:
    form = Int4Format(128, torch.float16, has_zeros=True)
    q = torch.randint(0, 16, (512, 4096)).to(torch.uint8)
    zeros = torch.randint(0, 16, (512, 32)).to(torch.uint8)
    weight = empty_int4(512, 4096, form, torch.device("cuda"))
    weight.write_(Integers(q, torch.full((512, 32), 0.5), zeros))
    for count in (3, 8, 40, 64, 200, 300):
        x = torch.randint(-1, 2, (count, 4096), device="cuda").to(dtype)
        x *= torch.rand(count, 4096, device="cuda") < 0.003  # sums below 256
        y = linear(x, weight, None)
        wanted = exact_product(x, weight)
        assert wanted.abs().max() < 128
        assert torch.equal(y.double(), wanted), count


@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize("step", [64, 128])
@pytest.mark.parametrize("shape", [(32, 4), (16, 8)])
def test_a_tile_of_any_kind_is_exact(is_wide: bool, step: int, shape: tuple[int, int]) -> None:
    """The wide product, with its left side in registers in a pipelined loop, is one that ptxas
    before 13.3 may compile wrongly."""
    form = Int4Format(128, torch.float16, has_zeros=True)
    q = torch.randint(0, 16, (512, 4096)).to(torch.uint8)
    zeros = torch.randint(0, 16, (512, 32)).to(torch.uint8)
    weight = empty_int4(512, 4096, form, torch.device("cuda"))
    weight.write_(Integers(q, torch.full((512, 32), 0.5), zeros))
    for count in (9, 32, 64, 200):
        x = torch.randint(-1, 2, (count, 4096), device="cuda").bfloat16()
        x *= torch.rand(count, 4096, device="cuda") < 0.003  # sums below 256
        for splits in (1, 4):
            tile = MidTile(*shape, 3, step, is_wide=is_wide)
            y = launch_int4_mid(x, weight, None, tile, splits)
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
        alone, beside, y = both_int4_products(case, weight, bias, plan)
        assert torch.equal(alone, beside)
        assert relative(alone, wanted) < LARGEST_ERROR
        assert not case.delta().any() or error_of(case, y) < 8e-3
        assert torch.equal(y[case.base_rows()], case.y[case.base_rows()])


@pytest.mark.parametrize("rows", [8, 9, 64, 96])
def test_one_graph_serves_any_mix(rows: int) -> None:
    """A chain of layers whose tensors take each other's memory: 20 replays with other adapters and
    rows have the bits of the kernels in a row, and rows of the base those without adapters."""
    first = make_case(
        [8, 16, 64, 48] * 15,
        [(None, rows)],
        in_features=1024,
        sizes=(1024,),
        dtype=torch.bfloat16,
        device="cuda",
    )
    weight = drawn_rows(1024, 1024, FORMATS["groups of 128, sorted"], "cuda")
    norm = torch.ones_like(first.y[0])
    static = torch.from_numpy(write_plan(first, large=False)[0]).cuda()
    plan = LoraPlan.for_graph(static, rows, first.max_tokens, first.max_pages)

    def run(plan: LoraPlan | None) -> torch.Tensor:
        hidden, residual = first.x, first.y.clone()
        for _ in range(6):
            if plan is None:
                y = linear(hidden, weight, None)
                hidden, residual = add_rms_norm(y, residual, norm, 1e-5)
                continue
            y, bridge = linear_shrink(hidden, weight, None, first.site, plan)
            hidden, residual = lora_add_rms_norm(y, residual, norm, 1e-5, bridge, first.site, plan)
        return hidden

    run(plan)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(plan)
    draw = torch.Generator().manual_seed(3)
    for _ in range(20):
        case = with_drawn_runs(first, draw, longest=min(19, rows - 1))
        first.x.normal_()
        static.copy_(torch.from_numpy(write_plan(case, large=False)[0]))
        graph.replay()
        replayed = out.clone()
        assert torch.equal(replayed, run(case.plan(large=False)))
        base = case.base_rows()
        assert torch.equal(replayed[base], run(None)[base])
        assert not torch.equal(replayed, run(None))


@pytest.mark.parametrize("rows", [3, 40, 300])
def test_overlapped_kernels_have_the_bits_of_kernels_in_turn(rows: int) -> None:
    first, norm = drawn(rows, 4096), drawn(4096)
    form = FORMATS["groups of 128"]
    layers = [
        (drawn_rows(14336, 4096, form, "cuda", i), drawn_rows(4096, 14336, form, "cuda", i + 9))
        for i in range(4)
    ]

    def run(pause: Callable[[], None]) -> torch.Tensor:
        hidden, residual = first.clone(), torch.zeros_like(first)
        for up, down in layers:
            inner = linear(hidden, up, None)
            pause()
            added = linear(inner, down, None)
            pause()
            hidden, residual = add_rms_norm(added, residual, norm, 1e-5)
            pause()
        return hidden

    in_turn = run(torch.cuda.synchronize)
    assert in_turn.isfinite().all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        overlapped = run(lambda: None)
    for _ in range(20):
        graph.replay()
        assert torch.equal(overlapped, in_turn)


# -- engines ------------------------------------------------------------------------------------


def open_runner(base: Path, adapters: dict[str, Path], device: str, **more: object) -> ModelRunner:
    runner = make_runner(base, device, block_size=16, max_num_seqs=64, num_blocks=320, **more)
    for name, path in adapters.items():
        runner.load_adapter(name, path)
        acquire(runner, name)
    return runner


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("models") / "base", num_hidden_layers=2)


@pytest.fixture(scope="module")
def base(plain: Path) -> Path:
    quantize = gptq(32, symmetric=False, is_sorted=True)
    folder = plain.parent / "gptq"
    return write_quantized(plain, folder, gptq_config(4, 32), quantize)[0]


@pytest.fixture(scope="module")
def adapters(plain: Path) -> dict[str, Path]:
    return make_adapters(plain)


@pytest.fixture(scope="module")
def runner(base: Path, adapters: dict[str, Path]) -> ModelRunner:
    """Opens the engine of `quantization: auto`."""
    return open_runner(
        base, adapters, "cuda", backend="triton", dtype="bfloat16", quantization="auto"
    )


def test_auto_serves_the_integers(runner: ModelRunner) -> None:
    for layer in runner._weights.layers:
        for matrix in (layer.qkv, layer.o, layer.gate_up, layer.down):
            assert isinstance(matrix, Int4Rows)


def test_answers_are_those_of_the_dequantized_base_on_a_cpu(
    base: Path, adapters: dict[str, Path], runner: ModelRunner
) -> None:
    requests = [probe(i) for i in range(2 * len(OWNERS))]
    wide = open_runner(base, adapters, "cpu", dtype="float32", quantization="none")
    expected = run_all(make_engine(wide), requests)
    found = run_all(make_engine(runner), requests)
    for one in requests:
        assert_alike(found[one.request_id], expected[one.request_id], TOLERANCE[torch.bfloat16])


def test_a_request_gets_its_answer_in_any_company(runner: ModelRunner) -> None:
    probes = [probe(i) for i in range(6)]
    alone = {one.request_id: run_all(make_engine(runner), [one])[one.request_id] for one in probes}
    for count in (11, 58):
        replies = run_all(make_engine(runner), [*neighbours(count, count), *probes])
        for one in probes:
            assert_alike(replies[one.request_id], alone[one.request_id], TOLERANCE[torch.bfloat16])


def test_graphs_have_the_bits_of_kernels_one_by_one(runner: ModelRunner) -> None:
    """Steps of exactly a graph's size: 1, 4, 8, 32 and 64 sequences of one length."""
    assert isinstance(runner._steps, DeviceSteps)
    graphs, pieces = runner._steps._graphs, runner._steps._pieces

    def answers(count: int) -> dict[str, Reply]:
        return run_all(make_engine(runner), neighbours(count, 5, length=3))

    kept = graphs._graphs, pieces._pieces
    assert kept[0]
    pieces._pieces = {}
    try:
        for count in (1, 4, 8, 32, 64):
            replayed, graphs._graphs = answers(count), {}
            launched, graphs._graphs = answers(count), kept[0]
            assert replayed == launched, count
    finally:
        graphs._graphs, pieces._pieces = kept


def test_rows_of_the_base_keep_their_bits_beside_adapters(runner: ModelRunner) -> None:
    for count in (4, 30):
        own = neighbours(count, 7, length=5)
        own[0] = replace(own[0], adapter=None)
        bare = [replace(one, adapter=None) for one in own]
        together, alone = run_all(make_engine(runner), own), run_all(make_engine(runner), bare)
        of_base = [one.request_id for one in own if one.adapter is None]
        assert of_base
        for name in of_base:
            assert together[name] == alone[name]
        assert together != alone


def test_traffic_compiles_nothing(runner: ModelRunner) -> None:
    run_all(make_engine(runner), neighbours(40, 9))
    assert runner.num_late_compilations == 0

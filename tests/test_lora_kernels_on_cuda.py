"""The multi-LoRA kernels on a GPU, against float64, exact on small integers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.lora_plan import LoraPlan
from kernels.lora_shrink_expand import lora_expand_, lora_shrink
from kernels.rope_write import QueryScaling
from tests.lora_fused_cases import (
    assert_gated_agree,
    assert_turns_agree,
    rope_both_ways,
    silu_both_ways,
    turn_heads,
)
from tests.lora_kernel_cases import (
    BLANK,
    LoraCase,
    Rank,
    Run,
    error_of,
    make_case,
    with_drawn_runs,
    write_plan,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

QKV = (512, 128, 128)
MIXES: dict[str, tuple[tuple[Rank, ...], tuple[Run, ...]]] = {
    "one row": ((16,), ((0, 1),)),
    "nine rows": ((16,), ((0, 9),)),
    "ragged ranks": ((8, 16, 17, 64, 512), ((None, 3), (0, 1), (1, 20), (2, 5), (3, 16), (4, 2))),
    "many adapters": ((8, 16, 64) * 40, tuple((i, 1 + i % 2) for i in range(120))),
    "long runs": ((16, 40), ((None, 70), (0, 130), (1, 300), (None, 1))),
    "long runs of one page": ((16, 8), ((None, 70), (0, 130), (1, 66), (None, 1))),
    "prefill and decode": ((16, 64, 8), ((None, 1), (0, 2), (1, 513), (2, 64))),
    "some slices": (
        ((8, 0, 20), (0, 33, 16), (0, 0, 5), (0, 8, 0)),
        ((0, 5), (1, 12), (None, 1), (2, 70), (0, 66), (3, 130)),
    ),
    "some slices of one page": (((8, 0, 16), (0, 16, 1)), ((0, 5), (None, 9), (1, 70), (0, 80))),
    "weights": (
        ((8, 8, 20), (16, 33, 8), (0, 0, 5), (0, 8, 0)),
        (
            (((0, 0.5), (1, -2.0)), 12),
            (((1, 2.0), (0, 1.0)), 130),
            (0, 70),
            (((BLANK, 1.0), (2, 0.25), (3, 1.0)), 9),
            (((BLANK, 1.0), (3, 4.0), (2, 0.5)), 66),
        ),
    ),
}
MANY = [mix for mix in MIXES if mix != "one row"]  # few rows: test_few_rows_on_cuda.py


def build(mix: str, **options: object) -> LoraCase:
    ranks, runs = MIXES[mix]
    shape: dict[str, object] = {"in_features": 1024, "sizes": QKV, "dtype": torch.bfloat16}
    return make_case(ranks, runs, device="cuda", **(shape | options))  # type: ignore[arg-type]


def run(case: LoraCase, plan: LoraPlan) -> torch.Tensor:
    y = case.y.clone()
    lora_expand_(y, lora_shrink(case.x, case.site, plan), case.site, plan)
    return y


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(
    ("in_features", "sizes"), [(1024, QKV), (576, (200,)), (4096, (1536, 1536)), (14336, (4096,))]
)
def test_the_delta_is_that_of_float64(mix: str, in_features: int, sizes: tuple[int, ...]) -> None:
    case = build(mix, in_features=in_features, sizes=sizes)
    for plan in (case.plan(), case.plan(large=False)):
        y = run(case, plan)
        assert error_of(case, y) < 8e-3
        untouched = case.untouched()
        assert torch.equal(y[untouched], case.y[untouched])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_types(dtype: torch.dtype) -> None:
    case = build("ragged ranks", dtype=dtype)
    assert error_of(case, run(case, case.plan())) < (1e-5 if dtype == torch.float32 else 1e-3)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("in_features", [64, 128, 320])
def test_small_integers_are_exact(mix: str, in_features: int) -> None:
    """Every partial sum stays below 2^8 in bfloat16's eight bits: sparse weights see to it."""
    case = build(mix, in_features=in_features, integers=True)
    keep = torch.rand(case.x.shape, device="cuda") < 8 / in_features
    case.x.mul_(keep)
    for plan in (case.plan(), case.plan(large=False)):
        expected = (case.y.double() + case.delta()).to(torch.bfloat16)
        assert torch.equal(run(case, plan), expected)


def test_one_graph_serves_any_mix() -> None:
    """50 replays with other adapters, other runs and other rows: eager to the bit."""
    rows, sizes = 32, QKV
    first = make_case(
        [8, 16, 64, 48] * 10,
        [(None, rows)],
        in_features=1024,
        sizes=sizes,
        dtype=torch.bfloat16,
        device="cuda",
    )
    buffer, _ = write_plan(first, large=False)
    static = torch.from_numpy(buffer).cuda()
    plan = LoraPlan.for_graph(static, rows, first.max_tokens, first.max_pages)
    y = first.y.clone()

    def step() -> None:
        y.copy_(first.y)
        lora_expand_(y, lora_shrink(first.x, first.site, plan), first.site, plan)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    draw = torch.Generator().manual_seed(3)
    for _ in range(50):
        case = with_drawn_runs(first, draw, longest=19)
        first.x.normal_()
        static.copy_(torch.from_numpy(write_plan(case, large=False)[0]))
        graph.replay()
        replayed = y.clone()
        assert torch.equal(replayed, run(case, case.plan(large=False)))
        assert error_of(case, replayed) < 8e-3


def test_a_row_alone_has_the_bits_it_has_among_others() -> None:
    case = build("ragged ranks", in_features=4096)
    together = run(case, case.plan(large=False))
    row = 0
    for adapter, rows in case.runs:
        for _ in range(rows):
            here = slice(row, row + 1)
            alone = replace(case, x=case.x[here], y=case.y[here], runs=((adapter, 1),))
            assert torch.equal(run(alone, alone.plan()), together[here])
            row += 1


def test_nan_of_one_adapter_stays_with_its_rows() -> None:
    case = build("ragged ranks")
    clean = run(case, case.plan())
    for page in case.adapters[2]:
        for s in range(len(QKV)):
            a, b = case.site.a(page, s), case.site.b(page, s)
            assert a is not None
            assert b is not None
            a[0] = b[0] = float("nan")
    broken = run(case, case.plan())
    own = torch.zeros(case.x.shape[0], dtype=torch.bool, device="cuda")
    own[24:29] = True
    assert torch.equal(broken[~own], clean[~own])
    assert bool(broken[own].isnan().any(-1).all())


@pytest.mark.parametrize("mix", MANY)
@pytest.mark.parametrize("width", [512, 328, 332])
@pytest.mark.parametrize("large", [True, False])
def test_silu_mul_is_that_of_the_sums(mix: str, width: int, large: bool) -> None:
    case = build(mix, sizes=(width, width))
    fused, apart = silu_both_ways(case, large=large)
    if width % 8 == 0:
        assert_gated_agree(case, fused, apart)
    else:
        assert torch.equal(fused, apart)


@pytest.mark.parametrize("rank", [8, 16, 40])
def test_silu_mul_of_a_row_does_not_depend_on_the_rows_beside_it(rank: int) -> None:
    found = []
    for rows in range(1, 9):
        case = make_case(
            [rank, 16],
            [(0, rows), (1, 30)],
            in_features=1024,
            sizes=(328, 328),
            dtype=torch.bfloat16,
            device="cuda",
        )
        for name in ("x", "y"):  # other numbers of rows draw other rows
            tensor = getattr(case, name)
            tensor[0] = torch.linspace(-3, 3, tensor.shape[1], dtype=tensor.dtype, device="cuda")
        found.append(silu_both_ways(case, large=False)[0][0])
    assert all(torch.equal(row, found[0]) for row in found)


@pytest.mark.parametrize("mix", MANY)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(8, 4, 128), (9, 3, 64), (14, 2, 80)])
@pytest.mark.parametrize("large", [True, False])
def test_rope_is_that_of_the_sums(
    mix: str, heads: int, kv_heads: int, head_dim: int, large: bool
) -> None:
    """Heads without a delta to the bit for heads of 128. Otherwise an element may be a bfloat16
    apart (seen on an H200 in 3 of 42 cases): the compiler contracts a turn's products and sums as
    the layout suggests."""
    case = build(mix, sizes=(heads * head_dim, kv_heads * head_dim, kv_heads * head_dim))
    for fused, apart, untouched in rope_both_ways(case, heads, kv_heads, head_dim, large=large):
        bits = untouched if head_dim == 128 else torch.zeros_like(untouched)
        assert_turns_agree((fused, apart, bits))


VARIANTS: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "phi-4-mini": ((6, 2, 128), {"rotary_dim": 96}),
    "phi-3-mini": ((8, 8, 96), {}),
    "smollm3 without positions": ((8, 4, 128), {"rotary_dim": 0}),
    "ministral-3": ((8, 2, 128), {"scaling": QueryScaling(0.1, 8)}),
    "gemma-2": ((4, 2, 256), {}),
    "gemma-3": ((4, 1, 256), {"has_norm": True, "norm_type": torch.float32}),
}


@pytest.mark.parametrize("mix", ["nine rows", "ragged ranks", "long runs", "some slices"])
@pytest.mark.parametrize("name", VARIANTS)
def test_rope_of_other_families_is_that_of_the_sums(name: str, mix: str) -> None:
    (heads, kv_heads, head_dim), variant = VARIANTS[name]
    case = build(mix, sizes=(heads * head_dim, kv_heads * head_dim, kv_heads * head_dim))
    for large in (True, False):
        for turned in rope_both_ways(case, heads, kv_heads, head_dim, large=large, **variant):
            if "has_norm" in variant:
                # A unit in the last place of what is normed: squares add up in another order.
                torch.testing.assert_close(turned[0], turned[1], rtol=1e-2, atol=2e-2)
            else:
                bits = turned[2] if head_dim == 128 else torch.zeros_like(turned[2])
                assert_turns_agree((*turned[:2], bits))


@pytest.mark.parametrize("mix", ["nine rows", "long runs", "some slices of one page"])
def test_gelu_mul_is_that_of_the_sums(mix: str) -> None:
    for large in (True, False):
        case = build(mix, sizes=(328, 328))
        fused, apart = silu_both_ways(case, large=large, activation="gelu_tanh")
        assert_gated_agree(case, fused, apart)


HEADS = (8, 4)
TURNED = ((16, 17, 64, 8) * 8, (1024, 512, 512))  # ranks, sizes


def angles() -> torch.Tensor:
    """Returns [50, 2, 64]."""
    drawn = torch.rand(50, 64, generator=torch.Generator().manual_seed(6))
    return torch.stack((drawn.cos(), drawn.sin()), dim=1).cuda()


@pytest.mark.parametrize("in_features", [64, 320])
def test_small_integers_are_exact_in_heads(in_features: int) -> None:
    for mix in ("ragged ranks", "many adapters", "some slices"):
        case = build(mix, in_features=in_features, integers=True, sizes=TURNED[1])
        case.x.mul_(torch.rand(case.x.shape, device="cuda") < 8 / in_features)
        positions = torch.zeros(len(case.x), dtype=torch.int64, device="cuda")
        still = torch.stack((torch.ones(1, 64), torch.zeros(1, 64)), dim=1).cuda()
        expected = (case.y.double() + case.delta()).to(torch.bfloat16)
        for plan in (case.plan(), case.plan(large=False)):
            found = turn_heads(case, plan, *HEADS, positions, still)
            assert torch.equal(found.flatten(1), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_heads_of_other_types(dtype: torch.dtype) -> None:
    case = build("ragged ranks", dtype=dtype, sizes=TURNED[1])
    tolerance = 1e-4 if dtype == torch.float32 else 2**-6
    for fused, apart, untouched in rope_both_ways(case, *HEADS, 128, large=False):
        assert torch.equal(fused[untouched], apart[untouched])
        assert float((fused - apart).float().norm() / apart.float().norm()) < tolerance


def test_one_graph_turns_any_mix() -> None:
    """20 replays with other adapters, runs, rows and positions: eager to the bit, and rows of the
    base as in a step without adapters."""
    rows, cos_sin = 32, angles()
    first = make_case(
        TURNED[0],
        [(None, rows)],
        in_features=1024,
        sizes=TURNED[1],
        dtype=torch.bfloat16,
        device="cuda",
    )
    static = torch.from_numpy(write_plan(first, large=False)[0]).cuda()
    plan = LoraPlan.for_graph(static, rows, first.max_tokens, first.max_pages)
    positions = torch.zeros(rows, dtype=torch.int64, device="cuda")
    turn_heads(first, plan, *HEADS, positions, cos_sin)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = turn_heads(first, plan, *HEADS, positions, cos_sin)
    draw = torch.Generator().manual_seed(4)
    for _ in range(20):
        case = with_drawn_runs(first, draw, longest=19)
        first.x.normal_()
        positions.copy_(torch.randint(0, 50, (rows,), generator=draw))
        static.copy_(torch.from_numpy(write_plan(case, large=False)[0]))
        graph.replay()
        replayed = found.clone()
        eager = turn_heads(case, case.plan(large=False), *HEADS, positions, cos_sin)
        assert torch.equal(replayed, eager)
        base = case.base_rows()
        assert torch.equal(replayed[base], turn_heads(case, None, *HEADS, positions, cos_sin)[base])


def test_a_row_of_normed_heads_alone_has_its_bits_and_only_its_nan() -> None:
    # With norms the kernel is the same for one row.
    case = build("ragged ranks", sizes=TURNED[1])
    cos_sin, norm = angles(), torch.rand(128, device="cuda").to(torch.bfloat16)
    positions = torch.arange(len(case.x), device="cuda") % 50
    together = turn_heads(case, case.plan(large=False), *HEADS, positions, cos_sin, norm)
    row = 0
    for adapter, rows in case.runs:
        for _ in range(rows):
            here = slice(row, row + 1)
            alone = replace(case, x=case.x[here], y=case.y[here], runs=((adapter, 1),))
            found = turn_heads(alone, alone.plan(), *HEADS, positions[here], cos_sin, norm)
            assert torch.equal(found, together[here])
            row += 1
    for page in case.adapters[2]:
        for s in range(3):
            for strip in (case.site.a(page, s), case.site.b(page, s)):
                assert strip is not None
                strip[0] = float("nan")
    broken = turn_heads(case, case.plan(large=False), *HEADS, positions, cos_sin, norm)
    own = torch.zeros(len(case.x), dtype=torch.bool, device="cuda")
    own[24:29] = True
    assert torch.equal(broken[~own], together[~own])
    assert bool(broken[own].isnan().flatten(1).any(-1).all())


def test_normed_heads_are_those_of_the_sums() -> None:
    case = build("long runs", sizes=(1024, 512, 512))
    for fused, apart, _ in rope_both_ways(case, 8, 4, 128, has_norm=True):
        torch.testing.assert_close(fused, apart, rtol=1e-2, atol=1e-2)


def test_fused_ops_in_a_graph_s_plan_serve_rows_without_adapter() -> None:
    case = make_case(
        [16],
        [(None, 9)],
        in_features=1024,
        sizes=(1024, 1024),
        dtype=torch.bfloat16,
        device="cuda",
        max_tokens=64,
    )
    fused, apart = silu_both_ways(case, graph_rows=9)
    assert torch.equal(fused, apart)

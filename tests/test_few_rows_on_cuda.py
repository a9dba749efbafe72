"""Products, norms, RoPE and SiLU of few rows with adapters, on a GPU; norms of more rows, too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kernels.graph_branch import Branch
from kernels.linear import linear, linear_shrink
from kernels.lora_add_rms_norm import lora_add_rms_norm
from kernels.lora_plan import LoraPlan
from kernels.lora_shrink_expand import lora_expand_, lora_shrink
from kernels.paged_attention import paged_attention
from kernels.rms_norm import add_rms_norm
from kernels.rope_kv_write import rope_kv_write
from kernels.rope_write import QueryScaling, RopeWrite
from tests.attention_factory import make_batch
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
from tests.layer_chains import LayerChain, assert_overlap_changes_no_bit, mixed_case
from tests.lora_kernel_cases import (
    LoraCase,
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
RANKS = (8, 16, 200, *LACKING, 64)
ALL_RUNS: dict[str, tuple[Run, ...]] = RUNS | {
    "eight": ((0, 1), (1, 3), (2, 1), (5, 1), (0, 2)),
}


def build(
    runs: str,
    in_features: int,
    sizes: tuple[int, ...],
    *,
    integers: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> LoraCase:
    return make_case(
        RANKS,
        ALL_RUNS[runs],
        in_features=in_features,
        sizes=sizes,
        dtype=dtype,
        device="cuda",
        integers=integers,
        max_tokens=8,
    )


@pytest.mark.parametrize(
    ("in_features", "sizes", "dtype"),
    [
        (4096, (512, 128, 128), torch.bfloat16),
        (14336, (256,), torch.bfloat16),
        (3584, (8192, 512), torch.bfloat16),  # above 8192 rows a program has one warp
        (328, (200,), torch.float16),
    ],
)
def test_a_product_has_the_same_bits_beside_a_shrink(
    in_features: int, sizes: tuple[int, ...], dtype: torch.dtype
) -> None:
    for runs in ALL_RUNS:
        case = build(runs, in_features, sizes, dtype=dtype)
        weight = draw_weight(case)
        bias = weight[:, 0].contiguous()
        for plan in (case.plan(large=False), case.plan(graph_rows=case.x.shape[0])):
            alone, beside, y = both_products(case, weight, bias, plan)
            assert torch.equal(alone, beside)
            wanted = case.x.double() @ weight.double().T + bias.double()
            assert float((alone.double() - wanted).norm() / wanted.norm()) < 3e-3
            assert not case.delta().any() or error_of(case, y) < 8e-3
            assert torch.equal(y[case.base_rows()], case.y[case.base_rows()])


@pytest.mark.parametrize(("height", "width"), [(4096, 14336), (4100, 4096), (8200, 328)])
def test_a_row_has_the_same_bits_among_any_number_of_rows(height: int, width: int) -> None:
    x = torch.randn(8, width, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(height, width, device="cuda", dtype=torch.bfloat16)
    together = linear(x, weight, None)
    wanted = x.double() @ weight.double().T
    assert float((together.double() - wanted).norm() / wanted.norm()) < 3e-3
    for rows in range(1, 8):
        assert torch.equal(linear(x[:rows], weight, None), together[:rows])


@pytest.mark.parametrize("offset", [1, 4])
def test_a_weight_may_begin_anywhere(offset: int) -> None:
    """Prefetches ask for addresses that are multiples of 16 bytes."""
    x = torch.randn(2, 1000, device="cuda", dtype=torch.bfloat16)
    flat = torch.randn(offset + 40 * 1000, device="cuda", dtype=torch.bfloat16)
    weight = flat[offset:].view(40, 1000)
    assert torch.equal(linear(x, weight, None), linear(x, weight.clone(), None))


def test_small_integers_are_exact() -> None:
    case = build("ragged", 320, (256,), integers=True)
    case.x.mul_(torch.rand(case.x.shape, device="cuda") < 8 / 320)
    weight = draw_weight(case, integers=True)
    alone, _, y = both_products(case, weight, None, case.plan(large=False))
    assert torch.equal(alone.double(), case.x.double() @ weight.double().T)
    assert torch.equal(y, (case.y.double() + case.delta()).to(torch.bfloat16))


def test_a_row_alone_has_the_bits_it_has_among_others() -> None:
    """Compares with as many other rows: alone its shrink may be cut into shorter chunks."""
    case = build("eight", 4096, (512,))
    weight = draw_weight(case)

    def run(case: LoraCase) -> torch.Tensor:
        plan = case.plan(graph_rows=case.x.shape[0])
        y, bridge = linear_shrink(case.x, weight, None, case.site, plan)
        lora_expand_(y, bridge, case.site, plan)
        return y

    together = run(case)
    row = 0
    for adapter, rows in case.runs:
        for _ in range(rows):
            others = case.x.roll(3, 0)
            others[row] = case.x[row]
            runs = tuple((r, n) for r, n in ((None, row), (adapter, 1), (None, 7 - row)) if n)
            assert torch.equal(run(replace(case, x=others, runs=runs))[row], together[row])
            row += 1


@pytest.mark.parametrize("hidden", [4096, 576, 48])
def test_a_norm_adds_the_delta(hidden: int) -> None:
    for runs in ALL_RUNS:
        case = build(runs, 512, (hidden,))
        for outcome in norms(case, case.plan(graph_rows=case.x.shape[0])):
            assert_agrees(outcome, case.base_rows(), 2e-2)


def build_more(runs: str, hidden: int) -> LoraCase:
    return make_case(
        RANKS,
        MORE_RUNS[runs],
        in_features=512,
        sizes=(hidden,),
        dtype=torch.bfloat16,
        device="cuda",
        max_tokens=64,
    )


@pytest.mark.parametrize("hidden", [4096, 2048, 576])
def test_a_norm_of_more_rows_adds_the_delta(hidden: int) -> None:
    for runs in MORE_RUNS:
        case = build_more(runs, hidden)
        for plan in (case.plan(large=False), case.plan(graph_rows=case.x.shape[0])):
            for outcome in norms(case, plan):
                assert_agrees(outcome, case.base_rows(), 4e-2)
        # The norm hides the delta's size: the sum with the residual against float64.
        bridge = lora_shrink(case.x, case.site, plan)
        residual, weight = torch.zeros_like(case.y), torch.ones_like(case.y[0])
        _, found = lora_add_rms_norm(
            case.y.clone(), residual, weight, 1e-5, bridge, case.site, plan
        )
        assert error_of(case, found) < 8e-3


@pytest.mark.parametrize("hidden", [2304, 4096])
def test_norms_of_other_families_add_the_delta(hidden: int) -> None:
    for runs in ("ragged", "sixty-four rows"):
        case = build_more(runs, hidden)
        plan = case.plan(graph_rows=case.x.shape[0])
        found = norms(case, plan, 0.22) + norms(case, plan, weight_type=torch.float32)
        found += double_norms(case, plan) + double_norms(case, plan, has_next=False)
        for outcome in found:
            assert_agrees(outcome, case.base_rows(), 4e-2)


def test_a_norm_s_row_keeps_its_bits_among_other_adapters_and_their_nan() -> None:
    case = build_more("sixty-four rows", 4096)
    clean = [outcome.found for outcome in norms(case, case.plan(large=False))]
    row = 21  # the first of the base, then nine of adapter 2
    for start, end, runs in (
        (row, row + 5, ((None, 64),)),
        (row + 5, row + 14, ((None, row + 5), (2, 9), (None, 29))),
    ):
        alone = replace(case, runs=runs)
        for found, expected in zip(norms(alone, alone.plan(large=False)), clean, strict=True):
            assert torch.equal(found.found[start:end], expected[start:end])
    for page in case.adapters[1]:
        a, b = case.site.a(page, 0), case.site.b(page, 0)
        assert a is not None
        assert b is not None
        a[0] = b[0] = float("nan")
    own = torch.zeros(64, dtype=torch.bool, device="cuda")
    own[1:21] = True
    for found, expected in zip(norms(case, case.plan(large=False)), clean, strict=True):
        assert torch.equal(found.found[~own], expected[~own])
        assert bool(found.found[own].isnan().any(-1).all())


def test_gelu_and_variants_of_rope_add_the_delta() -> None:
    for runs in ("one row", "eight", "some slices"):
        case = build(runs, 512, (1440, 1440))
        outcome = products(case, case.plan(graph_rows=case.x.shape[0]), "gelu_tanh")
        assert_agrees(outcome, case.base_rows(), 4e-2)
        case = build(runs, 512, (512, 256, 256))
        plan = case.plan(graph_rows=case.x.shape[0])
        found = turns(case, plan, 96) + turns(case, plan, 0)
        for outcome in found + turns(case, plan, scaling=QueryScaling(0.5, 8)):
            assert_agrees(outcome, case.base_rows(), 4e-2)


def test_silu_and_rope_add_the_delta() -> None:
    for runs in ALL_RUNS:
        case = build(runs, 512, (1440, 1440))
        outcome = products(case, case.plan(graph_rows=case.x.shape[0]))
        assert_agrees(outcome, case.base_rows(), 4e-2)
        case = build(runs, 512, (512, 256, 256))
        for outcome in turns(case, case.plan(graph_rows=case.x.shape[0])):
            assert_agrees(outcome, case.base_rows(), 4e-2)


def test_one_graph_serves_any_mix() -> None:
    """30 replays with other adapters, other runs and other rows: eager to the bit."""
    rows = 8
    first = make_case(
        [8, 16, 64, 200] * 10,
        [(None, rows)],
        in_features=4096,
        sizes=(512, 128, 128),
        dtype=torch.bfloat16,
        device="cuda",
    )
    weight = draw_weight(first)
    static = torch.from_numpy(write_plan(first, large=False)[0]).cuda()
    plan = LoraPlan.for_graph(static, rows, first.max_tokens, first.max_pages)

    def run(plan: LoraPlan) -> torch.Tensor:
        y, bridge = linear_shrink(first.x, weight, None, first.site, plan)
        lora_expand_(y, bridge, first.site, plan)
        return y

    run(plan)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run(plan)
    draw = torch.Generator().manual_seed(3)
    for _ in range(30):
        case = with_drawn_runs(first, draw, longest=3)
        first.x.normal_()
        static.copy_(torch.from_numpy(write_plan(case, large=False)[0]))
        graph.replay()
        replayed = y.clone()
        assert torch.equal(replayed, run(case.plan(large=False)))
        base = case.base_rows()
        assert torch.equal(replayed[base], linear(first.x, weight, None)[base])


@pytest.mark.parametrize("rows", [9, 32, 64, 96])  # the norm in one launch, and beyond its limit
def test_a_shrink_beside_the_product_serves_any_mix(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """30 replays; the shrink is a branch of the graph."""
    joined: list[Branch] = []
    join = Branch.join

    def counted(branch: Branch) -> None:
        joined.append(branch)
        join(branch)

    monkeypatch.setattr(Branch, "join", counted)
    first = mixed_case(rows)
    chain = LayerChain(first, draw_weight(first))
    chain.run(chain.plan)
    assert not joined
    chain.capture()
    assert len(joined) == 6
    chain.assert_replays_serve_any_mix(30)
    assert len(joined) == 6


def test_overlapped_kernels_have_the_bits_of_kernels_in_turn() -> None:
    """Keys and values that a layer writes are NaN before, and each layer has its own."""
    batch = make_batch([(1, 300), (1, 40), (1, 1000)], 32, 8, 128, 16, torch.bfloat16, "cuda")
    plan = batch.host_work()[3]
    positions = torch.tensor([kv_len - 1 for _, kv_len in batch.lengths])
    blocks = batch.tables.cpu()[torch.arange(3), positions // 16]
    slots = (blocks * 16 + positions % 16).cuda()
    positions = positions.cuda()
    cos_sin = torch.rand(1000, 2, 64, device="cuda")
    draw = torch.Generator("cuda").manual_seed(1)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        drawn = torch.randn(shape, generator=draw, device="cuda") * scale
        return drawn.to(torch.bfloat16)

    first, norm = normal(3, 4096), normal(4096)
    layers = [
        (
            normal(6144, 4096, scale=1 / 64),
            normal(4096, 4096, scale=1 / 64),
            batch.k_cache.clone(),
            batch.v_cache.clone(),
        )
        for _ in range(6)
    ]

    def run(pause: Callable[[], None]) -> torch.Tensor:
        hidden, residual = first.clone(), torch.zeros_like(first)
        for qkv_weight, o_weight, k_cache, v_cache in layers:
            qkv = linear(hidden, qkv_weight, None)
            pause()
            write = RopeWrite(positions, cos_sin, k_cache, v_cache, slots, 32, 8, 128)
            q = rope_kv_write(qkv, write)
            pause()
            attended = paged_attention(q, k_cache, v_cache, plan, 0.1).flatten(1)
            pause()
            o = linear(attended, o_weight, None)
            pause()
            hidden, residual = add_rms_norm(o, residual, norm, 1e-5)
            pause()
        return hidden

    def forget() -> None:
        for _, _, *caches in layers:
            for cache in caches:
                cache.view(-1, 8, 128)[slots] = float("nan")

    assert_overlap_changes_no_bit(run, forget)

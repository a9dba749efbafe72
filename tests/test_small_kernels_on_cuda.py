"""The small Triton kernels on a CUDA device, where bfloat16 and CUDA graphs can be tried."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels.embedding import gather_embedding, gather_embedding_reference
from kernels.mask_logits import mask_logits_, mask_logits_reference_
from kernels.norm_add_norm import norm_add_norm, norm_add_norm_reference
from kernels.rms_norm import (
    add_rms_norm,
    add_rms_norm_reference,
    rms_norm,
    rms_norm_,
    rms_norm_reference,
)
from kernels.rope_kv_write import rope_kv_write, rope_kv_write_reference
from kernels.rope_write import QueryScaling, RopeWrite
from kernels.sampling import draw_reference, gather_logprobs, sample_rows
from kernels.silu_mul import silu_mul, silu_mul_reference
from tests.mask_cases import random_masks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
EPS = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-22}
Parameters = tuple[
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
]


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def share_of_differences(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Differences of one or two in the last place (two roundings) are counted, more is an error."""
    assert actual.dtype == expected.dtype
    gap = (actual.double() - expected.double()).abs()
    assert bool((gap <= 4 * EPS[actual.dtype] * expected.double().abs() + 1e-7).all())
    return float((gap > 0).double().mean())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "hidden"), [(1, 4096), (300, 4096), (7, 576), (3, 5120), (2, 7)])
def test_rms_norm(rows: int, hidden: int, dtype: torch.dtype) -> None:
    x, residual = randn(rows, hidden, dtype=dtype), randn(rows, hidden, dtype=dtype, seed=1)
    weight = randn(hidden, dtype=dtype, seed=2)
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    normed = rms_norm(x, weight, 1e-5)
    assert float((normed.double() - exact).norm() / exact.norm()) < EPS[dtype]
    limit = 2e-3 if dtype != torch.float32 else 1.0
    assert share_of_differences(normed, rms_norm_reference(x, weight, 1e-5)) < limit
    expected, total = add_rms_norm_reference(x, residual, weight, 1e-5)
    normed, new_residual = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(new_residual, total)
    assert share_of_differences(normed, expected) < limit


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 14336), (300, 1536), (3, 7)])
def test_silu_mul_has_the_bits_of_torch(rows: int, width: int, dtype: torch.dtype) -> None:
    gate_up = 4 * randn(rows, 2 * width, dtype=dtype)
    assert torch.equal(silu_mul(gate_up), silu_mul_reference(gate_up))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_mul_has_the_values_of_torch(dtype: torch.dtype) -> None:
    gate_up = 4 * randn(300, 2 * 1536, dtype=dtype)
    gate_up[0, :4] = torch.tensor([80.0, -80.0, 0.0, -0.0])
    found, expected = silu_mul(gate_up, "gelu_tanh"), silu_mul_reference(gate_up, "gelu_tanh")
    if dtype == torch.float32:  # what is left of 1 + tanh for negative numbers is a rounding
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    else:
        assert share_of_differences(found, expected) < 2e-3


@pytest.mark.parametrize("hidden", [2304, 4096])
def test_norms_of_other_families(hidden: int) -> None:
    dtype = torch.bfloat16
    x, residual = randn(70, hidden, dtype=dtype), randn(70, hidden, dtype=dtype, seed=1)
    post, following = 1 + randn(hidden, seed=2), 1 + randn(hidden, seed=3)
    assert share_of_differences(rms_norm(x, post, 1e-6), rms_norm_reference(x, post, 1e-6)) < 2e-3
    normed, total = add_rms_norm(x, residual.clone(), post.to(dtype), 1e-6, 0.22)
    expected, wanted = add_rms_norm_reference(x, residual, post.to(dtype), 1e-6, 0.22)
    assert torch.equal(total, wanted)
    assert share_of_differences(normed, expected) < 2e-3
    for next_weight in (following, None):
        found = norm_add_norm(x, residual.clone(), post, next_weight, 1e-6)
        reference = norm_add_norm_reference(x, residual, post, next_weight, 1e-6)
        for one, other in zip(found, reference, strict=True):
            # A neighbour before the addition may be some units of a small sum.
            torch.testing.assert_close(one, other, rtol=2e-2, atol=4e-2)
            assert float((one != other).double().mean()) < 5e-3
    in_place = torch.cat((x, residual), dim=1)
    rms_norm_(in_place[:, hidden:], post, 1e-6)
    assert torch.equal(in_place[:, :hidden], x)
    assert torch.equal(in_place[:, hidden:], rms_norm(residual, post, 1e-6))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary_dim", "is_normed"),
    [
        (24, 8, 128, 96, False),
        (16, 4, 128, 0, False),
        (8, 4, 256, 256, True),
        (8, 1, 256, 64, True),
    ],
)
def test_rope_of_other_families(
    heads: int, kv_heads: int, dim: int, rotary_dim: int, is_normed: bool
) -> None:
    tokens, dtype = 37, torch.bfloat16
    qkv = randn(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    positions = torch.arange(tokens, device="cuda", dtype=torch.int32) * 3
    cos_sin = randn(128, 2, rotary_dim // 2, seed=1) if rotary_dim else None
    slots = torch.randperm(64, device="cuda")[:tokens].int()
    caches = [torch.zeros(4, 16, kv_heads, dim, dtype=dtype, device="cuda") for _ in range(4)]
    norms = [1 + randn(dim, seed=s) if is_normed else None for s in (2, 3)]
    write = RopeWrite(positions, cos_sin, *caches[:2], slots, heads, kv_heads, dim, *norms, 1e-6)
    write = write._replace(q_scaling=QueryScaling(0.1, 8))
    torch.cuda.synchronize()
    q = rope_kv_write(qkv, write)
    expected = rope_kv_write_reference(qkv, write._replace(k_cache=caches[2], v_cache=caches[3]))
    assert torch.equal(caches[1], caches[3])
    scale = float(expected.abs().max())
    for actual, wanted in ((q, expected), (caches[0], caches[2])):
        assert float((actual.double() - wanted.double()).abs().max()) < 4 * EPS[dtype] * scale
        assert float((actual != wanted).double().mean()) < 2e-3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(32, 8, 128), (9, 3, 64), (32, 4, 80), (16, 16, 96), (8, 1, 256)]
)
def test_rope_kv_write_has_the_bits_of_torch(
    heads: int, kv_heads: int, dim: int, is_normed: bool, dtype: torch.dtype
) -> None:
    tokens = 37
    qkv = randn(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    positions = torch.arange(tokens, device="cuda", dtype=torch.int32) * 3
    cos_sin = randn(128, 2, dim // 2, seed=1)
    slots = torch.randperm(64, device="cuda")[:tokens].int()
    caches = [torch.full((4, 16, kv_heads, dim), 9.0, dtype=dtype, device="cuda") for _ in range(4)]
    norms = [randn(dim, dtype=dtype, seed=s) if is_normed else None for s in (2, 3)]
    rest = (heads, kv_heads, dim, norms[0], norms[1], 1e-6)
    slots[5] = -1
    torch.cuda.synchronize()  # a step's positions and slots are there before its kernels start
    q = rope_kv_write(qkv, RopeWrite(positions, cos_sin, caches[0], caches[1], slots, *rest))
    safe = slots.clone()
    used = set(slots.tolist())
    spare = next(slot for slot in range(64) if slot not in used)
    safe[5] = spare
    expected = rope_kv_write_reference(
        qkv, RopeWrite(positions, cos_sin, caches[2], caches[3], safe, *rest)
    )
    for cache in caches[2:]:
        cache.view(64, kv_heads, dim)[spare] = 9.0
    assert torch.equal(caches[1], caches[3])
    if not is_normed:
        assert torch.equal(q, expected)
        assert torch.equal(caches[0], caches[2])
        return
    # A neighbour in the last place before the turn moves both of a pair by a part of the larger.
    scale = float(expected.abs().max())
    for actual, wanted in ((q, expected), (caches[0], caches[2])):
        assert float((actual.double() - wanted.double()).abs().max()) < 4 * EPS[dtype] * scale
        if dtype != torch.float32:
            assert float((actual != wanted).double().mean()) < 2e-3


def test_an_embedding_follows_the_id_that_was_drawn() -> None:
    weight = randn(1000, 4096, dtype=torch.bfloat16)
    token_ids = torch.arange(100, dtype=torch.int32, device="cuda")
    sources = torch.where(token_ids % 3 == 0, token_ids // 3, -1).int()
    drawn = (999 - torch.arange(40, device="cuda")).int()
    drawn[2] = -1
    out = gather_embedding(token_ids, sources, drawn, weight)
    assert torch.equal(out, gather_embedding_reference(token_ids, sources, drawn, weight))
    assert torch.equal(out[6], weight[0])


def ops(rows: int) -> list[torch.Tensor]:
    x = randn(300, 4096, dtype=torch.bfloat16)[:rows]
    weight = randn(4096, dtype=torch.bfloat16, seed=1)
    k_cache, v_cache = torch.zeros(2, 20, 16, 8, 64, dtype=torch.bfloat16, device="cuda")
    place = torch.arange(rows, dtype=torch.int32, device="cuda")
    write = RopeWrite(place, randn(512, 2, 32), k_cache, v_cache, place, 48, 8, 64)
    torch.cuda.synchronize()  # a step's positions and angles are there before its kernels start
    q = rope_kv_write(x, write)
    return [rms_norm(x, weight, 1e-5), silu_mul(x), q, k_cache[0], v_cache[0]]


def test_a_row_does_not_know_how_many_there_are() -> None:
    for few, many in zip(ops(2), ops(300), strict=True):
        assert torch.equal(few[:2], many[:2])


def test_unaligned_rows_take_another_road_to_the_same_bits() -> None:
    x, weight = randn(5, 4100, dtype=torch.bfloat16), randn(4096, dtype=torch.bfloat16, seed=1)
    expected = rms_norm(x[:, 1:4097].contiguous(), weight, 1e-5)
    assert share_of_differences(rms_norm(x[:, 1:4097], weight, 1e-5), expected) < 2e-3


def parameters(
    rows: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Parameters:
    place = torch.arange(rows, dtype=torch.int32, device="cuda")
    return (
        torch.full((rows,), temperature, device="cuda"),
        torch.full((rows,), top_k, dtype=torch.int32, device="cuda"),
        torch.full((rows,), top_p, device="cuda"),
        torch.full((rows,), min_p, device="cuda"),
        place.long() * 7919 + 2**40,
        place % 3,
        place + 7,
    )


def sampled(logits: torch.Tensor, rest: Parameters) -> torch.Tensor:
    out = torch.full((logits.shape[0],), -7, dtype=torch.int32, device="cuda")
    sample_rows(logits, *rest, out)
    return out


SAMPLING: list[dict[str, float]] = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 0.7, "min_p": 0.05},
    {"top_k": 50},
    {"top_k": 3000},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    {"temperature": 2.0, "top_p": 0.9},
    {"temperature": 2.0, "top_k": 60000, "top_p": 0.9, "min_p": 0.001},
]


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("spread", [1.0, 4.0])
@pytest.mark.parametrize("params", SAMPLING, ids=str)
def test_tokens_are_the_references(params: dict[str, float], spread: float, rounded: bool) -> None:
    """But for a number that falls on the border of two tokens: the ends differ by 1e-7 or so."""
    rows = 192
    logits = spread * randn(rows, 128256, seed=int(spread))
    if rounded:  # equals everywhere
        logits = logits.bfloat16().float()
    rest = parameters(rows, **params)  # type: ignore[arg-type]
    expected = draw_reference(logits, *rest)
    wrong = (sampled(logits, rest) != expected).nonzero()[:, 0].tolist()
    assert len(wrong) <= (0 if params.get("temperature") == 0 else 2)


def test_draws_follow_the_distribution() -> None:
    row = randn(1, 1000)
    for params in ({}, {"top_k": 100}, {"top_p": 0.8}):
        drawn = sampled(row.expand(40000, -1), parameters(40000, **params))
        kept = torch.softmax(row[0].double(), -1)
        if "top_k" in params:
            kept[kept < kept.topk(100).values[-1]] = 0
        if "top_p" in params:
            ordered, ids = kept.sort(descending=True)
            kept[ids[ordered.cumsum(-1) - ordered >= 0.8]] = 0
        expected = 40000 * kept / kept.sum()
        counts = torch.bincount(drawn.long(), minlength=1000)
        assert int(counts[expected == 0].sum()) == 0
        seen = expected > 5
        chi_square = float(((counts - expected) ** 2 / expected)[seen].sum())
        freedom = int(seen.sum())
        assert chi_square < freedom + 5 * (2 * freedom) ** 0.5


def test_a_broken_row_harms_only_itself() -> None:
    healthy = 3 * randn(8, 50000)
    logits = healthy.clone()
    logits[1, 49999], logits[4, 0], logits[6] = float("nan"), float("inf"), float("-inf")
    for params in SAMPLING:
        rest = parameters(8, **params)  # type: ignore[arg-type]
        expected = sampled(healthy, rest)
        expected[[1, 4, 6]] = -1
        assert torch.equal(sampled(logits, rest), expected)


def test_a_graph_replayed_with_other_parameters_draws_what_an_eager_call_draws() -> None:
    rows = 16
    logits, rest = 3 * randn(rows, 128256), parameters(rows)
    out = sampled(logits, rest)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample_rows(logits, *rest, out)
    for seed, params in enumerate(SAMPLING):
        logits.copy_(3 * randn(rows, 128256, seed=seed))
        for static, new in zip(rest, parameters(rows, **params), strict=True):  # type: ignore[arg-type]
            static.copy_(new)
        rest[0][seed] = 0.0
        graph.replay()
        replayed = out.clone()
        assert torch.equal(sampled(logits, rest), replayed)
        one = tuple(parameter[5:6] for parameter in rest)
        assert int(sampled(logits[5:6], one)[0]) == int(replayed[5])  # type: ignore[arg-type]


def without_sync(call: Callable[[], object]) -> None:
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_nothing_waits_for_the_device() -> None:
    logits, rest = 3 * randn(4, 1000), parameters(4, top_k=50, top_p=0.9)
    out = sampled(logits, rest)
    without_sync(lambda: sample_rows(logits, *rest, out))
    without_sync(lambda: gather_logprobs(logits, out, 5))


@pytest.mark.parametrize(("rows", "vocab"), [(1, 128256), (256, 32003), (5, 131)])
def test_mask_logits_equals_its_reference(rows: int, vocab: int) -> None:
    logits = randn(rows, vocab)
    logits[0, vocab // 2] = float("nan")
    expected = logits.clone()
    places = torch.randperm(rows)[: max(1, rows // 2)].to(torch.int32).cuda()
    masks = random_masks(4, vocab).cuda().repeat(len(places) // 4 + 1, 1)[: len(places)]
    mask_logits_reference_(expected, masks.contiguous(), places)
    for _ in range(2):  # the second launch takes the quick path
        mask_logits_(logits, masks.contiguous(), places)
        assert torch.equal(logits.nan_to_num(7.0), expected.nan_to_num(7.0))

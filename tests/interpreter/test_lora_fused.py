"""The expand inside RoPE + KV write and inside SiLU-mul, in the interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels import triton_lora_rope_kv_write
from kernels.lora_rope_kv_write import lora_rope_kv_write
from kernels.lora_shrink_expand import lora_expand_, lora_shrink
from kernels.rope_kv_write import rope_kv_write_reference
from kernels.rope_write import QueryScaling, RopeWrite
from tests.lora_fused_cases import (
    assert_turns_agree,
    rope_both_ways,
    silu_both_ways,
    turn_heads,
)
from tests.lora_kernel_cases import BLANK, Run, make_case

RUNS: dict[str, tuple[Run, ...]] = {
    "small tiles": ((None, 3), (0, 1), (1, 5)),
    "a large tile": ((None, 1), (1, 65), (0, 2)),
    "a large tile of one page": ((None, 2), (0, 67)),
    "a large tile of the base": ((None, 65), (0, 1)),
    "no adapter": ((None, 3),),
    "some slices": ((2, 3), (None, 1), (3, 2)),
    "a large tile of some slices": ((2, 66), (3, 65)),
    "adapters with weights": ((None, 1), (((1, 0.5), (0, -1.5)), 9), (0, 1)),
    "adapters of other slices": ((((BLANK, 1.0), (2, 0.5), (3, 2.0)), 9), (None, 1)),
    "a large tile of adapters with weights": ((((BLANK, 1.0), (3, 0.5), (2, 2.0)), 66), (1, 3)),
}

RANKS = (8, 20, (0, 33, 8), (16, 0, 0))


def check(runs: str, fused: torch.Tensor, apart: torch.Tensor) -> None:
    """The interpreter multiplies with NumPy, whose order of sums depends on a tile's width: there
    the matrix products of large tiles agree up to a rounding, on a GPU to the bit."""
    if "large" in runs:
        torch.testing.assert_close(fused, apart, rtol=2e-3, atol=1e-3)
    else:
        assert torch.equal(fused, apart)


@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize("width", [16, 264])
def test_silu_mul_is_that_of_the_sums(runs: str, width: int) -> None:
    case = make_case(RANKS, RUNS[runs], in_features=32, sizes=(width, width), dtype=torch.float16)
    fused, apart = silu_both_ways(case)
    check(runs, fused, apart)


@pytest.mark.parametrize("runs", ["small tiles", "a large tile of one page", "some slices"])
def test_gelu_mul_is_that_of_the_sums(runs: str) -> None:
    case = make_case(RANKS, RUNS[runs], in_features=32, sizes=(264, 264), dtype=torch.float16)
    fused, apart = silu_both_ways(case, activation="gelu_tanh")
    check(runs, fused, apart)


VARIANTS: dict[str, dict[str, Any]] = {
    "a part of a head turns": {"rotary_dim": 24},
    "a part of a normed head turns": {"rotary_dim": 32, "has_norm": True},
    "nothing turns": {"rotary_dim": 0},
    "queries are scaled": {"scaling": QueryScaling(0.5, 8)},
    "norms in float32": {"has_norm": True, "norm_type": torch.float32},
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("runs", ["small tiles", "a large tile", "a large tile of one page"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(3, 1, 96), (2, 2, 64)])
def test_variants_of_rope_are_those_of_the_sums(
    runs: str, heads: int, kv_heads: int, head_dim: int, name: str
) -> None:
    sizes = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
    case = make_case(RANKS, RUNS[runs], in_features=32, sizes=sizes, dtype=torch.float16)
    variant = VARIANTS[name]
    for turned in rope_both_ways(case, heads, kv_heads, head_dim, **variant):
        if "has_norm" in variant:
            torch.testing.assert_close(turned[0], turned[1], rtol=2e-3, atol=2e-3)
        else:
            assert_turns_agree(turned)


@pytest.mark.parametrize("runs", ["small tiles", "a large tile of one page"])
def test_heads_of_256(runs: str) -> None:
    case = make_case(RANKS, RUNS[runs], in_features=16, sizes=(512, 256, 256), dtype=torch.float16)
    for fused, apart, _ in rope_both_ways(
        case, 2, 1, 256, has_norm=True, norm_type=torch.float32, rotary_dim=256
    ):
        torch.testing.assert_close(fused, apart, rtol=2e-3, atol=2e-3)


def test_a_norm_of_all_heads_comes_after_the_sums() -> None:
    case = make_case(
        RANKS, RUNS["some slices"], in_features=32, sizes=(64, 32, 32), dtype=torch.float16
    )
    plan = case.plan()
    bridge = lora_shrink(case.x, case.site, plan)
    norms = (torch.rand(64), torch.rand(32))
    tokens = len(case.x)
    where, angles = torch.arange(tokens), torch.rand(tokens, 2, 8)
    found: list[torch.Tensor] = []
    expected: list[torch.Tensor] = []
    for out in (found, expected):
        k, v = (torch.zeros(tokens, 1, 2, 16, dtype=torch.float16) for _ in "kv")
        write = RopeWrite(where, angles, k, v, where, 4, 2, 16, *norms, 1e-5)
        y = case.y.clone()
        if out is found:
            q = lora_rope_kv_write(y, bridge, case.site, plan, write)
        else:
            lora_expand_(y, bridge, case.site, plan)
            q = rope_kv_write_reference(y, write)
        out += [q, k, v]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 128), (3, 1, 24)])
def test_rope_is_that_of_the_sums(runs: str, heads: int, kv_heads: int, head_dim: int) -> None:
    case = make_case(
        RANKS,
        RUNS[runs],
        in_features=32,
        sizes=(heads * head_dim, kv_heads * head_dim, kv_heads * head_dim),
        dtype=torch.float16,
    )
    for turned in rope_both_ways(case, heads, kv_heads, head_dim):
        assert_turns_agree(turned)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(3, 1, 128), (2, 2, 80)])
def test_a_program_turns_one_tile_after_the_other(
    heads: int, kv_heads: int, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exact on small integers, of several pages too; a slice without delta keeps even -0."""
    monkeypatch.setattr(triton_lora_rope_kv_write, "NUM_PROGRAMS", 1)
    case = make_case(
        RANKS,
        ((None, 3), (0, 9), (1, 5), (2, 3), (None, 1), (3, 2)),
        in_features=8,
        sizes=(heads * head_dim, kv_heads * head_dim, kv_heads * head_dim),
        dtype=torch.float16,
        integers=True,
    )
    case.y[:, ::3] = -0.0
    positions = torch.zeros(len(case.y), dtype=torch.int64)
    still = torch.stack((torch.ones(1, head_dim // 2), torch.zeros(1, head_dim // 2)), dim=1)
    found = turn_heads(case, case.plan(), heads, kv_heads, positions, still).flatten(1)
    expected = (case.y.double() + case.delta()).to(torch.float16)
    assert torch.equal(found, expected)
    stored = found[:, -kv_heads * head_dim :].contiguous().view(torch.int16)
    untouched = case.untouched()[:, -kv_heads * head_dim :]
    before = case.y[:, -kv_heads * head_dim :].contiguous().view(torch.int16)
    assert torch.equal(stored[untouched], before[untouched])


def test_normed_heads_are_those_of_the_sums() -> None:
    case = make_case(
        (8, 20), RUNS["a large tile"], in_features=32, sizes=(128, 64, 64), dtype=torch.float16
    )
    for fused, apart, _ in rope_both_ways(case, 4, 2, 32, has_norm=True):
        torch.testing.assert_close(fused, apart, rtol=1e-3, atol=1e-3)

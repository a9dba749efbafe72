"""The ops with kernels of their own for few rows, compared with the same ops for many rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.linear import linear, linear_shrink
from kernels.lora_add_rms_norm import lora_add_rms_norm
from kernels.lora_norm_add_norm import lora_norm_add_norm
from kernels.lora_plan import LoraPlan
from kernels.lora_rope_kv_write import lora_rope_kv_write
from kernels.lora_shrink_expand import lora_expand_, lora_shrink
from kernels.lora_silu_mul import lora_silu_mul
from kernels.matrix import Matrix
from kernels.norm_add_norm import norm_add_norm
from kernels.rms_norm import add_rms_norm
from kernels.rope_kv_write import rope_kv_write
from kernels.rope_write import QueryScaling, RopeWrite
from kernels.silu_mul import Activation, silu_mul
from tests.lora_kernel_cases import BLANK, LoraCase, Run

EPS = 1e-5
HEADS = (4, 2, 128)
RUNS: dict[str, tuple[Run, ...]] = {
    "one row": ((1, 1),),
    "one row of many pages": ((2, 1),),
    "ragged": ((None, 2), (0, 1), (2, 2), (1, 3)),
    "no adapter": ((None, 3),),
    "some slices": ((3, 2), (None, 1), (4, 2)),
    "weights": ((((1, 0.5), (0, -2.0)), 2), (0, 1), (((BLANK, 1.0), (3, 1.5), (4, 0.5)), 2)),
}
# More rows than have products of their own: the norm alone adds the delta in one launch.
MORE_RUNS: dict[str, tuple[Run, ...]] = {
    "nine rows": ((1, 9),),
    "ragged": ((None, 3), (0, 1), (2, 11), (4, 2), (None, 1)),
    "sixty-four rows": ((0, 1), (1, 20), (None, 5), (2, 9), (3, 8), (5, 20), (None, 1)),
    "a page in eight tiles": ((0, 64),),
    "weights": ((((1, 0.5), (0, -2.0)), 11), (0, 1), (((BLANK, 1.0), (3, 1.5), (4, 0.5)), 12)),
}
LACKING = ((0, 40, 9), (24, 0, 0))  # ranks of each slice, of the last two adapters


@dataclass(frozen=True, slots=True)
class Outcome:
    found: torch.Tensor
    expected: torch.Tensor  # of the expand, then the base's op
    base: torch.Tensor  # of the base's op alone: rows without adapter get exactly this


def draw_weight(case: LoraCase, *, integers: bool = False) -> torch.Tensor:
    """[sum of N_s, K] for the case's x."""
    draw = torch.Generator().manual_seed(11)
    shape = case.y.shape[1], case.x.shape[1]
    if integers:
        weight = torch.randint(-1, 2, shape, generator=draw).float()
    else:
        weight = torch.randn(shape, generator=draw) * shape[1] ** -0.5
    return weight.to(case.x.device, case.x.dtype)


def both_products(
    case: LoraCase, weight: Matrix, bias: torch.Tensor | None, plan: LoraPlan
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y alone, y with the shrink beside it, and the case's y plus the delta of that bridge."""
    alone = linear(case.x, weight, bias)
    beside, bridge = linear_shrink(case.x, weight, bias, case.site, plan)
    y = case.y.clone()
    lora_expand_(y, bridge, case.site, plan)
    return alone, beside, y


def expanded(case: LoraCase, plan: LoraPlan) -> torch.Tensor:
    y = case.y.clone()
    lora_expand_(y, lora_shrink(case.x, case.site, plan), case.site, plan)
    return y


def norms(
    case: LoraCase, plan: LoraPlan, scale: float = 1.0, weight_type: torch.dtype | None = None
) -> list[Outcome]:
    """Returns the outcomes of one slice: the residual, then the normed values."""
    draw = torch.Generator().manual_seed(12)
    residual = torch.randn(case.y.shape, generator=draw).to(case.y)
    weight = torch.rand(case.y.shape[1], generator=draw).to(case.y).to(weight_type)
    bridge = lora_shrink(case.x, case.site, plan)
    found = lora_add_rms_norm(
        case.y.clone(), residual.clone(), weight, EPS, bridge, case.site, plan, scale
    )
    expected = add_rms_norm(expanded(case, plan), residual.clone(), weight, EPS, scale)
    base = add_rms_norm(case.y.clone(), residual.clone(), weight, EPS, scale)
    return [Outcome(*each) for each in zip(found, expected, base, strict=True)][::-1]


def double_norms(case: LoraCase, plan: LoraPlan, *, has_next: bool = True) -> list[Outcome]:
    """Returns the outcomes of one slice: the residual, then the next block's input."""
    draw = torch.Generator().manual_seed(12)
    residual = torch.randn(case.y.shape, generator=draw).to(case.y)
    post, following = torch.rand(2, case.y.shape[1], generator=draw).to(case.y.device)
    weights = (post, following if has_next else None)
    bridge = lora_shrink(case.x, case.site, plan)
    found = lora_norm_add_norm(
        case.y.clone(), residual.clone(), *weights, EPS, bridge, case.site, plan
    )
    expected = norm_add_norm(expanded(case, plan), residual.clone(), *weights, EPS)
    base = norm_add_norm(case.y.clone(), residual.clone(), *weights, EPS)
    return [Outcome(*each) for each in zip(found, expected, base, strict=True)][::-1]


def products(case: LoraCase, plan: LoraPlan, activation: Activation = "silu") -> Outcome:
    """Returns the outcome of two slices."""
    bridge = lora_shrink(case.x, case.site, plan)
    found = lora_silu_mul(case.y.clone(), bridge, case.site, plan, activation)
    return Outcome(found, silu_mul(expanded(case, plan), activation), silu_mul(case.y, activation))


def turns(
    case: LoraCase,
    plan: LoraPlan,
    rotary_dim: int = HEADS[2],  # 0: nothing turns
    scaling: QueryScaling | None = None,
) -> list[Outcome]:
    """Returns the outcomes of three slices: q and both caches."""
    draw = torch.Generator().manual_seed(5)
    rows, size, device = case.y.shape[0], HEADS[2], case.y.device
    positions = torch.randint(0, 50, (rows,), generator=draw).to(device)
    slots = torch.randperm(16, generator=draw)[:rows].to(device)
    slots[-1] = -1
    drawn = torch.rand(50, 2, rotary_dim // 2, generator=draw).to(device)
    cos_sin = drawn if rotary_dim else None
    bridge = lora_shrink(case.x, case.site, plan)
    outcomes = []
    for kind in ("found", "expected", "base"):
        k, v = (torch.zeros(16, 1, HEADS[1], size).to(case.y) for _ in "kv")
        write = RopeWrite(positions, cos_sin, k, v, slots, *HEADS, q_scaling=scaling)
        if kind == "found":
            q = lora_rope_kv_write(case.y.clone(), bridge, case.site, plan, write)
        else:
            q = rope_kv_write(expanded(case, plan) if kind == "expected" else case.y.clone(), write)
        for cache in (k, v):
            assert cache.flatten(1).any(1).sum() == rows - 1
        outcomes.append([q, k.squeeze(1)[slots[:-1]], v.squeeze(1)[slots[:-1]]])
    return [Outcome(*each) for each in zip(*outcomes, strict=True)]


def assert_agrees(outcome: Outcome, base_rows: torch.Tensor, tolerance: float) -> None:
    found, expected = outcome.found, outcome.expected
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    rows = base_rows[: len(found)]  # the last one writes no K and V
    assert torch.equal(found[rows], outcome.base[rows])

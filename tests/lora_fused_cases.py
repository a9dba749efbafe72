"""The fused multi-LoRA ops beside the two ops that they replace."""

from __future__ import annotations

import torch

from kernels.lora_plan import LoraPlan
from kernels.lora_rope_kv_write import lora_rope_kv_write
from kernels.lora_shrink_expand import lora_expand_, lora_shrink
from kernels.lora_silu_mul import lora_silu_mul
from kernels.rope_kv_write import rope_kv_write
from kernels.rope_write import QueryScaling, RopeWrite
from kernels.silu_mul import Activation, silu_mul
from tests.lora_kernel_cases import LoraCase

Pair = tuple[torch.Tensor, torch.Tensor]  # fused, apart
Turned = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # and where no delta is added, bool


def silu_both_ways(
    case: LoraCase,
    *,
    graph_rows: int | None = None,
    large: bool = True,
    activation: Activation = "silu",
) -> Pair:
    plan = case.plan(large=large, graph_rows=graph_rows)
    bridge = lora_shrink(case.x, case.site, plan)
    y = case.y.clone()
    lora_expand_(y, bridge, case.site, plan)
    fused = lora_silu_mul(case.y.clone(), bridge, case.site, plan, activation)
    return fused, silu_mul(y, activation)


def assert_gated_agree(case: LoraCase, fused: torch.Tensor, apart: torch.Tensor) -> None:
    """Sums in another order: here and there a sum of gate or up is rounded the other way, and
    without a delta nothing differs."""
    gate, up = case.untouched().chunk(2, dim=1)
    assert torch.equal(fused[gate & up], apart[gate & up])
    unit = torch.finfo(apart.dtype).eps
    torch.testing.assert_close(fused, apart, rtol=16 * unit, atol=16 * unit)
    assert float((fused != apart).float().mean()) < 5e-3


def rope_both_ways(
    case: LoraCase,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    graph_rows: int | None = None,
    large: bool = True,
    has_norm: bool = False,
    norm_type: torch.dtype | None = None,  # None: that of the activations
    rotary_dim: int | None = None,  # None: all of a head; 0: nothing turns
    scaling: QueryScaling | None = None,
) -> tuple[Turned, Turned, Turned]:
    """q, the K cache, the V cache; every fifth row is padding and has no slot."""
    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    tokens, device, dtype = case.x.shape[0], case.x.device, case.x.dtype
    draw = torch.Generator().manual_seed(5)
    positions = torch.randint(0, 50, (tokens,), generator=draw).to(device)
    slots = torch.randperm(tokens + 20, generator=draw)[:tokens].to(device)
    slots[4::5] = -1
    angles = torch.rand(50, rotary_dim // 2, generator=draw)
    cos_sin = torch.stack((angles.cos(), angles.sin()), dim=1).to(device)  # [50, 2, R / 2]
    blocks = -(-(tokens + 20) // 4)
    norm = torch.rand(head_dim, generator=draw).to(device, norm_type or dtype) if has_norm else None

    def caches() -> tuple[torch.Tensor, torch.Tensor]:
        k = torch.zeros(blocks, 4, num_kv_heads, head_dim, device=device, dtype=dtype)
        return k, torch.zeros_like(k)

    plan = case.plan(large=large, graph_rows=graph_rows)
    bridge = lora_shrink(case.x, case.site, plan)
    heads = (num_heads, num_kv_heads, head_dim)

    def write(k: torch.Tensor, v: torch.Tensor) -> RopeWrite:
        table = cos_sin if rotary_dim else None
        return RopeWrite(positions, table, k, v, slots, *heads, norm, norm, 1e-5, q_scaling=scaling)

    k, v = caches()
    fused = lora_rope_kv_write(case.y.clone(), bridge, case.site, plan, write(k, v))
    y = case.y.clone()
    lora_expand_(y, bridge, case.site, plan)
    k_apart, v_apart = caches()
    apart = rope_kv_write(y, write(k_apart, v_apart))
    untouched = case.untouched().view(tokens, -1, head_dim)
    kept = slots >= 0
    same = [untouched[:, :num_heads]]
    for part in untouched[kept, num_heads:].split(num_kv_heads, dim=1):
        same.append(torch.ones_like(k, dtype=torch.bool))
        same[-1].view(-1, num_kv_heads, head_dim)[slots[kept]] = part
    return (fused, apart, same[0]), (k, k_apart, same[1]), (v, v_apart, same[2])


def assert_turns_agree(turned: Turned) -> None:
    """A sum may be rounded the other way, and a turn spreads that over a head: beyond a few units
    in the last place of a head's largest element nothing differs, and without a delta nothing."""
    fused, apart, untouched = turned
    assert torch.equal(fused[untouched], apart[untouched])
    scale = apart.float().abs().amax(-1, keepdim=True)
    unit = torch.finfo(apart.dtype).eps
    assert bool(((fused.float() - apart.float()).abs() <= 4 * unit * scale).all())


def turn_heads(
    case: LoraCase,
    plan: LoraPlan | None,  # None: the base's op, without deltas
    num_heads: int,
    num_kv_heads: int,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    norm: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns [T, Hq + 2 * Hkv, D]: q, then what the caches hold."""
    tokens, device = case.x.shape[0], case.x.device
    size = cos_sin.shape[2] * 2
    k, v = (case.y.new_zeros(tokens, 1, num_kv_heads, size) for _ in "kv")
    slots = torch.arange(tokens, device=device)
    heads = (num_heads, num_kv_heads, size)
    write = RopeWrite(positions, cos_sin, k, v, slots, *heads, norm, norm, 1e-5)
    if plan is None:
        q = rope_kv_write(case.y.clone(), write)
    else:
        bridge = lora_shrink(case.x, case.site, plan)
        q = lora_rope_kv_write(case.y.clone(), bridge, case.site, plan, write)
    return torch.cat((q, k.squeeze(1), v.squeeze(1)), dim=1)

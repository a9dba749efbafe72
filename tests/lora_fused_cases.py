"""The fused multi-LoRA ops beside the two ops that they replace."""

from __future__ import annotations

import torch

from kernels.lora_rope_kv_write import lora_rope_kv_write
from kernels.lora_shrink_expand import lora_expand_, lora_shrink
from kernels.lora_silu_mul import lora_silu_mul
from kernels.rope_kv_write import rope_kv_write
from kernels.rope_write import RopeWrite
from kernels.silu_mul import silu_mul
from tests.lora_kernel_cases import LoraCase

Pair = tuple[torch.Tensor, torch.Tensor]  # fused, apart


def silu_both_ways(case: LoraCase, *, graph_rows: int | None = None, large: bool = True) -> Pair:
    plan = case.plan(large=large, graph_rows=graph_rows)
    bridge = lora_shrink(case.x, case.site, plan)
    y = case.y.clone()
    lora_expand_(y, bridge, case.site, plan)
    return lora_silu_mul(case.y.clone(), bridge, case.site, plan), silu_mul(y)


def rope_both_ways(
    case: LoraCase,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    graph_rows: int | None = None,
    large: bool = True,
    has_norm: bool = False,
) -> tuple[Pair, Pair, Pair]:
    """q, the K cache, the V cache; every fifth row is padding and has no slot."""
    tokens, device, dtype = case.x.shape[0], case.x.device, case.x.dtype
    draw = torch.Generator().manual_seed(5)
    positions = torch.randint(0, 50, (tokens,), generator=draw).to(device)
    slots = torch.randperm(tokens + 20, generator=draw)[:tokens].to(device)
    slots[4::5] = -1
    angles = torch.rand(50, head_dim // 2, generator=draw)
    cos_sin = torch.stack((angles.cos(), angles.sin()), dim=1).to(device)  # [50, 2, D / 2]
    blocks = -(-(tokens + 20) // 4)
    norm = torch.rand(head_dim, generator=draw).to(device, dtype) if has_norm else None

    def caches() -> tuple[torch.Tensor, torch.Tensor]:
        k = torch.zeros(blocks, 4, num_kv_heads, head_dim, device=device, dtype=dtype)
        return k, torch.zeros_like(k)

    plan = case.plan(large=large, graph_rows=graph_rows)
    bridge = lora_shrink(case.x, case.site, plan)
    heads = (num_heads, num_kv_heads, head_dim)

    def write(k: torch.Tensor, v: torch.Tensor) -> RopeWrite:
        return RopeWrite(positions, cos_sin, k, v, slots, *heads, norm, norm, 1e-5)

    k, v = caches()
    fused = lora_rope_kv_write(case.y.clone(), bridge, case.site, plan, write(k, v))
    y = case.y.clone()
    lora_expand_(y, bridge, case.site, plan)
    k_apart, v_apart = caches()
    apart = rope_kv_write(y, write(k_apart, v_apart))
    return (fused, apart), (k, k_apart), (v, v_apart)

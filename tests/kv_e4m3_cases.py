"""Writes of keys and values into a cache in e4m3: bit for bit those of a cache in the activations'
type, rounded."""

from __future__ import annotations

import torch

from kernels.backend import IS_INTERPRETED
from kernels.e4m3 import E4M3, to_cached
from kernels.lora_plan import LoraPlan
from kernels.lora_rope_kv_write import lora_rope_kv_write
from kernels.lora_shrink_expand import lora_shrink
from kernels.rope_kv_write import rope_kv_write
from kernels.rope_write import RopeWrite
from tests.lora_kernel_cases import LoraCase

HEADS = (4, 2, 128)  # of q, of k and v, dimensions
SIZES = (512, 256, 256)
BEYOND = 400.0  # the factor of projections that leaves some values beyond 448


def assert_writes_are_rounded(
    case: LoraCase, plan: LoraPlan | None, *, has_norm: bool = False
) -> None:
    """`plan` None: the base's op, without deltas. Some values are beyond 448, and one is NaN."""
    tokens, device = case.y.shape[0], case.y.device
    draw = torch.Generator().manual_seed(5)
    positions = torch.randint(0, 50, (tokens,), generator=draw).to(device)
    slots = torch.randperm(tokens + 8, generator=draw)[:tokens].to(device)
    angles = torch.rand(50, HEADS[2] // 2, generator=draw)
    table = torch.stack((angles.cos(), angles.sin()), dim=1).to(device)
    norm = (300 * torch.rand(HEADS[2], generator=draw)).to(case.y) if has_norm else None
    qkv = case.y * BEYOND
    if not IS_INTERPRETED:  # its cast makes a number of NaN
        qkv[tokens // 2, -1] = float("nan")  # of v
        qkv[tokens // 2, -2] = float("inf")

    def write(kv_dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        shape = (-(-(tokens + 8) // 4), 4, HEADS[1], HEADS[2])
        k, v = (torch.zeros(shape, device=device, dtype=kv_dtype) for _ in "kv")
        into = RopeWrite(positions, table, k, v, slots, *HEADS, norm, norm, 1e-5)
        if plan is None:
            q = rope_kv_write(qkv.clone(), into)
        else:
            bridge = lora_shrink(case.x, case.site, plan)
            q = lora_rope_kv_write(qkv.clone(), bridge, case.site, plan, into)
        return q, k, v

    q, k, v = write(case.y.dtype)
    for exact in (k, v):
        assert ((exact.abs() > 500) & exact.isfinite()).any()
    assert v.isnan().any() != IS_INTERPRETED
    found = write(E4M3)
    torch.testing.assert_close(found[0], q, rtol=0, atol=0, equal_nan=True)
    for rounded, exact in zip(found[1:], (k, v), strict=True):
        expected = to_cached(exact, E4M3).float()
        torch.testing.assert_close(rounded.float(), expected, rtol=0, atol=0, equal_nan=True)

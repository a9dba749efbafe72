"""Rotary position embedding of q and k, and the write of k and v into the paged cache, in one op.

Su et al., "RoFormer", arXiv 2104.09864, in the "rotate half" order of Hugging Face: the pair of
dimension i is i + D/2, and (a, b) becomes (a cos - b sin, b cos + a sin). Qwen3 normalises every
head of q and k (RMSNorm over D) before it.
Knows tensors and numbers only; slots are given, which block belongs to whom is not known here.
"""

from __future__ import annotations

import torch

from kernels.backend import uses_triton
from kernels.rms_norm import rms_norm_reference


def rope_kv_write(
    qkv: torch.Tensor,  # [T, (Hq + 2 * Hkv) * D]
    positions: torch.Tensor,  # [T]
    cos_sin: torch.Tensor,  # [max_positions, 2, D / 2] float32
    k_cache: torch.Tensor,  # [num_blocks, block_size, Hkv, D]
    v_cache: torch.Tensor,
    slots: torch.Tensor,  # [T] block_id * block_size + offset
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_norm: torch.Tensor | None = None,  # [D]
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    out: torch.Tensor | None = None,  # [T, Hq, D], for q
) -> torch.Tensor:
    """Returns the rotated q [T, Hq, D]; writes the rotated k and v at `slots`.

    On a GPU a row may have a negative slot, a padding row of a CUDA graph: it is written nowhere.
    """
    if uses_triton(qkv):
        from kernels.triton_rope_kv_write import launch_rope_kv_write

        return launch_rope_kv_write(
            qkv,
            positions,
            cos_sin,
            k_cache,
            v_cache,
            slots,
            num_heads,
            num_kv_heads,
            head_dim,
            q_norm,
            k_norm,
            eps,
            out,
        )
    q = rope_kv_write_reference(
        qkv,
        positions,
        cos_sin,
        k_cache,
        v_cache,
        slots,
        num_heads,
        num_kv_heads,
        head_dim,
        q_norm,
        k_norm,
        eps,
    )
    return q if out is None else out.copy_(q)


def rope_kv_write_reference(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, head_dim)
    turning = heads[:, : num_heads + num_kv_heads]  # [T, Hq + Hkv, D]
    if q_norm is not None and k_norm is not None:
        q, k = turning[:, :num_heads], turning[:, num_heads:]
        turning = torch.cat(
            (rms_norm_reference(q, q_norm, eps), rms_norm_reference(k, k_norm, eps)), dim=1
        )
    turned = rotate_half_reference(turning, cos_sin[positions])
    slots = slots.long()
    k_cache.view(-1, num_kv_heads, head_dim).index_copy_(
        0, slots, turned[:, num_heads:].to(k_cache.dtype)
    )
    v_cache.view(-1, num_kv_heads, head_dim).index_copy_(
        0, slots, heads[:, num_heads + num_kv_heads :].to(v_cache.dtype)
    )
    return turned[:, :num_heads]


def rotate_half_reference(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """x [T, H, D], cos_sin [T, 2, D / 2]; float32 inside, one rounding at the end."""
    cos, sin = cos_sin[:, None, 0], cos_sin[:, None, 1]  # [T, 1, D / 2]
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)

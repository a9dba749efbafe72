"""Rotary position embedding of q and k, and the write of k and v into the paged cache, in one op.

Su et al., "RoFormer", arXiv 2104.09864, in the "rotate half" order of Hugging Face: the pair of
dimension i is i + D/2, and (a, b) becomes (a cos - b sin, b cos + a sin). Qwen3 normalises every
head of q and k (RMSNorm over D) before it. Uses tensors and numbers only; the slots are given, and
the owners of blocks are tracked elsewhere.
"""

from __future__ import annotations

import torch

from kernels.backend import uses_triton
from kernels.rms_norm import rms_norm_reference
from kernels.rope_write import RopeWrite


def rope_kv_write(qkv: torch.Tensor, write: RopeWrite) -> torch.Tensor:
    """Writes the rotated k and v of qkv [T, (Hq + 2 * Hkv) * D] at the slots and returns the
    rotated q [T, Hq, D].

    On a GPU a row may have a negative slot, a padding row of a CUDA graph, which is not written.
    """
    if uses_triton(qkv):
        from kernels.triton_rope_kv_write import launch_rope_kv_write

        return launch_rope_kv_write(qkv, write)
    return rope_kv_write_reference(qkv, write)


def rope_kv_write_reference(qkv: torch.Tensor, write: RopeWrite) -> torch.Tensor:
    num_heads, num_kv_heads, head_dim = write.num_heads, write.num_kv_heads, write.head_dim
    heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, head_dim)
    turning = heads[:, : num_heads + num_kv_heads]  # [T, Hq + Hkv, D]
    if write.q_norm is not None and write.k_norm is not None:
        q = rms_norm_reference(turning[:, :num_heads], write.q_norm, write.eps)
        k = rms_norm_reference(turning[:, num_heads:], write.k_norm, write.eps)
        turning = torch.cat((q, k), dim=1)
    turned = rotate_half_reference(turning, write.cos_sin[write.positions])
    slots = write.slots.long()
    write.k_cache.view(-1, num_kv_heads, head_dim).index_copy_(
        0, slots, turned[:, num_heads:].to(write.k_cache.dtype)
    )
    write.v_cache.view(-1, num_kv_heads, head_dim).index_copy_(
        0, slots, heads[:, num_heads + num_kv_heads :].to(write.v_cache.dtype)
    )
    q = turned[:, :num_heads]
    return q if write.out is None else write.out.copy_(q)


def rotate_half_reference(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotates x [T, H, D] by cos_sin [T, 2, D / 2]; float32 inside, one rounding at the end."""
    cos, sin = cos_sin[:, None, 0], cos_sin[:, None, 1]  # [T, 1, D / 2]
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)

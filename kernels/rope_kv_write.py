"""Rotary position embedding of q and k, and the write of k and v into the paged cache, in one op.

Su et al., "RoFormer", arXiv 2104.09864, in the "rotate half" order of Hugging Face: the pair of
dimension i is i + R/2, and (a, b) becomes (a cos - b sin, b cos + a sin); R is D, or less where
only the first dimensions of a head turn (GPT-J, Phi-4), or 0. Qwen3 and Gemma 3 normalise every
head of q and k (RMSNorm over D) before it, OLMo 2 all heads at once. Uses tensors and numbers only;
the slots are given, and the owners of blocks are tracked elsewhere.
"""

from __future__ import annotations

import torch

from kernels.backend import uses_triton
from kernels.e4m3 import indexable, to_cached
from kernels.rms_norm import rms_norm_, rms_norm_reference
from kernels.rope_write import QueryScaling, RopeWrite


def rope_kv_write(qkv: torch.Tensor, write: RopeWrite) -> torch.Tensor:
    """Writes the rotated k and v of qkv [T, (Hq + 2 * Hkv) * D] at the slots and returns the
    rotated q [T, Hq, D]. `qkv` itself may be changed.

    On a GPU a row may have a negative slot, a padding row of a CUDA graph, which is not written.
    """
    if uses_triton(qkv):
        from kernels.triton_rope_kv_write import launch_rope_kv_write

        return launch_rope_kv_write(qkv, norm_wide_(qkv, write))
    return rope_kv_write_reference(qkv, write)


def norm_wide_(qkv: torch.Tensor, write: RopeWrite) -> RopeWrite:
    """Normalises q and k in place where all of a token's heads are normed at once. Returns the
    rest of the write."""
    if not write.has_wide_norm:
        return write
    assert write.q_norm is not None
    assert write.k_norm is not None
    q_size = write.num_heads * write.head_dim
    q = qkv[:, :q_size]
    k = qkv[:, q_size : q_size + write.num_kv_heads * write.head_dim]
    rms_norm_(q, write.q_norm, write.eps)
    rms_norm_(k, write.k_norm, write.eps)
    return write._replace(q_norm=None, k_norm=None)


def rope_kv_write_reference(qkv: torch.Tensor, write: RopeWrite) -> torch.Tensor:
    write = norm_wide_(qkv, write)
    num_heads, num_kv_heads, head_dim = write.num_heads, write.num_kv_heads, write.head_dim
    heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, head_dim)
    turning = heads[:, : num_heads + num_kv_heads]  # [T, Hq + Hkv, D]
    if write.q_norm is not None and write.k_norm is not None:
        q = rms_norm_reference(turning[:, :num_heads], write.q_norm, write.eps)
        k = rms_norm_reference(turning[:, num_heads:], write.k_norm, write.eps)
        turning = torch.cat((q, k), dim=1)
    if write.cos_sin is None:
        turned = turning
    else:
        turned = rotate_half_reference(turning, write.cos_sin[write.positions])
    slots = write.slots.long()
    for cache, kept in (
        (write.k_cache, turned[:, num_heads:]),
        (write.v_cache, heads[:, num_heads + num_kv_heads :]),
    ):
        rows = indexable(cache).view(-1, num_kv_heads, head_dim)
        rows.index_copy_(0, slots, indexable(to_cached(kept, cache.dtype)))
    q = turned[:, :num_heads]
    if write.q_scaling is not None:
        q = scale_queries_reference(q, write.positions, write.q_scaling)
    return q if write.out is None else write.out.copy_(q)


def rotate_half_reference(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotates the first R dimensions of x [T, H, D] by cos_sin [T, 2, R / 2]; float32 inside, one
    rounding at the end."""
    cos, sin = cos_sin[:, None, 0], cos_sin[:, None, 1]  # [T, 1, R / 2]
    rotary_dim = 2 * cos_sin.shape[2]
    a, b = x[..., :rotary_dim].float().chunk(2, dim=-1)
    turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
    return torch.cat((turned, x[..., rotary_dim:]), dim=-1) if rotary_dim < x.shape[-1] else turned


def scale_queries_reference(
    q: torch.Tensor, positions: torch.Tensor, scaling: QueryScaling
) -> torch.Tensor:
    """Multiplies q [T, H, D], rounded before, by its factors in float32."""
    return (q.float() * scaling.factors(positions)[:, None, None]).to(q.dtype)

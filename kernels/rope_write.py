"""The arguments that RoPE and the KV write share in all forms of the op."""

from __future__ import annotations

from typing import NamedTuple

import torch


class RopeWrite(NamedTuple):
    """A turn of q and k by their positions, and a write of k and v into the paged cache."""

    positions: torch.Tensor  # [T]
    cos_sin: torch.Tensor  # [max_positions, 2, D / 2] float32
    k_cache: torch.Tensor  # [num_blocks, block_size, Hkv, D]
    v_cache: torch.Tensor
    slots: torch.Tensor  # [T] block_id * block_size + offset; below 0: a padding row
    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_norm: torch.Tensor | None = None  # [D]
    k_norm: torch.Tensor | None = None
    eps: float = 0.0
    out: torch.Tensor | None = None  # [T, Hq, D], for q

    @property
    def has_norm(self) -> bool:
        return self.q_norm is not None and self.k_norm is not None

    def new_q(self, qkv: torch.Tensor) -> torch.Tensor:
        """Returns `out`, or a new tensor of its shape, after a check of the layouts that the
        Triton kernels require."""
        assert qkv.stride(1) == 1
        assert self.k_cache.is_contiguous()
        assert self.v_cache.is_contiguous()
        shape = (qkv.shape[0], self.num_heads, self.head_dim)
        q = qkv.new_empty(shape) if self.out is None else self.out
        assert q.is_contiguous()
        return q

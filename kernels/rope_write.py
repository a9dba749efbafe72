"""The arguments that RoPE and the KV write share in all forms of the op."""

from __future__ import annotations

from typing import NamedTuple

import torch


class QueryScaling(NamedTuple):
    """Llama 4's and Ministral 3's factor of a query at position p: 1 + beta * log(1 + floor(p /
    original_max_len)), which lets attention stay sharp over long contexts."""

    beta: float
    original_max_len: int  # positions

    def factors(self, positions: torch.Tensor) -> torch.Tensor:
        """Maps [T] to [T] float32."""
        steps = torch.div(positions, self.original_max_len, rounding_mode="floor")
        return 1.0 + self.beta * torch.log(1.0 + steps.float())


class RopeWrite(NamedTuple):
    """A turn of q and k by their positions, and a write of k and v into the paged cache."""

    positions: torch.Tensor  # [T]
    # [max_positions, 2, rotary_dim / 2] float32. The first rotary_dim of a head's D dimensions
    # turn, in pairs i and i + rotary_dim / 2; the others stay. None: a layer without positions.
    cos_sin: torch.Tensor | None
    k_cache: torch.Tensor  # [num_blocks, block_size, Hkv, D]
    v_cache: torch.Tensor
    slots: torch.Tensor  # [T] block_id * block_size + offset; below 0: a padding row
    num_heads: int
    num_kv_heads: int
    head_dim: int
    # [D]: each head is normed. [Hq * D] and [Hkv * D]: all of a token's heads at once, as in
    # OLMo 2. Types and their rounding as in `rms_norm`.
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    eps: float = 0.0
    out: torch.Tensor | None = None  # [T, Hq, D], for q
    q_scaling: QueryScaling | None = None  # of the turned q

    @property
    def rotary_dim(self) -> int:
        return 0 if self.cos_sin is None else 2 * self.cos_sin.shape[2]

    @property
    def has_norm(self) -> bool:
        """Returns True if heads are normed one by one."""
        return self.q_norm is not None and not self.has_wide_norm

    @property
    def has_wide_norm(self) -> bool:
        return self.q_norm is not None and self.q_norm.shape[0] != self.head_dim

    @property
    def constants(self) -> tuple[int, float, int]:
        """Returns the pairs of a head that turn, and beta (0: no scaling) and length of the
        queries' scaling: the Triton kernels are compiled for them."""
        scaling = self.q_scaling
        if scaling is None or scaling.beta == 0.0:
            return self.rotary_dim // 2, 0.0, 1
        return self.rotary_dim // 2, scaling.beta, scaling.original_max_len

    def new_q(self, qkv: torch.Tensor) -> torch.Tensor:
        """Returns `out`, or a new tensor of its shape, after a check of the layouts that the
        Triton kernels require."""
        assert qkv.stride(1) == 1
        assert self.k_cache.is_contiguous()
        assert self.v_cache.is_contiguous()
        assert self.cos_sin is None or self.cos_sin.is_contiguous()
        assert self.rotary_dim <= self.head_dim
        shape = (qkv.shape[0], self.num_heads, self.head_dim)
        q = qkv.new_empty(shape) if self.out is None else self.out
        assert q.is_contiguous()
        return q

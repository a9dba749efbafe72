"""The expand of q, k and v inside RoPE and the KV write: one pass over the fused projection.

Equal to the expand followed by `rope_kv_write`, without writing the sums back: rows without an
adapter to the bit for heads of 128, see `triton_lora_rope_kv_write`, the others up to a rounding of
the sum. A slot below zero marks a padding row, which is not written to the cache. Uses tensors and
numbers only.
"""

from __future__ import annotations

import torch

from kernels.backend import uses_triton
from kernels.few_rows import is_few
from kernels.lora_plan import Bridge, LoraPlan
from kernels.lora_rows import SiteRows
from kernels.lora_shrink_expand import lora_expand_, lora_expand_reference_
from kernels.rope_kv_write import rope_kv_write, rope_kv_write_reference
from kernels.rope_write import RopeWrite


def lora_rope_kv_write(
    qkv: torch.Tensor,  # [T, (Hq + 2 * Hkv) * D]
    bridge: Bridge,
    site: SiteRows,
    plan: LoraPlan,
    write: RopeWrite,
) -> torch.Tensor:
    """Returns the rotated q [T, Hq, D]. `qkv` itself may be changed."""
    if write.has_wide_norm:
        lora_expand_(qkv, bridge, site, plan)
        return rope_kv_write(qkv, write)
    if is_few(qkv, plan) and write.q_norm is None and write.k_norm is None:
        from kernels.triton_lora_rope_few import launch_rope_few

        return launch_rope_few(qkv, bridge, site, plan, write)
    if uses_triton(qkv):
        from kernels.triton_lora_rope_kv_write import launch_lora_rope_kv_write

        return launch_lora_rope_kv_write(qkv, bridge, site, plan, write)
    lora_expand_reference_(qkv, bridge, site, plan)
    return rope_kv_write_reference(qkv, write)

"""The sum of the ranks' parts, added to the residual and normed: the step behind attention and
behind the MLP of each layer.

One kernel for few rows, through memory that CUDA devices share: on two H200s 2.7 us for a row of
4,096 columns, where torch's one-shot sum and the norm take 8.6; 4.5 and 12.7 for 64 rows, 9.2 and
17.4 (two shots) for 256; with 32 adapters 5.4 and 15.4 for 64 rows. Otherwise an exchange and a
norm. Either way every rank gets the same bits, and of two ranks the sum is rounded once.
"""

from __future__ import annotations

import torch

from kernels.backend import uses_triton
from kernels.collective import MAX_BRIDGE_ROWS, Collective
from kernels.lora_add_rms_norm import is_one_launch
from kernels.lora_plan import Bridge, LoraPlan
from kernels.lora_rows import SiteRows
from kernels.lora_shrink_expand import lora_expand_
from kernels.rms_norm import add_rms_norm


def all_reduce_add_rms_norm(
    ranks: Collective,
    x: torch.Tensor,  # [T, H], this rank's part
    residual: torch.Tensor,  # [T, H]
    weight: torch.Tensor,  # [H]
    eps: float,
    scale: float,
    kind: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (normed, new residual), as `add_rms_norm` of the sum of all ranks' x. `kind`: 0 or 1;
    two calls that follow each other without another exchange between them have different ones. On a
    GPU the new residual replaces the old one in memory."""
    memory = ranks.row_memory(x, kind) if uses_triton(x) else None
    if memory is not None:
        from kernels.triton_exchange_norm import launch_exchange_norm

        out = launch_exchange_norm(x, residual, weight, eps, scale, memory)
        if not x.is_meta:
            return out, residual
        # Devices that are no peers launch the other kernels, which a trace has to list, too.
    return add_rms_norm(ranks.all_reduce(x), residual, weight, eps, scale)


def lora_all_reduce_add_rms_norm(
    ranks: Collective,
    x: torch.Tensor,  # [T, H], this rank's part
    residual: torch.Tensor,  # [T, H]
    weight: torch.Tensor,  # [H]
    eps: float,
    bridge: Bridge,  # this rank's part, of a site whose A the ranks share
    site: SiteRows,
    plan: LoraPlan,
    scale: float,
    kind: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the result of `all_reduce_add_rms_norm` for x with the adapters' deltas; consumes x.
    In one kernel the ranks exchange bridges, and a delta is added to the sum; otherwise each rank
    adds that of its part to x before."""
    fits = is_one_launch(x, plan) and not plan.has_affine and len(x) <= MAX_BRIDGE_ROWS
    memory = ranks.row_memory(x, kind) if fits else None
    if memory is not None:
        from kernels.triton_lora_exchange_norm import launch_lora_exchange_norm

        out = launch_lora_exchange_norm(x, residual, weight, eps, bridge, site, plan, scale, memory)
        if not x.is_meta:
            return out, residual
    lora_expand_(x, bridge, site, plan)
    return all_reduce_add_rms_norm(ranks, x, residual, weight, eps, scale, kind)

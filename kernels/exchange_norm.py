"""The sum of the ranks' parts, added to the residual and normed: what follows attention and the MLP
of each layer.

One kernel for few rows, through memory that CUDA devices share; otherwise an exchange and a norm.
Either way every rank gets the same bits, and of two ranks the sum is rounded once.
"""

from __future__ import annotations

import torch

from kernels.backend import uses_triton
from kernels.collective import Collective
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

        out = launch_exchange_norm(x, residual, weight, eps, scale, memory.ranks, memory.max_rows)
        if not x.is_meta:
            return out, residual
        # Devices that are no peers launch the other kernels, which a trace has to list, too.
    return add_rms_norm(ranks.all_reduce(x), residual, weight, eps, scale)

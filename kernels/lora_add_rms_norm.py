"""The expand of o or down inside the norm that follows: `lora_expand_`, then `add_rms_norm`.

One launch for steps of decodes, one program per row: 2.3 us after o or down of Llama-3-8B, where
the norm alone needs 1.3 (H200, one token, 2026-11-21). Otherwise the two ops. A row without adapter
gets the bits of `add_rms_norm`; a row with one may differ from the two ops in the last place,
because its bridge adds up in another order. Uses tensors and numbers only.
"""

from __future__ import annotations

import torch

from kernels.backend import uses_triton
from kernels.few_rows import HALF_TYPES
from kernels.lora_plan import LARGE_MIN_RUN, Bridge, LoraPlan
from kernels.lora_rows import SiteRows
from kernels.lora_shrink_expand import lora_expand_
from kernels.rms_norm import add_rms_norm

# Limits of the one launch. A program holds a page of B in registers, and each row reads one: from
# some number of rows on, the expand, which reads a page for eight rows, is faster.
MAX_HIDDEN = 4096
MAX_ROWS = 64


def lora_add_rms_norm(
    x: torch.Tensor,  # [T, H]
    residual: torch.Tensor,  # [T, H]
    weight: torch.Tensor,  # [H]
    eps: float,
    bridge: Bridge,
    site: SiteRows,
    plan: LoraPlan,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the normed values and the new residual, scale * (x + delta) + residual. Consumes x
    and residual."""
    if is_one_launch(x, plan):
        from kernels.triton_lora_add_rms_norm import launch_lora_add_rms_norm

        normed = launch_lora_add_rms_norm(x, residual, weight, eps, bridge, site, plan, scale)
        return normed, residual
    lora_expand_(x, bridge, site, plan)
    return add_rms_norm(x, residual, weight, eps, scale)


def is_one_launch(x: torch.Tensor, plan: LoraPlan) -> bool:
    """Decides by the number of rows, and not by the adapters of some of them: a row's bits are the
    same with and without its neighbours' adapters. So many rows that some may be in a large tile
    and others not need a plan without room for large tiles."""
    rows, hidden = x.shape
    if rows > MAX_ROWS or hidden > MAX_HIDDEN or x.dtype not in HALF_TYPES or plan.max_large:
        return False
    return uses_triton(x) and (rows <= LARGE_MIN_RUN or not len(plan.large))

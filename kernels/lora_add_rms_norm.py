"""The expand of o or down inside the norm that follows: `lora_expand_`, then `add_rms_norm`.

One launch for steps of decodes, one program per row: 2.3 us after o or down of Llama-3-8B, where
the norm alone needs 1.3 (H200, one token, 2026-11-21). Otherwise the two ops. A row without adapter
gets the bits of `add_rms_norm`; a row with one may differ from the two ops in the last place,
because its bridge adds up in another order. Uses tensors and numbers only.
"""

from __future__ import annotations

import torch

from kernels.few_rows import has_row_programs
from kernels.lora_plan import Bridge, LoraPlan
from kernels.lora_rows import SiteRows
from kernels.lora_shrink_expand import lora_expand_
from kernels.rms_norm import add_rms_norm

MAX_HIDDEN = 4096  # limit of the one launch: it holds a page of B in registers


def lora_add_rms_norm(
    x: torch.Tensor,  # [T, H]
    residual: torch.Tensor,  # [T, H]
    weight: torch.Tensor,  # [H]
    eps: float,
    bridge: Bridge,
    site: SiteRows,
    plan: LoraPlan,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the normed values and the new residual. Consumes x and residual."""
    if has_row_programs(x, plan) and x.shape[1] <= MAX_HIDDEN:
        from kernels.triton_lora_add_rms_norm import launch_lora_add_rms_norm

        return launch_lora_add_rms_norm(x, residual, weight, eps, bridge, site, plan), residual
    lora_expand_(x, bridge, site, plan)
    return add_rms_norm(x, residual, weight, eps)

"""The expand of o or down inside the norms that follow: `lora_expand_`, then `norm_add_norm`.

The delta is in x before its norm. One launch for the steps for which `lora_add_rms_norm` has one,
and with its bits: those of `norm_add_norm` for a row without adapter. Otherwise the two ops. Uses
tensors and numbers only.
"""

from __future__ import annotations

import torch

from kernels.lora_add_rms_norm import is_one_launch
from kernels.lora_plan import Bridge, LoraPlan
from kernels.lora_rows import SiteRows
from kernels.lora_shrink_expand import lora_expand_
from kernels.norm_add_norm import norm_add_norm


def lora_norm_add_norm(
    x: torch.Tensor,  # [T, H]
    residual: torch.Tensor,  # [T, H]
    post_weight: torch.Tensor,  # [H]
    next_weight: torch.Tensor | None,  # [H], of the same type; None: no second norm
    eps: float,
    bridge: Bridge,
    site: SiteRows,
    plan: LoraPlan,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the next block's input and the new residual. Consumes x and residual."""
    if is_one_launch(x, plan):
        from kernels.triton_lora_norm_add_norm import launch_lora_norm_add_norm

        hidden = launch_lora_norm_add_norm(
            x, residual, post_weight, next_weight, eps, bridge, site, plan
        )
        return hidden, residual
    lora_expand_(x, bridge, site, plan)
    return norm_add_norm(x, residual, post_weight, next_weight, eps)

"""The norm of a block's output, its addition to the residual, and the norm of the next block.

Gemma 2 and 3 normalise a block's output (arXiv 2408.00118): residual' = residual + norm(x), and
the next block reads norm'(residual'). OLMo 2 and 3 have no second norm (arXiv 2501.00656): the next
block reads residual' itself. Each of the three results is rounded to x's type, as in Hugging Face.
A row's result depends on that row only. Uses tensors and numbers only.
"""

from __future__ import annotations

import torch

from kernels.backend import uses_triton
from kernels.rms_norm import add_rms_norm_reference, rms_norm_reference


def norm_add_norm(
    x: torch.Tensor,  # [T, H]
    residual: torch.Tensor,  # [T, H]
    post_weight: torch.Tensor,  # [H]
    next_weight: torch.Tensor | None,  # [H], of the same type; None: no second norm
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the next block's input and the new residual; without a second norm, both are the new
    residual. On a GPU it replaces the old one in memory: use the returned tensor."""
    if uses_triton(x):
        from kernels.triton_norm_add_norm import launch_norm_add_norm

        return launch_norm_add_norm(x, residual, post_weight, next_weight, eps), residual
    return norm_add_norm_reference(x, residual, post_weight, next_weight, eps)


def norm_add_norm_reference(
    x: torch.Tensor,
    residual: torch.Tensor,
    post_weight: torch.Tensor,
    next_weight: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    normed = rms_norm_reference(x, post_weight, eps)
    if next_weight is None:
        total = residual + normed
        return total, total
    return add_rms_norm_reference(normed, residual, next_weight, eps)

"""Root-mean-square normalisation: y = weight * x / sqrt(mean(x^2) + eps).

Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv 1910.07467. The mean is computed
in float32 and the quotient is rounded to x's type before the weight is applied, the order of
Hugging Face's Llama, so that bf16 results agree with it bit for bit. A row's result depends on that
row only. Uses tensors and numbers only.
"""

from __future__ import annotations

import torch

from kernels.backend import uses_triton


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Maps x [..., H] and weight [H] to [..., H]."""
    if uses_triton(x):
        from kernels.triton_rms_norm import launch_rms_norm

        if x.dim() == 2:
            return launch_rms_norm(x, None, weight, eps)
        return launch_rms_norm(x.reshape(-1, x.shape[-1]), None, weight, eps).view(x.shape)
    return rms_norm_reference(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Maps x and residual [T, H] to (normed, new residual), the latter x + residual in x's type.

    On a GPU the new residual replaces the old one in memory: use the returned tensor.
    """
    if uses_triton(x):
        from kernels.triton_rms_norm import launch_rms_norm

        return launch_rms_norm(x, residual, weight, eps), residual
    return add_rms_norm_reference(x, residual, weight, eps)


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * inverse).to(x.dtype) * weight


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + residual
    return rms_norm_reference(total, weight, eps), total

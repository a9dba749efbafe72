"""Root-mean-square normalisation: y = weight * x / sqrt(mean(x^2) + eps).

Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv 1910.07467. The mean is computed
in float32. Weights of x's type: the quotient is rounded to it before the weight is applied, the
order of Hugging Face's Llama. Float32 weights with x in 16 bits: the product is rounded once, the
order of its Gemma (whose weights get their 1 + w in float32) and OLMo 2. So bf16 results agree with
it bit for bit. A row's result depends on that row only. Uses tensors and numbers only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.backend import uses_triton
from kernels.collective import Collective


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Maps x [..., H] and weight [H] to [..., H] of x's type."""
    if uses_triton(x):
        from kernels.triton_rms_norm import launch_rms_norm

        if x.dim() == 2:
            return launch_rms_norm(x, None, weight, eps)
        return launch_rms_norm(x.reshape(-1, x.shape[-1]), None, weight, eps).view(x.shape)
    return rms_norm_reference(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Maps x and residual [T, H] to (normed, new residual), the latter scale * x + residual in x's
    type. The product is rounded to it first: Granite's residual multiplier.

    On a GPU the new residual replaces the old one in memory: use the returned tensor.
    """
    if uses_triton(x):
        from kernels.triton_rms_norm import launch_rms_norm

        return launch_rms_norm(x, residual, weight, eps, scale), residual
    return add_rms_norm_reference(x, residual, weight, eps, scale)


def rms_norm_(x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """Normalises x [T, H], whose rows may lie apart, in place."""
    if uses_triton(x):
        from kernels.triton_rms_norm import launch_rms_norm

        launch_rms_norm(x, None, weight, eps, out=x)
    else:
        x.copy_(rms_norm_reference(x, weight, eps))


def rms_norm_of_ranks_(
    parts: Sequence[torch.Tensor],  # each [T, h], rows may lie apart: this rank's columns
    weights: Sequence[torch.Tensor],  # each [h]
    eps: float,
    ranks: Collective,
) -> None:
    """Normalises each part, together with those of the other ranks, in place, as `rms_norm_`
    would the whole. All ranks have equally many columns. One exchange for all parts."""
    wide = [x.float() for x in parts]
    means = torch.cat([x.square().mean(-1, keepdim=True) for x in wide], dim=-1)
    inverse = torch.rsqrt(ranks.all_reduce(means) / ranks.size + eps)  # [T, parts]
    for i, (x, weight) in enumerate(zip(parts, weights, strict=True)):
        x.copy_(_weighted(wide[i] * inverse[:, i : i + 1], weight, x.dtype))


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return _weighted(wide * inverse, weight, x.dtype)


def _weighted(normed: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Applies the weight to float32 values, in the order of its family."""
    if weight.dtype != dtype:
        return (normed * weight).to(dtype)
    return normed.to(dtype) * weight


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    total = (x if scale == 1.0 else x * scale) + residual
    return rms_norm_reference(total, weight, eps), total

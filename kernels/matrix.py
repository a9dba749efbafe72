"""The forms of a layer's matrix: in the type of the activations, in FP8, or in 4 bits."""

from __future__ import annotations

import torch
import torch.nn.functional

from kernels.e4m3 import E4m3Rows
from kernels.int4 import Int4Rows

Matrix = torch.Tensor | E4m3Rows | Int4Rows  # [N, K]


def dense_linear(
    x: torch.Tensor,  # [T, K]
    weight: torch.Tensor,  # [N, K]
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns torch's `linear`, [T, N]. On the meta device torch's own way imports sympy, which
    takes 0.7 s of a start and more without compiled bytecode."""
    if x.is_meta:
        return x.new_empty((x.shape[0], weight.shape[0]))
    return torch.nn.functional.linear(x, weight, bias)

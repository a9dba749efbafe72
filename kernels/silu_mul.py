"""Gated activation of an MLP: y = act(gate) * up.

Shazeer, "GLU Variants Improve Transformer", arXiv 2002.05202. Llama's SwiGLU has silu(a) = a *
sigmoid(a), Gemma's GeGLU the GELU of Hendrycks and Gimpel, arXiv 1606.08415, in its approximation
by tanh. The two halves come from one fused projection: gate in the first I columns, up in the last
I. Uses tensors and numbers only.
"""

from __future__ import annotations

from typing import Literal

import torch

from kernels.backend import uses_triton

Activation = Literal["silu", "gelu_tanh"]


def silu_mul(gate_up: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
    """Maps gate_up [T, 2 * I] to [T, I]."""
    if uses_triton(gate_up):
        from kernels.triton_silu_mul import launch_silu_mul

        return launch_silu_mul(gate_up, activation == "gelu_tanh")
    return silu_mul_reference(gate_up, activation)


def silu_mul_reference(gate_up: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    # The activation is rounded to the type before the product, as in Hugging Face.
    if activation == "gelu_tanh":
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    return torch.nn.functional.silu(gate) * up

"""Gated activation of the Llama MLP: y = silu(gate) * up, silu(a) = a * sigmoid(a).

Shazeer, "GLU Variants Improve Transformer", arXiv 2002.05202 (SwiGLU). The two halves come from one
fused projection: gate in the first I columns, up in the last I. Uses tensors and numbers only.
"""

from __future__ import annotations

import torch

from kernels.backend import uses_triton


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Maps gate_up [T, 2 * I] to [T, I]."""
    if uses_triton(gate_up):
        from kernels.triton_silu_mul import launch_silu_mul

        return launch_silu_mul(gate_up)
    return silu_mul_reference(gate_up)


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    # silu is rounded to the type before the product, as in Hugging Face's Llama.
    return torch.nn.functional.silu(gate) * up

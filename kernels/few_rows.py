"""When a step has so few rows that ops have kernels of their own for it.

Such a step is bound by reading the weights and by the length of what lies between two products.
Knows shapes, types and plans; no op.
"""

from __future__ import annotations

import torch

from kernels.backend import uses_triton
from kernels.lora_plan import LoraPlan

FEW_ROWS = 8  # the narrow side of an mma
_TYPES = (torch.bfloat16, torch.float16)  # a page in float32 would not fit into the registers


def is_few(x: torch.Tensor, plan: LoraPlan | None = None) -> bool:
    """x [T, ...] and the step's plan. The number of rows decides alone, not who has adapters: a
    row's bits are the same with and without neighbours' adapters."""
    if x.shape[0] > FEW_ROWS or x.dtype not in _TYPES or not uses_triton(x):
        return False
    return plan is None or not plan.max_large

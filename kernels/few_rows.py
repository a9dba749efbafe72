"""The limit below which ops have kernels of their own for few rows.

Such a step is bound by reading the weights and by the latency between two products. Uses shapes,
types and plans; free of ops.
"""

from __future__ import annotations

import torch

from kernels.backend import uses_triton
from kernels.lora_plan import LoraPlan

FEW_ROWS = 8  # the narrow side of an mma
HALF_TYPES = (torch.bfloat16, torch.float16)  # a page in float32 would not fit into the registers


def is_few(x: torch.Tensor, plan: LoraPlan | None = None) -> bool:
    """Returns True for x [T, ...] and the step's plan. Only the number of rows decides, not which
    rows have adapters: a row's bits are the same with and without neighbours' adapters."""
    if x.shape[0] > FEW_ROWS or x.dtype not in HALF_TYPES or not uses_triton(x):
        return False
    return plan is None or not plan.max_large

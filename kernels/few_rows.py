"""The limits below which ops have kernels of their own for few rows.

Such a step is bound by reading the weights and by the latency between two products. Uses shapes,
types and plans; free of ops.
"""

from __future__ import annotations

import torch

from kernels.backend import uses_triton
from kernels.lora_plan import LARGE_MIN_RUN, LoraPlan

FEW_ROWS = 8  # the narrow side of an mma
# Up to here the ops that add a delta have a program for each row. Beyond, those that read a page of
# B for up to eight rows are as fast or faster.
MAX_ROW_PROGRAMS = 64
_TYPES = (torch.bfloat16, torch.float16)  # a page in float32 would not fit into the registers


def is_few(x: torch.Tensor, plan: LoraPlan | None = None) -> bool:
    """Returns True for x [T, ...] and the step's plan. Only the number of rows decides, not which
    rows have adapters: a row's bits are the same with and without neighbours' adapters."""
    if x.shape[0] > FEW_ROWS or x.dtype not in _TYPES or not uses_triton(x):
        return False
    return plan is None or not plan.max_large


def has_row_programs(x: torch.Tensor, plan: LoraPlan) -> bool:
    """Decides by the number of rows, as `is_few` does. So many rows that some may be in a large
    tile and others not need a plan without room for large tiles."""
    rows = x.shape[0]
    if rows > MAX_ROW_PROGRAMS or x.dtype not in _TYPES or plan.max_large:
        return False
    return uses_triton(x) and (rows <= LARGE_MIN_RUN or not len(plan.large))

"""y = x W^T (+ bias) with W in 4 bits, which stays in 4 bits in memory.

Up to MAX_WIDE_ROWS rows on Hopper and MAX_MID_ROWS elsewhere, kernels unpack the integers in
registers; sums are float32, those of a group are multiplied by its scale, and the result is rounded
once: W is not rounded at all. Beyond, W is written out in the type of x, rounded once as a base
that is served dequantized, and the library multiplies: the bytes of W are then few beside the
products. Uses tensors and numbers only.
"""

from __future__ import annotations

import torch

from kernels.backend import is_hopper, uses_triton
from kernels.few_rows import HALF_TYPES
from kernels.int4 import Int4Rows
from kernels.matrix import dense_linear

MAX_MID_ROWS = 128
MAX_WIDE_ROWS = 256  # on Hopper
_CHUNK = 16 * 1024 * 1024  # elements of W that the reference has in float32 at a time


def int4_linear_many(
    x: torch.Tensor,  # [T, K]
    weight: Int4Rows,  # [N, K]
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Returns y [T, N] in x's type, by the kernels of more than few rows, however few there are."""
    if not uses_triton(x):
        return reference_product(x, weight, bias)
    rows = sorted_columns(x, weight)
    if x.dtype in HALF_TYPES:
        if 0 < rows.shape[0] <= MAX_WIDE_ROWS and is_hopper(rows) and _can_be_fetched(rows):
            from kernels.gluon_int4_linear import launch_int4_wide

            return launch_int4_wide(rows, weight, bias)
        if rows.shape[0] <= MAX_MID_ROWS:
            from kernels.triton_int4_mid import launch_int4_mid

            return launch_int4_mid(rows, weight, bias)
    from kernels.triton_int4 import launch_write_out

    return dense_linear(rows, launch_write_out(weight, x.dtype), bias)


def _can_be_fetched(x: torch.Tensor) -> bool:
    """Returns True if the bulk copy engine reads the rows, which begin at multiples of 16 bytes."""
    return x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0


def sorted_columns(x: torch.Tensor, weight: Int4Rows) -> torch.Tensor:
    """Returns x [T, K] with its columns in the order of the weight's."""
    return x if weight.order is None else x.index_select(1, weight.order)


def reference_product(x: torch.Tensor, weight: Int4Rows, bias: torch.Tensor | None) -> torch.Tensor:
    wide = x.float()
    parts = weight.split(max(1, _CHUNK // weight.columns))
    y = torch.cat([wide @ part.float().T for part in parts], dim=1)
    if bias is not None:
        y += bias
    return y.to(x.dtype)

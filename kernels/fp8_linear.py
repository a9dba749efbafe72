"""y = x W^T (+ bias) in FP8: weights in e4m3 with a scale for each output, x quantised token by
token.

One arithmetic for any number of rows, on any device: products of e4m3 values are exact and add up
in float32, the sum is multiplied by both scales, the bias is added, and the result is rounded once.
Kernels differ in the order of the sums. Uses tensors and numbers only.
"""

from __future__ import annotations

import torch

from kernels.backend import uses_triton
from kernels.e4m3 import CHUNK, E4m3Rows, quantize_rows

MAX_MID_ROWS = 128  # beyond, the library's product is as good


def fp8_linear_many(
    x: torch.Tensor,  # [T, K]
    weight: E4m3Rows,  # [N, K]
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Returns y [T, N] in x's type, by the kernels of more than few rows, however few there are."""
    rows, dtype = quantize_rows(x), x.dtype
    if uses_triton(rows.values) and rows.shape[0] <= MAX_MID_ROWS:
        from kernels.triton_fp8_mid import launch_fp8_mid

        return launch_fp8_mid(rows, weight, bias, dtype)
    if uses_triton(rows.values) and (rows.is_cuda or rows.values.is_meta):
        return torch._scaled_mm(
            rows.values,
            weight.values.T,
            scale_a=rows.scales[:, None],
            scale_b=weight.scales[None, :],
            bias=bias,
            out_dtype=dtype,
            use_fast_accum=False,
        )
    return reference_product(rows, weight, bias, dtype)


def reference_product(
    rows: E4m3Rows, weight: E4m3Rows, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    x = rows.values.float()
    height = max(1, CHUNK // weight.shape[1])
    y = torch.cat([x @ part.float().T for part in torch.split(weight.values, height)], dim=1)
    y = y * rows.scales[:, None] * weight.scales
    if bias is not None:
        y += bias
    return y.to(dtype)

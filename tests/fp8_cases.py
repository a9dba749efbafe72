"""FP8 problems for the kernels' tests, and the scheme in float64 arithmetic."""

from __future__ import annotations

import torch

from kernels.e4m3 import E4m3Rows, empty_rows
from kernels.lora_plan import LoraPlan
from tests.few_rows_cases import both_products, draw_weight
from tests.lora_kernel_cases import LoraCase

# Every finite value of e4m3 that is not negative, in order: its last bit is its index's.
GRID = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()


def quantised(weight: torch.Tensor) -> E4m3Rows:
    rows = empty_rows(weight.shape[0], weight.shape[1], weight.device)
    rows.write_(weight)
    return rows


def rounded(values: torch.Tensor) -> torch.Tensor:
    """Returns the nearest values of e4m3, of two the one whose last bit is 0, in float64."""
    grid = GRID.to(values.device)
    size = values.double().abs()
    above = torch.searchsorted(grid, size).clamp(1, len(grid) - 1)
    low, high = grid[above - 1], grid[above]
    is_high = (size - low > high - size) | ((size - low == high - size) & (above % 2 == 0))
    return torch.where(is_high, high, low) * values.double().sign()


def scheme(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the values of e4m3 and the scale of each row; factors are those of float32."""
    wide = rows.float()
    largest = wide.abs().amax(1).double()
    factor = (448.0 / largest).float()
    return rounded(wide * factor[:, None]), (largest / 448.0).float().double()


def scheme_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Returns the product of the scheme in float64, of unquantised x and weight."""
    (x_values, x_scales), (w_values, w_scales) = scheme(x), scheme(weight)
    y = (x_values @ w_values.T) * x_scales[:, None] * w_scales
    return y if bias is None else y + bias.double()


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def both_fp8_products(
    case: LoraCase, bias: torch.Tensor | None, plan: LoraPlan
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """y alone, y with the shrink beside it, the scheme's y, and the case's y plus the delta of that
    bridge."""
    weight = draw_weight(case)
    alone, beside, y = both_products(case, quantised(weight), bias, plan)
    return alone, beside, scheme_product(case.x, weight, bias), y

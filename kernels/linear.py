"""y = x W^T (+ bias), and next to it the adapters' shrink of the same x.

For few rows one kernel of ours does both: there a shrink is as long as a launch, so it runs where x
is read anyway. For more rows, and for 4 bits on Hopper, the product, then the shrink; in a CUDA
graph of decodes the two beside each other. All give a row the same y with and without the shrink,
to the bit. Uses tensors and numbers only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.backend import is_hopper, uses_triton
from kernels.e4m3 import E4m3Rows, quantize_rows
from kernels.few_rows import is_few
from kernels.fp8_linear import fp8_linear_many
from kernels.graph_branch import Branch, can_branch
from kernels.int4 import Int4Rows
from kernels.int4_linear import int4_linear_many, sorted_columns
from kernels.lora_plan import Bridge, LoraPlan
from kernels.lora_rows import SiteRows
from kernels.lora_shrink_expand import lora_shrink
from kernels.matrix import Matrix, dense_linear

if TYPE_CHECKING:
    from kernels.triton_linear_few import ShrinkBeside

MAX_BRANCH_ROWS = 128  # products of more rows leave no room beside them


def linear(
    x: torch.Tensor,  # [T, K]
    weight: Matrix,  # [N, K]
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Computes torch's `linear`, up to the order of the sums; for a weight in FP8 see `fp8_linear`,
    for one in 4 bits `int4_linear`."""
    few = _has_few_kernel(x, weight) and is_few(x)
    return _few_product(x, weight, bias) if few else _library_product(x, weight, bias)


def linear_shrink(
    x: torch.Tensor,
    weight: Matrix,
    bias: torch.Tensor | None,
    site: SiteRows,
    plan: LoraPlan,
) -> tuple[torch.Tensor, Bridge]:
    """Returns `linear` and `lora_shrink`."""
    if _has_few_kernel(x, weight) and is_few(x, plan):
        from kernels.triton_linear_few import shrink_beside

        shrink = shrink_beside(x, site, plan)
        return _few_product(x, weight, bias, shrink), shrink.bridge
    if _has_branch(x, plan):
        return _linear_beside_shrink(x, weight, bias, site, plan)
    y = _library_product(x, weight, bias)
    return y, lora_shrink(x, site, plan)


def _has_few_kernel(x: torch.Tensor, weight: Matrix) -> bool:
    """Returns False for 4 bits on Hopper, whose kernel of more rows is faster for few ones, too."""
    return not (isinstance(weight, Int4Rows) and is_hopper(x))


def _few_product(
    x: torch.Tensor, weight: Matrix, bias: torch.Tensor | None, shrink: ShrinkBeside | None = None
) -> torch.Tensor:
    if isinstance(weight, E4m3Rows):
        from kernels.triton_fp8_few import launch_fp8_few

        return launch_fp8_few(x, quantize_rows(x), weight, bias, shrink)
    if isinstance(weight, Int4Rows):
        from kernels.triton_int4_few import launch_int4_few

        return launch_int4_few(x, sorted_columns(x, weight), weight, bias, shrink=shrink)
    from kernels.triton_linear_few import launch_linear_few

    return launch_linear_few(x, weight, bias, shrink)


def _library_product(x: torch.Tensor, weight: Matrix, bias: torch.Tensor | None) -> torch.Tensor:
    if isinstance(weight, E4m3Rows):
        return fp8_linear_many(x, weight, bias)
    if isinstance(weight, Int4Rows):
        return int4_linear_many(x, weight, bias)
    return dense_linear(x, weight, bias)


def _has_branch(x: torch.Tensor, plan: LoraPlan) -> bool:
    if plan.max_large or not plan.max_units or x.shape[0] > MAX_BRANCH_ROWS:
        return False
    return uses_triton(x) and can_branch(x)


def _linear_beside_shrink(
    x: torch.Tensor,
    weight: Matrix,
    bias: torch.Tensor | None,
    site: SiteRows,
    plan: LoraPlan,
) -> tuple[torch.Tensor, Bridge]:
    from kernels.triton_lora_shrink import new_planes, shrink_small_

    planes = new_planes(x, site, plan)
    branch = Branch(x)
    y = _library_product(x, weight, bias)
    with branch.entered():
        shrink_small_(planes, x, site, plan)
    branch.join()
    return y, Bridge(planes, None)

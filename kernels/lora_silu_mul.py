"""The expand of gate and up inside the gated activation: act(gate + dgate) * (up + dup) in one
pass.

Equal to the expand followed by `silu_mul`, without writing the sums back: rows without an adapter
to the bit, others up to the order of the sums. Uses tensors and numbers only.
"""

from __future__ import annotations

import torch

from kernels.backend import uses_triton
from kernels.few_rows import is_few
from kernels.lora_plan import Bridge, LoraPlan
from kernels.lora_rows import SiteRows
from kernels.lora_shrink_expand import lora_expand_reference_
from kernels.silu_mul import Activation, silu_mul_reference


def lora_silu_mul(
    gate_up: torch.Tensor,  # [T, 2 * I]
    bridge: Bridge,
    site: SiteRows,
    plan: LoraPlan,
    activation: Activation = "silu",
) -> torch.Tensor:
    """Returns [T, I], rows without adapter included. `gate_up` itself may be changed."""
    if is_few(gate_up, plan):
        from kernels.triton_lora_silu_few import launch_silu_few

        return launch_silu_few(gate_up, bridge, site, plan, activation == "gelu_tanh")
    if uses_triton(gate_up):
        from kernels.triton_lora_silu_mul import launch_lora_silu_mul

        return launch_lora_silu_mul(gate_up, bridge, site, plan, activation == "gelu_tanh")
    return lora_silu_mul_reference(gate_up, bridge, site, plan, activation)


def lora_silu_mul_reference(
    gate_up: torch.Tensor,
    bridge: Bridge,
    site: SiteRows,
    plan: LoraPlan,
    activation: Activation = "silu",
) -> torch.Tensor:
    lora_expand_reference_(gate_up, bridge, site, plan)
    return silu_mul_reference(gate_up, activation)

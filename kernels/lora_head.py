"""The delta of the head: logits += (x A^T) B, for the rows whose adapters have it.

The columns are those of the vocabulary, so B is in pieces of columns. The rows are those of small
tiles of a `LoraPlan`. A row without the delta keeps its bits. Uses tensors and numbers only.
"""

from __future__ import annotations

import torch

from kernels.backend import uses_triton
from kernels.lora_plan import LoraPlan
from kernels.lora_rows import SiteRows
from kernels.lora_shrink_expand import lora_expand_reference_, lora_shrink_reference


def lora_head_(
    logits: torch.Tensor,  # [R, V] float32
    x: torch.Tensor,  # [R, H]
    site: SiteRows,
    plan: LoraPlan,  # of these rows, without large tiles; written with the head's counts
) -> None:
    """Adds the delta, added in float32 and rounded once."""
    assert not plan.max_large
    if uses_triton(logits):
        from kernels.triton_lora_head import launch_lora_head_

        launch_lora_head_(logits, x, site, plan)
    else:
        lora_head_reference_(logits, x, site, plan)


def lora_head_reference_(
    logits: torch.Tensor, x: torch.Tensor, site: SiteRows, plan: LoraPlan
) -> None:
    lora_expand_reference_(logits, lora_shrink_reference(x, site, plan), site, plan)

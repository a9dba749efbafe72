"""What the model calls to add the adapters' part to the output of one of its matrix products.

Joins a site's pools with a step's mapping; the arithmetic is the kernels', the bookkeeping the
pool's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.lora_shrink_expand import lora_add_, lora_embed_add_
from lora.mapping import LoraBatch
from lora.pool import AdapterPool
from lora.sites import Site


def apply_lora_(
    site: Site,
    outputs: Sequence[torch.Tensor],  # one [T, N_s] a slice; views of the fused output will do
    x: torch.Tensor,  # [T, K]
    batch: LoraBatch,
    pool: AdapterPool,
) -> None:
    pools = pool.site_pool(site.name)
    if pools is None:
        return
    lora_add_(
        outputs,
        x,
        pools.a,
        pools.b,
        batch.token_owner,
        batch.row_ids,
        batch.row_owner,
        batch.segments,
    )


def apply_lora_embedding_(
    site: Site, y: torch.Tensor, token_ids: torch.Tensor, batch: LoraBatch, pool: AdapterPool
) -> None:
    """y [T, H] is the base's embedding of token_ids [T]."""
    pools = pool.site_pool(site.name)
    if pools is None:
        return
    lora_embed_add_(
        y,
        token_ids,
        pools.a[0],
        pools.b[0],
        batch.token_owner,
        batch.row_ids,
        batch.row_owner,
    )

"""What the model calls to add the adapters' part to the output of one of its matrix products.

Joins a site's pools with a step's mapping; the arithmetic is the kernels', the bookkeeping the
pool's. In two parts over a `LoraPlan` (shrink, then an expand, alone or inside the op that reads
its output) or, of the sites that need no speed, at once over a `LoraBatch`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.lora_plan import Bridge, LoraPlan
from kernels.lora_rope_kv_write import lora_rope_kv_write
from kernels.lora_shrink_expand import (
    lora_add_,
    lora_embed_add_,
    lora_expand_,
    lora_shrink,
)
from kernels.lora_silu_mul import lora_silu_mul
from lora.mapping import LoraBatch
from lora.pool import AdapterPool, SitePool
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


def shrink(site: Site, x: torch.Tensor, plan: LoraPlan, pool: AdapterPool) -> Bridge:
    """x [T, K]. One launch for all slices; may run before the base's product or beside it."""
    return lora_shrink(x, _pools(site, pool).a, plan)


def expand_(site: Site, y: torch.Tensor, bridge: Bridge, plan: LoraPlan, pool: AdapterPool) -> None:
    """y [T, sum of N_s] += the delta, in place; rows without adapter keep their bits."""
    lora_expand_(y, bridge, _pools(site, pool).b, plan)


def expand_silu_mul(
    site: Site, gate_up: torch.Tensor, bridge: Bridge, plan: LoraPlan, pool: AdapterPool
) -> torch.Tensor:
    """`expand_`, then `silu_mul`, in one pass: [T, 2 * I] -> [T, I]. Consumes gate_up."""
    return lora_silu_mul(gate_up, bridge, _pools(site, pool).b, plan)


def expand_rope_kv_write(
    site: Site,
    qkv: torch.Tensor,
    bridge: Bridge,
    plan: LoraPlan,
    pool: AdapterPool,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,  # below 0: a padding row
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    out: torch.Tensor | None = None,  # for q
) -> torch.Tensor:
    """`expand_`, then `rope_kv_write`, in one pass: q [T, Hq, D]. Consumes qkv."""
    return lora_rope_kv_write(
        qkv,
        bridge,
        _pools(site, pool).b,
        plan,
        positions,
        cos_sin,
        k_cache,
        v_cache,
        slots,
        num_heads,
        num_kv_heads,
        head_dim,
        q_norm,
        k_norm,
        eps,
        out,
    )


def _pools(site: Site, pool: AdapterPool) -> SitePool:
    pools = pool.site_pool(site.name)
    assert pools is not None, f"{site.name} has no pool: only optional sites may lack it"
    return pools

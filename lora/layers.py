"""The model's matrix products with the additions of adapters.

Joins a site's pools with a step's mapping; the kernels hold the arithmetic, the pool the
bookkeeping. With a `LoraPlan` in two parts: the shrink with the product, the expand in the op that
reads it, which may be the next layer's. With a `LoraBatch` (the reference, and sites that need no
speed) at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.linear import linear, linear_shrink
from kernels.lora_add_rms_norm import lora_add_rms_norm
from kernels.lora_plan import Bridge, LoraPlan
from kernels.lora_rope_kv_write import lora_rope_kv_write
from kernels.lora_shrink_expand import lora_add_, lora_embed_add_, lora_expand_
from kernels.lora_silu_mul import lora_silu_mul
from kernels.rms_norm import add_rms_norm
from kernels.rope_kv_write import rope_kv_write
from kernels.rope_write import RopeWrite
from kernels.silu_mul import silu_mul
from lora.mapping import LoraBatch
from lora.pool import AdapterPool, SitePool
from lora.sites import Site


def apply_lora_(
    site: Site,
    outputs: Sequence[
        torch.Tensor
    ],  # one [T, N_s] per slice; views of the fused output are accepted
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
    """Adds to y [T, H], the base's embedding of token_ids [T]."""
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


@dataclass(frozen=True, slots=True)
class Delta:
    """The adapters' addition to a product: each row's values on the bridge, with B still to be
    applied."""

    bridge: Bridge
    b_pools: tuple[torch.Tensor, ...]
    plan: LoraPlan


@dataclass(frozen=True, slots=True)
class Product:
    """The product of a layer's matrix and its input. The op that reads it adds the delta and may
    overwrite `base`: it is read once."""

    base: torch.Tensor  # [T, sum of N_s]
    delta: Delta | None = None  # None: no delta, or it is already in `base`

    def settle(self) -> torch.Tensor:
        """Returns base and delta in one tensor."""
        if self.delta is not None:
            lora_expand_(self.base, self.delta.bridge, self.delta.b_pools, self.delta.plan)
        return self.base


def adapted_linear(
    site: Site,
    x: torch.Tensor,  # [T, K]
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    lora: LoraBatch | LoraPlan | None,
    pool: AdapterPool,
) -> Product:
    """Computes the product. Rows without an adapter keep their bits."""
    if isinstance(lora, LoraPlan):
        pools = _pools(site, pool)
        y, bridge = linear_shrink(x, weight, bias, pools.a, lora)
        return Product(y, Delta(bridge, pools.b, lora))
    y = linear(x, weight, bias)
    if lora is not None:
        outputs = torch.split(y, [part.out_features for part in site.slices], dim=-1)
        apply_lora_(site, outputs, x, lora, pool)
    return Product(y)


def product_silu_mul(gate_up: Product) -> torch.Tensor:
    """Turns [T, 2 * I] into [T, I]."""
    delta = gate_up.delta
    if delta is None:
        return silu_mul(gate_up.base)
    return lora_silu_mul(gate_up.base, delta.bridge, delta.b_pools, delta.plan)


def product_add_rms_norm(
    x: Product, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the normed values and the new residual, as `add_rms_norm` does."""
    delta = x.delta
    if delta is None:
        return add_rms_norm(x.base, residual, weight, eps)
    (b_pool,) = delta.b_pools
    return lora_add_rms_norm(x.base, residual, weight, eps, delta.bridge, b_pool, delta.plan)


def product_rope_kv_write(qkv: Product, write: RopeWrite) -> torch.Tensor:
    """Returns the rotated q [T, Hq, D], as `rope_kv_write` does."""
    delta = qkv.delta
    if delta is None:
        return rope_kv_write(qkv.base, write)
    return lora_rope_kv_write(qkv.base, delta.bridge, delta.b_pools, delta.plan, write)


def _pools(site: Site, pool: AdapterPool) -> SitePool:
    pools = pool.site_pool(site.name)
    assert pools is not None, f"{site.name} has no pool: only optional sites may lack it"
    return pools

"""The model's matrix products with the additions of adapters.

Joins a site's rows with a step's mapping; the kernels hold the arithmetic, the pool the
bookkeeping. With a `LoraPlan` in two parts: the shrink with the product, the expand in the op that
reads it, which may be the next layer's. With a `LoraBatch` (the reference, and the head for
log-probabilities of prompts) at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch

from kernels.collective import Collective
from kernels.exchange_norm import all_reduce_add_rms_norm, lora_all_reduce_add_rms_norm
from kernels.linear import linear, linear_shrink
from kernels.lora_add_rms_norm import lora_add_rms_norm
from kernels.lora_norm_add_norm import lora_norm_add_norm
from kernels.lora_plan import Bridge, LoraPlan
from kernels.lora_rope_kv_write import lora_rope_kv_write
from kernels.lora_rows import SiteRows
from kernels.lora_shrink_expand import (
    Affine,
    Delta,
    EmbeddingDelta,
    lora_add_,
    lora_embed_add_,
    lora_expand_,
)
from kernels.lora_silu_mul import lora_silu_mul
from kernels.matrix import Matrix
from kernels.norm_add_norm import norm_add_norm
from kernels.rms_norm import add_rms_norm
from kernels.rope_kv_write import rope_kv_write
from kernels.rope_write import RopeWrite
from kernels.silu_mul import Activation, silu_mul
from lora.mapping import LoraBatch
from lora.pool import AdapterPool
from lora.sites import Site


def apply_lora_(
    site: Site,
    outputs: Sequence[torch.Tensor],  # [T, N_s] of each slice, perhaps views of the fused output
    x: torch.Tensor,  # [T, K]
    batch: LoraBatch,
) -> None:
    for tokens, found, weight in batch.deltas_at(site.name):
        lora_add_(outputs, x, tokens, cast("tuple[Delta | Affine, ...]", found), weight)


def apply_lora_embedding_(
    site: Site, y: torch.Tensor, token_ids: torch.Tensor, batch: LoraBatch
) -> None:
    """Adds to y [T, H], the base's embedding of token_ids [T]."""
    for tokens, found, weight in batch.deltas_at(site.name):
        rows = cast("tuple[EmbeddingDelta, ...]", found)
        lora_embed_add_(y, token_ids, tokens, rows, weight)


class BridgedDelta(NamedTuple):
    """The adapters' addition to a product: each row's values on the bridge, with B still to be
    applied. The operations take its parts in this order."""

    bridge: Bridge
    site: SiteRows
    plan: LoraPlan


@dataclass(frozen=True, slots=True)
class Product:
    """The product of a layer's matrix and its input. The op that reads it adds the delta and may
    overwrite `base`: it is read once."""

    base: torch.Tensor  # [T, sum of N_s]
    delta: BridgedDelta | None = None  # None: no delta, or it is already in `base`

    def settle(self) -> torch.Tensor:
        """Returns base and delta in one tensor."""
        if self.delta is not None:
            lora_expand_(self.base, *self.delta)
        return self.base


def adapted_linear(
    site: Site,
    x: torch.Tensor,  # [T, K]
    weight: Matrix,
    bias: torch.Tensor | None,
    lora: LoraBatch | LoraPlan | None,
    pool: AdapterPool,
) -> Product:
    """Computes the product. Rows without an adapter keep their bits."""
    if isinstance(lora, LoraPlan):
        rows = pool.site_rows(site.name, has_affine=lora.has_affine)
        y, bridge = linear_shrink(x, weight, bias, rows, lora)
        return Product(y, BridgedDelta(bridge, rows, lora))
    y = linear(x, weight, bias)
    if lora is not None:
        outputs = torch.split(y, [part.out_features for part in site.slices], dim=-1)
        apply_lora_(site, outputs, x, lora)
    return Product(y)


def product_silu_mul(gate_up: Product, activation: Activation = "silu") -> torch.Tensor:
    """Turns [T, 2 * I] into [T, I]."""
    if gate_up.delta is None:
        return silu_mul(gate_up.base, activation)
    return lora_silu_mul(gate_up.base, *gate_up.delta, activation)


def product_add_rms_norm(
    x: Product, residual: torch.Tensor, weight: torch.Tensor, eps: float, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the normed values and the new residual, as `add_rms_norm` does."""
    if x.delta is None:
        return add_rms_norm(x.base, residual, weight, eps, scale)
    return lora_add_rms_norm(x.base, residual, weight, eps, *x.delta, scale)


def product_all_reduce_add_rms_norm(
    ranks: Collective,
    x: Product,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    scale: float,
    kind: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes `product_add_rms_norm` of the sum of all ranks' products. `kind`: as for
    `all_reduce_add_rms_norm`."""
    if x.delta is None:
        return all_reduce_add_rms_norm(ranks, x.base, residual, weight, eps, scale, kind)
    return lora_all_reduce_add_rms_norm(ranks, x.base, residual, weight, eps, *x.delta, scale, kind)


def product_norm_add_norm(
    x: Product,
    residual: torch.Tensor,
    post_weight: torch.Tensor,
    next_weight: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the next block's input and the new residual, as `norm_add_norm` does."""
    if x.delta is None:
        return norm_add_norm(x.base, residual, post_weight, next_weight, eps)
    return lora_norm_add_norm(x.base, residual, post_weight, next_weight, eps, *x.delta)


def product_rope_kv_write(qkv: Product, write: RopeWrite) -> torch.Tensor:
    """Returns the rotated q [T, Hq, D], as `rope_kv_write` does."""
    if qkv.delta is None:
        return rope_kv_write(qkv.base, write)
    return lora_rope_kv_write(qkv.base, *qkv.delta, write)

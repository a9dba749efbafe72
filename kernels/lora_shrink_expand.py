"""The LoRA delta of a packed batch with many adapters: y_s += (x A_s^T) B_s for each slice s.

Hu et al., "LoRA", arXiv 2106.09685; batched over adapters as in Chen et al., "Punica", arXiv
2310.18547. The scale is folded into B; an adapter's affine rows change y first. A row may have
several adapters, with a weight each: their pages in one list, whose deltas add up. On a device in
two parts over a `LoraPlan`, for all adapters of a step: `lora_shrink`, then `lora_expand_`. On a
CPU, and where speed is not needed, adapter by adapter: `lora_add_`. A row without the delta keeps
its bits. Uses tensors and numbers only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.backend import uses_triton
from kernels.lora_plan import PAGE_ROWS, Bridge, LoraPlan, read_tiles
from kernels.lora_rows import SiteRows, add_affine

Tokens = slice | torch.Tensor  # rows of a step: a run of them, or their indices [t] int64


@dataclass(frozen=True, slots=True)
class Delta:
    """Some rank rows of one adapter at one slice of a site."""

    index: int  # of the slice
    a: torch.Tensor  # [r, K]
    b: tuple[tuple[int, torch.Tensor], ...]  # first column of the slice, [r, columns]
    scales: torch.Tensor | None = None  # [r] float32: factors of the ranks, in int8


@dataclass(frozen=True, slots=True)
class Affine:
    """The affine rows of one adapter at one slice of a site: before the delta, y becomes
    y + gain y + offset."""

    index: int  # of the slice
    rows: torch.Tensor  # [1 or 2, N_s]: gains, offsets


@dataclass(frozen=True, slots=True)
class EmbeddingDelta:
    """Some rank rows of one adapter at an embedding. A is in pieces of `width` columns, each
    [r, width], that begin at `starts` in the heap."""

    heap: torch.Tensor  # [elements]
    starts: torch.Tensor  # [pieces] int64
    width: int
    b: torch.Tensor  # [r, H]
    scales: torch.Tensor | None = None  # [r] float32, as in `Delta`


def lora_add_(
    outputs: Sequence[torch.Tensor],  # one [T, N_s] per slice, views are fine
    x: torch.Tensor,  # [T, K]
    tokens: Tokens,
    deltas: Sequence[Delta | Affine],  # the affine rows of a slice before its deltas
    weight: float = 1.0,
) -> None:
    """Adds one adapter's delta, times its weight, to its tokens, in float32, rounded once for each
    of the `deltas`."""
    wide = x[tokens].float()
    for delta in deltas:
        if isinstance(delta, Affine):
            y = outputs[delta.index]
            y[tokens] = add_affine(y[tokens], delta.rows).to(y.dtype)
            continue
        h = wide @ delta.a.float().T * weight
        if delta.scales is not None:
            h *= delta.scales
        for start, b in delta.b:
            _add_(outputs[delta.index][:, start : start + b.shape[1]], tokens, h, b)


def lora_embed_add_(
    y: torch.Tensor,  # [T, H]
    token_ids: torch.Tensor,  # [T]
    tokens: Tokens,
    deltas: Sequence[EmbeddingDelta],
    weight: float = 1.0,
) -> None:
    """Adds the delta of an embedding, times its weight: a token's x is the one-hot of its id,
    x A^T a column of A."""
    ids = token_ids[tokens].long()
    for delta in deltas:
        starts = delta.starts[ids // delta.width] + ids % delta.width
        rows = torch.arange(delta.b.shape[0], device=y.device) * delta.width
        h = delta.heap[starts[:, None] + rows].float() * weight
        if delta.scales is not None:
            h *= delta.scales
        _add_(y, tokens, h, delta.b)


def _add_(y: torch.Tensor, tokens: Tokens, h: torch.Tensor, b: torch.Tensor) -> None:
    """Computes y[tokens] += h b: y [T, N], h [t, r], b [r, N]."""
    part = y[tokens]  # of a run a view, of indices a copy
    if part.dtype == torch.float32:
        part.addmm_(h, b.float())
    else:
        part.copy_(part.float().addmm_(h, b.float()))
    if not isinstance(tokens, slice):
        y.index_copy_(0, tokens, part)


def lora_shrink(
    x: torch.Tensor,  # [T, K]
    site: SiteRows,
    plan: LoraPlan,
) -> Bridge:
    """Returns x A^T, times the weight of each page, of every row with an adapter, for all slices
    that its adapter has."""
    if uses_triton(x):
        from kernels.triton_lora_shrink import shrink

        return shrink(x, site, plan)
    return lora_shrink_reference(x, site, plan)


def lora_expand_(
    y: torch.Tensor,  # [T, sum of N_s]
    bridge: Bridge,
    site: SiteRows,
    plan: LoraPlan,
) -> None:
    """Computes y += bridge B, after the affine rows, in float32 and rounded once. Rows without
    adapter, and slices that an adapter lacks, stay as they are."""
    if uses_triton(y):
        from kernels.triton_lora_expand import expand_

        expand_(y, bridge, site, plan)
    else:
        lora_expand_reference_(y, bridge, site, plan)


def lora_shrink_reference(x: torch.Tensor, site: SiteRows, plan: LoraPlan) -> Bridge:
    shape = (1, site.num_slices, plan.max_rank_pages, x.shape[0], PAGE_ROWS)
    planes = torch.zeros(shape, dtype=torch.float32, device=x.device)
    wide = x.float()
    for start, end, pages in read_tiles(plan):
        for i, (page, weight) in enumerate(pages):
            for s in range(site.num_slices):
                a = site.a(page, s)
                if a is not None:
                    planes[0, s, i, start:end, : len(a)] = wide[start:end] @ a.float().T * weight
    return Bridge(planes, None)


def lora_expand_reference_(y: torch.Tensor, bridge: Bridge, site: SiteRows, plan: LoraPlan) -> None:
    # The bridge is rounded to the activations' type once, as tensor cores require.
    bridges = bridge.planes.sum(0).to(site.dtype).float()  # [slices, pages, T, 16]
    outputs = torch.split(y, list(site.sizes), dim=-1)
    for start, end, pages in read_tiles(plan):
        for s, part in enumerate(outputs):
            strips = [(i, site.b(page, s)) for i, (page, _) in enumerate(pages)]
            found = [(i, b) for i, b in strips if b is not None]
            affine = site.affine_rows(pages[0][0], s) if pages else None
            if not found:
                continue
            delta = torch.zeros_like(part[start:end], dtype=torch.float32)
            for i, b in found:
                delta += bridges[s, i, start:end, : len(b)] @ b.float()
            wide = part[start:end].float()
            if affine is not None:
                wide = add_affine(wide, affine)
            part[start:end] = (wide + delta).to(y.dtype)

"""The delta of the embedding: y[t] += A[:, id of t] B, for the rows whose adapters have it.

A token's x is the one-hot of its id, so x A^T is a column of A, which is in pieces of columns. The
ids are those of `gather_embedding`. A row without the delta keeps its bits. Uses tensors and
numbers only.
"""

from __future__ import annotations

import torch

from kernels.backend import uses_triton
from kernels.embedding import resolve_tokens
from kernels.lora_plan import LoraPlan, read_tiles
from kernels.lora_rows import SiteRows


def lora_embed_(
    y: torch.Tensor,  # [T, H]
    token_ids: torch.Tensor,  # [T] int32, this and the next two as in `gather_embedding`
    sources: torch.Tensor,  # [T] int32
    drawn: torch.Tensor,  # [N] int32
    site: SiteRows,
    plan: LoraPlan,  # written with the embedding's counts
) -> None:
    """Adds the delta, added in float32 and rounded once."""
    if uses_triton(y):
        from kernels.triton_lora_embed import launch_lora_embed_

        launch_lora_embed_(y, token_ids, sources, drawn, site, plan)
    else:
        lora_embed_reference_(y, token_ids, sources, drawn, site, plan)


def lora_embed_reference_(
    y: torch.Tensor,
    token_ids: torch.Tensor,
    sources: torch.Tensor,
    drawn: torch.Tensor,
    site: SiteRows,
    plan: LoraPlan,
) -> None:
    ids = resolve_tokens(token_ids, sources, drawn).long()
    for start, end, pages in read_tiles(plan):
        delta = None
        for page, weight in pages:
            a, b = site.a(page, 0), site.b(page, 0)
            if a is not None and b is not None:
                # Rounded to the activations' type, as tensor cores require.
                h = (a.float().T[ids[start:end]] * weight).to(site.dtype).float()
                more = h @ b.float()
                delta = more if delta is None else delta + more
        if delta is not None:
            y[start:end] = (y[start:end].float() + delta).to(y.dtype)

"""Rows of the embedding table, for tokens of which some were drawn a step ago.

The step before leaves its ids in a tensor on the device; a token names its place there (`sources`)
and so needs no transfer through the host. Copies rows: exact in every type. Uses tensors only.
"""

from __future__ import annotations

import torch

from kernels.backend import uses_triton


def gather_embedding(
    token_ids: torch.Tensor,  # [T] int32
    sources: torch.Tensor,  # [T] int32, negative: the id is in token_ids
    drawn: torch.Tensor,  # [N] int32, negative: a row that was broken
    weight: torch.Tensor,  # [V, H]
) -> torch.Tensor:
    """Returns [T, H], the rows of token_ids[t], or of max(drawn[sources[t]], 0) for tokens with a
    source."""
    if uses_triton(weight):
        from kernels.triton_embedding import launch_gather_embedding

        return launch_gather_embedding(token_ids, sources, drawn, weight)
    return gather_embedding_reference(token_ids, sources, drawn, weight)


def resolve_tokens(
    token_ids: torch.Tensor, sources: torch.Tensor, drawn: torch.Tensor
) -> torch.Tensor:
    """Returns [T], the ids of these rows."""
    if not drawn.numel():
        return token_ids
    earlier = drawn.index_select(0, sources.clamp(min=0)).clamp_(min=0)
    return torch.where(sources < 0, token_ids, earlier)


def gather_embedding_reference(
    token_ids: torch.Tensor, sources: torch.Tensor, drawn: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    return weight.index_select(0, resolve_tokens(token_ids, sources, drawn))

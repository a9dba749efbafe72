"""Masks of tokens for tests: bit i of word w stands for the token 32 * w + i."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from kernels.mask_logits import BITS, num_mask_words

ALL = -1  # a word that allows all its tokens


def masks_of(allowed: Sequence[Collection[int]], vocab: int) -> torch.Tensor:
    """Returns [N, ceil(vocab / 32)] int32, contiguous."""
    bits = torch.zeros((len(allowed), num_mask_words(vocab) * BITS), dtype=torch.int64)
    for row, token_ids in enumerate(allowed):
        bits[row, list(token_ids)] = 1
    words = (bits.view(len(allowed), -1, BITS) << torch.arange(BITS)).sum(-1)
    return torch.where(words < 2**31, words, words - 2**32).to(torch.int32).contiguous()


def random_masks(count: int, vocab: int, share: float = 0.5, seed: int = 0) -> torch.Tensor:
    """Returns masks that each allow about a share of the tokens, at least one."""
    draw = torch.rand(count, vocab, generator=torch.Generator().manual_seed(seed))
    kept = draw < share
    kept[torch.arange(count), draw.argmin(-1)] = True
    return masks_of([row.nonzero()[:, 0].tolist() for row in kept], vocab)

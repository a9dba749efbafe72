"""Logits of tokens that a grammar forbids become -inf, row by row.

Masks are bits, as llguidance, xgrammar and vLLM have them: bit i of word w stands for the token
32 * w + i, set if it is allowed. A forbidden logit that is NaN or infinite stays: the draw then
reports the row as broken, masked or not. Uses tensors only.
"""

from __future__ import annotations

import torch

from kernels.backend import uses_triton

BITS = 32  # tokens of a word


def num_mask_words(vocab: int) -> int:
    """Returns the words of one mask."""
    return -(-vocab // BITS)


def mask_logits_(
    logits: torch.Tensor,  # [R, V], changed in place
    masks: torch.Tensor,  # [N, ceil(V / 32)] int32, contiguous; bits past V are ignored
    rows: torch.Tensor,  # [N] int32, different rows of the logits
) -> None:
    """Masks row `rows[n]` of the logits by `masks[n]`; other rows are not touched."""
    if uses_triton(logits):
        from kernels.triton_mask_logits import launch_mask_logits

        launch_mask_logits(logits, masks, rows)
        return
    mask_logits_reference_(logits, masks, rows)


def mask_logits_reference_(logits: torch.Tensor, masks: torch.Tensor, rows: torch.Tensor) -> None:
    ids = torch.arange(logits.shape[1], device=logits.device)
    is_forbidden = (masks[:, ids // BITS] >> (ids % BITS)) & 1 == 0
    places = rows.long()
    masked = logits[places]
    masked.masked_fill_(is_forbidden & (masked < float("inf")), float("-inf"))
    logits[places] = masked

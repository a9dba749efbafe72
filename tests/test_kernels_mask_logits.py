"""The reference of `mask_logits_` against lists of allowed tokens."""

from __future__ import annotations

import pytest
import torch

from kernels.mask_logits import mask_logits_reference_, num_mask_words
from tests.mask_cases import masks_of


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 131])
def test_tokens_whose_bit_is_not_set_become_impossible(vocab: int) -> None:
    kept = [set(range(0, vocab, 3)), {vocab - 1}, set(range(vocab))]
    logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(vocab))
    before = logits.clone()
    rows = torch.tensor([4, 0, 2], dtype=torch.int32)
    masks = masks_of(kept, vocab)
    assert masks.shape == (3, num_mask_words(vocab))
    mask_logits_reference_(logits, masks, rows)
    for row, allowed in zip(rows.tolist(), kept, strict=True):
        for token_id in range(vocab):
            expected = float(before[row, token_id]) if token_id in allowed else float("-inf")
            assert float(logits[row, token_id]) == expected
    assert torch.equal(logits[[1, 3]], before[[1, 3]])


def test_forbidden_logits_that_are_not_finite_stay() -> None:
    logits = torch.tensor([[float("nan"), float("inf"), float("-inf"), 1.0, 2.0]])
    mask_logits_reference_(logits, masks_of([[4]], 5), torch.zeros(1, dtype=torch.int32))
    assert logits[0].isnan().tolist() == [True, False, False, False, False]
    assert logits[0, 1:].tolist() == [float("inf"), float("-inf"), float("-inf"), 2.0]

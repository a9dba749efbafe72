"""The masks of grammars, interpreted, against the reference and against lists of tokens."""

from __future__ import annotations

import pytest
import torch

from kernels.mask_logits import mask_logits_, mask_logits_reference_, num_mask_words
from kernels.triton_mask_logits import BLOCK
from tests.mask_cases import ALL, masks_of, random_masks

INFINITY = float("inf")


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 131, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_random_masks_of_some_rows(vocab: int, dtype: torch.dtype) -> None:
    wide = torch.randn(7, vocab + 9, generator=torch.Generator().manual_seed(vocab)).to(dtype)
    wide[2, :vocab:3] = -INFINITY
    wide[3, vocab // 2] = float("nan")
    wide[5, vocab - 1] = INFINITY
    logits = wide.clone()[:, :vocab]  # a row's stride is not its width
    rows = torch.tensor([5, 0, 3, 2], dtype=torch.int32)
    masks = random_masks(4, vocab)
    expected = wide.clone()[:, :vocab]
    mask_logits_reference_(expected, masks, rows)
    mask_logits_(logits, masks, rows)
    assert torch.equal(logits.nan_to_num(7.0), expected.nan_to_num(7.0))
    untouched = [1, 4, 6]
    assert torch.equal(logits[untouched], wide[untouched, :vocab])
    assert bool((logits[0].isneginf() == ~allowed(masks[1], vocab)).all())
    assert bool(logits[3, vocab // 2].isnan())


def allowed(mask: torch.Tensor, vocab: int) -> torch.Tensor:
    return torch.tensor([bool(int(mask[i // 32]) >> (i % 32) & 1) for i in range(vocab)])


def test_words_of_masks_are_read_by_their_sign_bit_too() -> None:
    vocab = 70
    kept = (0, 31, 32, 63, 64, 69)
    logits = torch.zeros(1, vocab)
    mask_logits_(logits, masks_of([kept], vocab), torch.zeros(1, dtype=torch.int32))
    assert logits[0].isfinite().nonzero()[:, 0].tolist() == list(kept)


def test_a_mask_of_all_tokens_changes_nothing_and_bits_past_them_are_ignored() -> None:
    logits = torch.randn(2, 35)
    before = logits.clone()
    rows = torch.tensor([1], dtype=torch.int32)
    mask_logits_(logits, torch.full((1, 2), ALL, dtype=torch.int32), rows)
    assert torch.equal(logits, before)
    only_past = torch.tensor([[0, ALL << 3]], dtype=torch.int32)
    mask_logits_(logits, only_past, rows)
    assert bool(logits[1].isneginf().all())
    assert torch.equal(logits[0], before[0])


def test_no_mask_launches_nothing() -> None:
    logits = torch.randn(2, 35)
    before = logits.clone()
    none = torch.empty((0, num_mask_words(35)), dtype=torch.int32)
    mask_logits_(logits, none, torch.empty(0, dtype=torch.int32))
    assert torch.equal(logits, before)

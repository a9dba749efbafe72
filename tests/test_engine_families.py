"""Every family against Hugging Face and PEFT in float32: each logit, in whole and in chunks, with
adapters on every site."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engine_helpers import random_prompt
from tests.family_bases import (
    VARIANTS,
    VOCABULARY,
    Decoder,
    expected_logits,
    make_family_adapter,
    make_family_base,
)


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def assert_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_every_logit_is_that_of_hugging_face(variant: str, tmp_path: Path) -> None:
    made = VARIANTS[variant]
    base = make_family_base(tmp_path / "base", made)
    targets: tuple[str, ...] | str = (*made.linears, *VOCABULARY)
    if made.vision is not None:
        targets = rf".*language_model.*({'|'.join((*made.linears, 'embed_tokens'))})|lm_head"
    adapter = make_family_adapter(tmp_path / "adapter", base, targets)
    decoder = Decoder(base, [adapter])
    prompt, other = random_prompt(45, seed=3), random_prompt(17, seed=4)
    plain, adapted = (expected_logits(base, one, prompt) for one in (None, adapter))
    assert (plain - adapted).abs().max() > 0.1
    beside = expected_logits(base, adapter, other)
    for chunk in (1000, 7):
        found = decoder.logits([(prompt, None), (other, "adapter"), (prompt, "adapter")], chunk)
        assert_equal(found[0], plain)
        assert_equal(found[1], beside)
        assert_equal(found[2], adapted)

"""The kernels of the head and the embedding in the interpreter, tiny shapes, pieces of columns."""

from __future__ import annotations

import pytest
import torch

from kernels.lora_embed import lora_embed_, lora_embed_reference_
from kernels.lora_head import lora_head_, lora_head_reference_
from tests.lora_vocabulary_cases import MIXES, VocabularyCase, make_vocabulary_case

DTYPES = {torch.float16: 2e-3, torch.float32: 1e-6}


def head(case: VocabularyCase, *, graph_rows: int | None = None) -> torch.Tensor:
    logits = case.y.clone()
    lora_head_(logits, case.x, case.site, case.plan(large=False, graph_rows=graph_rows))
    return logits


def embed(case: VocabularyCase, *, graph_rows: int | None = None) -> torch.Tensor:
    y = case.y.clone()
    plan = case.plan(graph_rows=graph_rows)
    lora_embed_(y, case.token_ids, case.sources, case.drawn, case.site, plan)
    return y


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab", "piece"), [(300, 128), (300, 300), (512, 256)])
def test_the_head_s_delta_is_that_of_float64(
    mix: str, dtype: torch.dtype, vocab: int, piece: int
) -> None:
    case = make_vocabulary_case(mix, "head", vocab=vocab, piece=piece, hidden=48, dtype=dtype)
    logits = head(case)
    assert case.error_of(logits) < DTYPES[dtype]
    assert torch.equal(logits[case.untouched()], case.y[case.untouched()])
    reference = case.y.clone()
    lora_head_reference_(reference, case.x, case.site, case.plan(large=False))
    torch.testing.assert_close(logits, reference, rtol=1e-3, atol=1e-3)
    rows = len(case.x)
    assert torch.equal(head(case, graph_rows=rows), logits)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab", "piece", "hidden"), [(300, 128, 48), (300, 300, 600)])
def test_the_embedding_s_delta_is_that_of_float64(
    mix: str, dtype: torch.dtype, vocab: int, piece: int, hidden: int
) -> None:
    case = make_vocabulary_case(
        mix, "embedding", vocab=vocab, piece=piece, hidden=hidden, dtype=dtype
    )
    y = embed(case)
    assert case.error_of(y) < DTYPES[dtype]
    assert torch.equal(y[case.untouched()], case.y[case.untouched()])
    reference = case.y.clone()
    lora_embed_reference_(
        reference, case.token_ids, case.sources, case.drawn, case.site, case.plan()
    )
    torch.testing.assert_close(y, reference, rtol=2e-3, atol=2e-3)
    rows = len(case.x)
    assert case.error_of(embed(case, graph_rows=rows)) < DTYPES[dtype]


@pytest.mark.parametrize("site", ["head", "embedding"])
def test_one_adapter_s_nan_reaches_its_own_rows_only(site: str) -> None:
    case = make_vocabulary_case("ragged", site, vocab=300, piece=128, hidden=48)
    run = head if site == "head" else embed
    before = run(case)
    for page in case.adapters[1]:
        for rows in (case.site.a_entries[page], case.site.b_entries[page]):
            case.fill(rows, float("nan"))
    after = run(case)
    own = case.rows_of(1)
    assert torch.equal(after[~own], before[~own])
    assert not after[own].isfinite().all(1).any()


@pytest.mark.parametrize("site", ["head", "embedding"])
def test_a_plan_without_the_site_s_counts_changes_nothing(site: str) -> None:
    case = make_vocabulary_case("ragged", site, vocab=300, piece=128, hidden=48, has_site=False)
    run = head if site == "head" else embed
    assert torch.equal(run(case, graph_rows=len(case.x)), case.y)

"""The kernels of adapters' heads and embeddings on a GPU, against float64 and in a graph."""

from __future__ import annotations

import pytest
import torch

from kernels.lora_embed import lora_embed_
from kernels.lora_head import lora_head_
from kernels.lora_plan import LoraPlan
from tests.lora_vocabulary_cases import MIXES, VocabularyCase, make_vocabulary_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 1e-5}


def build(
    mix: str,
    kind: str,
    *,
    vocab: int = 5000,
    piece: int = 1280,
    hidden: int = 1024,
    dtype: torch.dtype = torch.bfloat16,
) -> VocabularyCase:
    return make_vocabulary_case(
        mix, kind, vocab=vocab, piece=piece, hidden=hidden, dtype=dtype, device="cuda"
    )


def run(case: VocabularyCase, plan: LoraPlan | None = None) -> torch.Tensor:
    y, plan = case.y.clone(), plan or case.plan()
    if case.is_head:
        lora_head_(y, case.x, case.site, plan)
    else:
        lora_embed_(y, case.token_ids, case.sources, case.drawn, case.site, plan)
    return y


@pytest.mark.parametrize("kind", ["head", "embedding"])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(
    ("vocab", "piece", "hidden"), [(5000, 1280, 1024), (32003, 16128, 4096), (777, 777, 576)]
)
def test_the_delta_is_that_of_float64(
    kind: str, mix: str, vocab: int, piece: int, hidden: int
) -> None:
    case = build(mix, kind, vocab=vocab, piece=piece, hidden=hidden)
    y = run(case)
    assert case.error_of(y) < TOLERANCE[torch.bfloat16]
    untouched = case.untouched()
    assert torch.equal(y[untouched].view(torch.uint8), case.y[untouched].view(torch.uint8))
    assert torch.equal(run(case, case.plan(graph_rows=len(case.x))), y)


@pytest.mark.parametrize("kind", ["head", "embedding"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_types(kind: str, dtype: torch.dtype) -> None:
    case = build("ragged", kind, dtype=dtype)
    assert case.error_of(run(case)) < TOLERANCE[dtype]


@pytest.mark.parametrize("kind", ["head", "embedding"])
def test_a_row_alone_has_the_bits_it_has_among_others(kind: str) -> None:
    case = build("ragged", kind)
    together = run(case)
    row = 0
    for adapter, rows in case.runs:
        for _ in range(rows):
            alone = case.row(row, adapter)
            assert torch.equal(run(alone)[0], together[row])
            row += 1


@pytest.mark.parametrize("kind", ["head", "embedding"])
def test_one_adapter_s_nan_reaches_its_own_rows_only(kind: str) -> None:
    case = build("ragged", kind)
    before = run(case)
    for page in case.adapters[1]:
        for entries in (case.site.a_entries[page], case.site.b_entries[page]):
            case.fill(entries, float("nan"))
    after, own = run(case), case.rows_of(1)
    assert torch.equal(after[~own], before[~own])
    assert not after[own].isfinite().all(1).any()


@pytest.mark.parametrize("kind", ["head", "embedding"])
def test_a_graph_follows_the_plan_in_its_buffer(kind: str) -> None:
    """Kernels of a site end at once where the plan has none of its counts."""
    case = build("ragged", kind)
    with_site, without = (case.buffer(large=False, has_site=has) for has in (True, False))
    static, y = with_site.clone(), case.y.clone()
    rows = len(case.x)
    plan = LoraPlan.for_graph(static, rows, rows, case.num_pages)

    def step() -> None:
        y.copy_(case.y)
        if case.is_head:
            lora_head_(y, case.x, case.site, plan)
        else:
            lora_embed_(y, case.token_ids, case.sources, case.drawn, case.site, plan)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    expected = run(case)
    for buffer, wanted in ((with_site, expected), (without, case.y), (with_site, expected)):
        static.copy_(buffer)
        graph.replay()
        assert torch.equal(y, wanted)

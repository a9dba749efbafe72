"""The time of adapters' heads and embeddings at the shapes of Llama-3-8B, in graphs of decodes.

A line gives microseconds of the base's head (`base_head`), of the adapters' part as the kernels do
it (`head`, `embedding`), of the same where no adapter of the step has the site, so that kernels end
at once (`idle`), and of the operations adapter by adapter, launched from Python (`one_by_one`).

    python -m tests.benchmarks.lora_vocabulary [--cases 1x1,32x32] [--out FILE]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from kernels.lora_embed import lora_embed_
from kernels.lora_head import lora_head_
from kernels.lora_plan import PAGE_ROWS, LoraPlan
from kernels.lora_shrink_expand import Delta, lora_add_
from tests.benchmarks.lora_sites import graph_us, share
from tests.benchmarks.report import Report
from tests.lora_vocabulary_cases import VocabularyCase, make_vocabulary_case

VOCAB, PIECE, HIDDEN = 128256, 16128, 4096
CASES = ("1x1", "8x8", "32x1", "32x32", "64x32", "256x1", "256x32", "32x8x64")


def make_case(kind: str, num_tokens: int, distinct: int, rank: int) -> VocabularyCase:
    rows = share(num_tokens, distinct)
    return make_vocabulary_case(
        ((rank,) * distinct, tuple(enumerate(rows))),
        kind,
        vocab=VOCAB,
        piece=PIECE,
        hidden=HIDDEN,
        dtype=torch.bfloat16,
        device="cuda",
    )


def base_head_us(x: torch.Tensor) -> float:
    weight = torch.randn(VOCAB, HIDDEN, device="cuda", dtype=torch.bfloat16)
    return graph_us([lambda: torch.mm(x, weight.T, out_dtype=torch.float32)] * 4)


def kernel_us(case: VocabularyCase, *, has_site: bool) -> float:
    y, tokens = case.y.clone(), len(case.x)
    buffer = case.buffer(large=False, has_site=has_site)
    plan = LoraPlan.for_graph(buffer, tokens, tokens, case.num_pages)

    def step() -> None:
        if case.is_head:
            lora_head_(y, case.x, case.site, plan)
        else:
            lora_embed_(y, case.token_ids, case.sources, case.drawn, case.site, plan)

    return graph_us([step] * 4)


def one_by_one_us(case: VocabularyCase) -> float:
    """Host time included: a step outside of the graphs launches them like this."""
    deltas, row = [], 0
    for (adapter, rows), (a, b) in zip(case.runs, case.weights, strict=True):
        assert adapter is not None
        pages = range(0, len(a), PAGE_ROWS)
        cut = [
            Delta(
                0,
                a[page : page + PAGE_ROWS],
                tuple(
                    (start, b[page : page + PAGE_ROWS, start : start + PIECE])
                    for start in range(0, VOCAB, PIECE)
                ),
            )
            for page in pages
        ]
        deltas.append((slice(row, row + rows), cut))
        row += rows
    logits = case.y.clone()

    def step() -> None:
        for tokens, found in deltas:
            lora_add_([logits], case.x, tokens, found)

    return wall_us(step)


def wall_us(step: Callable[[], None], repeats: int = 10) -> float:
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began_s) * 1e6)
    return statistics.median(times[2:])


def measure(text: str, report: Report) -> None:
    """`text`: tokens x adapters [x rank]"""
    num_tokens, distinct, rank = (*map(int, text.split("x")), 16)[:3]
    head = make_case("head", num_tokens, distinct, rank)
    values = {
        "base_head_us": base_head_us(head.x),
        "head_us": kernel_us(head, has_site=True),
        "head_idle_us": kernel_us(head, has_site=False),
        "head_one_by_one_us": one_by_one_us(head),
    }
    embedding = make_case("embedding", num_tokens, distinct, rank)
    values["embedding_us"] = kernel_us(embedding, has_site=True)
    values["embedding_idle_us"] = kernel_us(embedding, has_site=False)
    rounded = {name: round(value, 2) for name, value in values.items()}
    report.emit(part="lora_vocabulary", case=text, **rounded)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=",".join(CASES), help="tokens x adapters [x rank]")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    report = Report(options.out)
    report.emit_machine("lora_vocabulary")
    for case in options.cases.split(","):
        measure(case, report)


if __name__ == "__main__":
    main()

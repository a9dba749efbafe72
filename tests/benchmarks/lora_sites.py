"""Time of our multi-LoRA kernels on the four sites of a Llama-3-8B layer, as CUDA graphs.

Adapters, x and y rotate so that weights come from memory. `pair` is shrink and expand alone, one
after the other; `added` is what they add to the base's matrix products in one graph, as a step sees
it. Run as `python -m tests.benchmarks.lora_sites`.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from kernels.lora_plan import PAGE_ROWS, LoraPlan, lora_plan_size, write_lora_plan
from kernels.lora_shrink_expand import lora_expand_, lora_shrink
from tests.benchmarks.report import Report

SITES: dict[str, tuple[int, tuple[int, ...]]] = {
    "qkv": (4096, (4096, 1024, 1024)),
    "o": (4096, (4096,)),
    "gate_up": (4096, (14336, 14336)),
    "down": (14336, (4096,)),
}
ROTATED_BYTES = 200e6  # more than three times the L2
MAX_CALLS = 64


@dataclass(frozen=True, slots=True)
class Call:
    """One layer's site with its own weights, rows and outputs; the plan is every layer's."""

    a_pool: torch.Tensor
    b_pools: tuple[torch.Tensor, ...]
    x: torch.Tensor
    y: torch.Tensor
    plan: LoraPlan


def make_calls(
    site: str, num_tokens: int, ranks: Sequence[int], *, decode: bool = True, base_rows: int = 0
) -> list[Call]:
    """`ranks`: one an adapter; tokens are shared out evenly after `base_rows`."""
    in_features, sizes = SITES[site]
    pages_each = [-(-rank // PAGE_ROWS) for rank in ranks]
    num_pages = sum(pages_each)
    row_bytes = 2 * (len(sizes) * in_features + sum(sizes))
    call_bytes = num_pages * PAGE_ROWS * row_bytes + 2 * num_tokens * (in_features + sum(sizes))
    num_calls = int(min(MAX_CALLS, max(2, ROTATED_BYTES // call_bytes + 1)))
    draw = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=draw, device="cuda", dtype=torch.bfloat16).mul_(scale)

    pages = iter(torch.randperm(num_pages, generator=torch.Generator().manual_seed(0)).tolist())
    shares = _share(num_tokens - base_rows, len(ranks))
    runs: list[tuple[list[int], int]] = [([], base_rows)]
    runs += [([next(pages) for _ in range(n)], m) for n, m in zip(pages_each, shares, strict=True)]
    max_pages = max(num_pages, 1024)
    buffer = np.zeros(lora_plan_size(num_tokens, max_pages), dtype=np.int32)
    counts = write_lora_plan(buffer, runs, num_tokens, max_pages, large=not decode)
    device = torch.from_numpy(buffer).cuda()
    if decode:
        plan = LoraPlan.for_graph(device, num_tokens, num_tokens, max_pages)
    else:
        plan = LoraPlan.for_step(device, counts, num_tokens, max_pages)
    rows = num_pages * PAGE_ROWS
    return [
        Call(
            normal(len(sizes), rows, in_features, scale=in_features**-0.5),
            tuple(normal(rows, size) for size in sizes),
            normal(num_tokens, in_features),
            normal(num_tokens, sum(sizes)),
            plan,
        )
        for _ in range(num_calls)
    ]


def _share(total: int, parts: int) -> list[int]:
    return [total // parts + (i < total % parts) for i in range(parts)]


def graph_us(steps: Sequence[Callable[[], object]], replays: int = 30) -> float:
    """Median microseconds of one of the steps."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        steps[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for step in steps:
            step()
    times: list[float] = []
    for i in range(replays + 5):
        start, end = _event(), _event()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i >= 5:
            times.append(start.elapsed_time(end) * 1e3 / len(steps))
    return statistics.median(times)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def pair_us(calls: Sequence[Call]) -> float:
    def step(call: Call) -> None:
        bridge = lora_shrink(call.x, call.a_pool, call.plan)
        lora_expand_(call.y, bridge, call.b_pools, call.plan)

    return graph_us([partial(step, call) for call in calls])


CASES = ((1, 1), (8, 8), (32, 1), (32, 32), (64, 32), (256, 32))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    report = Report(options.out)
    report.emit_machine("lora_sites")
    for num_tokens, distinct in CASES:
        times = {
            site: pair_us(make_calls(site, num_tokens, [options.rank] * distinct)) for site in SITES
        }
        report.emit(
            T=num_tokens,
            D=distinct,
            rank=options.rank,
            sum_us=round(sum(times.values()), 2),
            **{site: round(us, 2) for site, us in times.items()},
        )


if __name__ == "__main__":
    main()

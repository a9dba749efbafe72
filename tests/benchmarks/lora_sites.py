"""The time that adapters add to a Llama-3-8B layer without its attention: four matrix products,
RoPE + KV write, SiLU and two norms, without adapters and with them, as a step launches them, both
as CUDA graphs; and our shrink and expand of each site alone.

Layers, rows and adapters rotate so that weights come from memory. A line gives microseconds a layer
`base`, of the same with the library's products (`library`: steps of few rows have others), what the
adapters `added` to the base, and of each site shrink and expand in a row.

`--int8`: adapters in int8 as well, in turns.

    python -m tests.benchmarks.lora_sites [--cases 1x1,64x32] [--int8] [--out FILE]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.nn.functional import linear as library_linear

from kernels.linear import linear, linear_shrink
from kernels.lora_add_rms_norm import lora_add_rms_norm
from kernels.lora_plan import PAGE_ROWS, Bridge, LoraPlan, lora_plan_size, write_lora_plan
from kernels.lora_rope_kv_write import lora_rope_kv_write
from kernels.lora_rows import SiteRows
from kernels.lora_shrink_expand import lora_expand_, lora_shrink
from kernels.lora_silu_mul import lora_silu_mul
from kernels.rms_norm import add_rms_norm
from kernels.rope_kv_write import rope_kv_write
from kernels.rope_write import RopeWrite
from kernels.silu_mul import silu_mul
from tests.benchmarks.report import Report
from tests.lora_strips import make_site_rows

SITES: dict[str, tuple[int, tuple[int, ...]]] = {
    "qkv": (4096, (4096, 1024, 1024)),
    "o": (4096, (4096,)),
    "gate_up": (4096, (14336, 14336)),
    "down": (14336, (4096,)),
}
HEADS = (32, 8, 128)
ROTATED_BYTES = 200e6  # more than three times the L2
MAX_CALLS = 64
NUM_LAYERS = 4
PREFILL_TOKENS = 257  # from here on with large tiles, as a step without a CUDA graph
CASES = (
    *("1x1", "2x2", "4x4", "8x1", "8x8", "1x1x64", "8x8x64"),
    *("32x1", "32x32", "64x32", "256x32", "64x32x64", "2048x1", "4096x1"),
)
EPS = 1e-5


@dataclass(frozen=True, slots=True)
class Call:
    """One layer's site with its own weights, rows and outputs; the plan is every layer's."""

    site: SiteRows
    x: torch.Tensor
    y: torch.Tensor
    plan: LoraPlan


def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16).mul_(scale)


def random_rows(
    num_pages: int, in_features: int, sizes: Sequence[int], *, is_int8: bool = False
) -> SiteRows:
    """A whole page of every matrix for each page number."""
    if is_int8:
        return int8_rows(num_pages, in_features, sizes)
    a = [
        {p: normal(PAGE_ROWS, in_features, scale=in_features**-0.5) for p in range(num_pages)}
        for _ in sizes
    ]
    b = [{p: normal(PAGE_ROWS, size) for p in range(num_pages)} for size in sizes]
    return make_site_rows(num_pages, a, b, in_features, sizes, torch.bfloat16, "cuda")


def int8_rows(num_pages: int, in_features: int, sizes: Sequence[int]) -> SiteRows:
    def numbers(width: int) -> dict[int, torch.Tensor]:
        shape = (PAGE_ROWS, width)
        return {
            p: torch.randint(-127, 128, shape, dtype=torch.int8, device="cuda").cpu()
            for p in range(num_pages)
        }

    scale = torch.full((PAGE_ROWS,), in_features**-0.5 / 127**2)
    return make_site_rows(
        num_pages,
        [numbers(in_features) for _ in sizes],
        [numbers(size) for size in sizes],
        in_features,
        sizes,
        torch.bfloat16,
        "cuda",
        scales=[dict.fromkeys(range(num_pages), scale) for _ in sizes],
    )


def make_plan(num_tokens: int, ranks: Sequence[int], *, decode: bool) -> tuple[LoraPlan, int]:
    """Rows shared out evenly; the plan, and the pages that it names: from 0, shuffled."""
    pages_each = [-(-rank // PAGE_ROWS) for rank in ranks]
    num_pages = sum(pages_each)
    pages = iter(torch.randperm(num_pages, generator=torch.Generator().manual_seed(0)).tolist())
    shares = share(num_tokens, len(ranks))
    runs = [([next(pages) for _ in range(n)], m) for n, m in zip(pages_each, shares, strict=True)]
    limit = max(num_pages, 1024)  # of a pool such as one has
    buffer = np.zeros(lora_plan_size(num_tokens, limit, large=not decode), dtype=np.int32)
    counts = write_lora_plan(buffer, runs, num_tokens, limit, large=not decode)
    device = torch.from_numpy(buffer).cuda()
    if decode:
        return LoraPlan.for_graph(device, num_tokens, num_tokens, limit), num_pages
    return LoraPlan.for_step(device, counts, num_tokens, limit), num_pages


def make_calls(
    site: str, num_tokens: int, ranks: Sequence[int], *, decode: bool, is_int8: bool
) -> list[Call]:
    in_features, sizes = SITES[site]
    plan, num_pages = make_plan(num_tokens, ranks, decode=decode)
    rows = num_pages * PAGE_ROWS
    weights = (1 if is_int8 else 2) * rows * (len(sizes) * in_features + sum(sizes))
    call_bytes = weights + 2 * num_tokens * (in_features + sum(sizes))
    return [
        Call(
            random_rows(num_pages, in_features, sizes, is_int8=is_int8),
            normal(num_tokens, in_features),
            normal(num_tokens, sum(sizes)),
            plan,
        )
        for _ in range(int(min(MAX_CALLS, max(2, ROTATED_BYTES // call_bytes + 1))))
    ]


def share(total: int, parts: int) -> list[int]:
    """Returns the total in as equal parts as can be."""
    return [total // parts + (i < total % parts) for i in range(parts)]


def pair_us(calls: Sequence[Call]) -> float:
    def step(call: Call) -> None:
        bridge = lora_shrink(call.x, call.site, call.plan)
        lora_expand_(call.y, bridge, call.site, call.plan)

    return graph_us([partial(step, call) for call in calls])


@dataclass(frozen=True, slots=True)
class Layer:
    weights: dict[str, torch.Tensor]
    sites: dict[str, SiteRows]
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    norms: tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Rows:
    """The tensors that all layers of a step share."""

    hidden: torch.Tensor
    residual: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    cos_sin: torch.Tensor
    plan: LoraPlan


def make_layer(num_tokens: int, num_pages: int, *, is_int8: bool = False) -> Layer:
    weights, sites = {}, {}
    for site, (in_features, sizes) in SITES.items():
        weights[site] = normal(sum(sizes), in_features, scale=in_features**-0.5)
        sites[site] = random_rows(num_pages, in_features, sizes, is_int8=is_int8)
    shape = (-(-num_tokens // 16), 16, HEADS[1], HEADS[2])
    return Layer(weights, sites, normal(*shape), normal(*shape), (normal(4096), normal(4096)))


def make_rows(num_tokens: int, plan: LoraPlan) -> Rows:
    return Rows(
        normal(num_tokens, 4096),
        normal(num_tokens, 4096),
        torch.randint(0, 4096, (num_tokens,), device="cuda"),
        torch.randperm(num_tokens, device="cuda"),
        torch.rand(4096, 2, HEADS[2] // 2, device="cuda"),
        plan,
    )


Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
Lora = tuple[Bridge, SiteRows, LoraPlan]


def base_layer(layer: Layer, rows: Rows, product: Linear) -> torch.Tensor:
    w, (post_norm, next_norm) = layer.weights, layer.norms
    caches = (layer.k_cache, layer.v_cache, rows.slots)
    qkv = product(rows.hidden, w["qkv"], None)
    q = rope_kv_write(qkv, RopeWrite(rows.positions, rows.cos_sin, *caches, *HEADS))
    o = product(q.flatten(1), w["o"], None)
    hidden, residual = add_rms_norm(o, rows.residual, post_norm, EPS)
    down = product(silu_mul(product(hidden, w["gate_up"], None)), w["down"], None)
    return add_rms_norm(down, residual, next_norm, EPS)[0]


def lora_layer(layer: Layer, rows: Rows) -> torch.Tensor:
    post_norm, next_norm = layer.norms
    caches = (layer.k_cache, layer.v_cache, rows.slots)

    def bridged(site: str, x: torch.Tensor) -> tuple[torch.Tensor, Lora]:
        adapters = layer.sites[site]
        y, bridge = linear_shrink(x, layer.weights[site], None, adapters, rows.plan)
        return y, (bridge, adapters, rows.plan)

    def normed(
        y: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, lora: Lora
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return lora_add_rms_norm(y, residual, norm, EPS, *lora)

    qkv, lora = bridged("qkv", rows.hidden)
    write = RopeWrite(rows.positions, rows.cos_sin, *caches, *HEADS)
    q = lora_rope_kv_write(qkv, *lora, write)
    o, lora = bridged("o", q.flatten(1))
    hidden, residual = normed(o, rows.residual, post_norm, lora)
    gate_up, lora = bridged("gate_up", hidden)
    down, lora = bridged("down", lora_silu_mul(gate_up, *lora))
    return normed(down, residual, next_norm, lora)[0]


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


def measure(case: str, report: Report, *, is_int8: bool = False) -> None:
    """`case`: tokens x adapters [x rank]"""
    num_tokens, distinct, rank = (*map(int, case.split("x")), 16)[:3]
    decode = num_tokens < PREFILL_TOKENS
    plan, num_pages = make_plan(num_tokens, [rank] * distinct, decode=decode)
    rows = make_rows(num_tokens, plan)
    layers = [make_layer(num_tokens, num_pages, is_int8=is_int8) for _ in range(NUM_LAYERS)]
    library = graph_us([partial(base_layer, layer, rows, library_linear) for layer in layers])
    base = graph_us([partial(base_layer, layer, rows, linear) for layer in layers])
    adapted = graph_us([partial(lora_layer, layer, rows) for layer in layers])
    del layers
    calls = partial(
        make_calls, num_tokens=num_tokens, ranks=[rank] * distinct, decode=decode, is_int8=is_int8
    )
    pairs = {site: round(pair_us(calls(site)), 2) for site in SITES}
    torch.cuda.empty_cache()
    report.emit(
        part="lora_added",
        case=case,
        lora_dtype="int8" if is_int8 else "bfloat16",
        base_us=round(base, 1),
        library_us=round(library, 1),
        added_us=round(adapted - base, 2),
        added_percent=round(100 * (adapted / base - 1), 2),
        pairs_us=pairs,
        pairs_sum_us=round(sum(pairs.values()), 1),
    )


@contextmanager
def constants(module: ModuleType, values: Mapping[str, object]) -> Iterator[None]:
    """Gives a module other constants for a while."""
    before = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(before)


def on_meta(value: Any) -> Any:
    """Returns the same structure with tensors of the meta device."""
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=torch.device("meta")
        )
    if isinstance(value, dict):
        return {key: on_meta(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(map(on_meta, value))
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: on_meta(getattr(value, f.name)) for f in fields(value)})
    return value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=",".join(CASES), help="tokens x adapters [x rank]")
    parser.add_argument("--int8", action="store_true", help="adapters in int8 as well")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    report = Report(options.out)
    report.emit_machine("lora_sites")
    for case in options.cases.split(","):
        measure(case, report)
        if options.int8:
            measure(case, report, is_int8=True)


if __name__ == "__main__":
    main()

"""The forms of a Llama-3-8B decode layer with adapters, without its attention, in CUDA graphs.

A graph holds layers whose weights and adapters rotate, together more than the second-level cache
holds, each with the output of the one before as its input. The graphs of all forms are replayed in
turn, so that clocks favour none. A line gives the median microseconds a layer of each form, the
base without adapters among them, and the base's share of it. `differs` has the forms with another
result than the first one and its largest difference: those whose norm adds the delta in one
launch may differ in the last places, and all of these among each other in nothing.

    python -m tests.benchmarks.decode_layer [--tokens 16,32] [--adapters 1,8,32] [--rank 16]
        [--forms apart,norm] [--out FILE]
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from kernels import linear as linear_module
from kernels import lora_add_rms_norm, triton_lora_silu_mul
from kernels.backend import traced_for
from kernels.compilations import load_kernels
from kernels.linear import linear
from kernels.lora_plan import PAGE_ROWS, LoraPlan, lora_plan_size, write_lora_plan
from kernels.lora_rows import UNIT_BYTES, SiteRows, make_entry
from tests.benchmarks.lora_sites import HEADS, SITES, Layer, Rows, base_layer, lora_layer, share
from tests.benchmarks.report import Report, print_table

HIDDEN = 4096
NUM_LAYERS = 4
LAYERS_IN_GRAPH = 8
REPLAYS = 25
POOL_PAGES = 1024
MAX_RANK_PAGES = 4
TOKENS = "16,32,64,128,256"
ADAPTERS = "1,8,32"
_SHARES_UNITS = triton_lora_silu_mul.shares_units


@dataclass(frozen=True, slots=True)
class Form:
    norm_rows: int  # up to so many rows the norm adds the delta in one launch
    branch_rows: int  # up to so many rows the shrink runs beside the product
    has_units: bool = True  # SiLU keeps pages of B in shared memory, not in registers


FORMS = {
    "apart": Form(8, 0),
    "norm": Form(256, 0),
    "branch": Form(256, 256),
    "registers": Form(lora_add_rms_norm.MAX_ROWS, linear_module.MAX_BRANCH_ROWS, has_units=False),
    "default": Form(lora_add_rms_norm.MAX_ROWS, linear_module.MAX_BRANCH_ROWS),
}


def use(form: Form) -> None:
    lora_add_rms_norm.MAX_ROWS = form.norm_rows
    linear_module.MAX_BRANCH_ROWS = form.branch_rows
    triton_lora_silu_mul.shares_units = _SHARES_UNITS if form.has_units else lambda *_: False


def normal(device: str, *shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, device=device, dtype=torch.bfloat16).mul_(scale)


def make_site(num_pages: int, rank: int, site: str, device: str) -> SiteRows:
    """The strips of each page side by side in a heap, full pages but for the rank's last one."""
    in_features, sizes = SITES[site]
    widths = [in_features] * len(sizes) + list(sizes)
    pages_each = -(-rank // PAGE_ROWS)
    table = torch.zeros((num_pages, len(widths)), dtype=torch.int64)
    end = 0
    for page in range(num_pages):
        rows = min(PAGE_ROWS, rank - page % pages_each * PAGE_ROWS)
        for i, width in enumerate(widths):
            table[page, i] = make_entry(end, rows)
            end += -(-2 * rows * width // UNIT_BYTES) * UNIT_BYTES
    heap = normal(device, end // 2, scale=0.02)
    entries = table.to(device)
    slices = len(sizes)
    return SiteRows(heap, entries[:, :slices], entries[:, slices:], in_features, sizes)


def make_layer(num_tokens: int, num_pages: int, rank: int, device: str) -> Layer:
    weights = {
        site: normal(device, sum(sizes), in_features, scale=in_features**-0.5)
        for site, (in_features, sizes) in SITES.items()
    }
    sites = {site: make_site(num_pages, rank, site, device) for site in SITES}
    shape = (-(-num_tokens // 16), 16, HEADS[1], HEADS[2])
    norms = (normal(device, HIDDEN), normal(device, HIDDEN))
    return Layer(weights, sites, normal(device, *shape), normal(device, *shape), norms)


def make_plan(num_tokens: int, distinct: int, rank: int, device: str) -> LoraPlan:
    """Rows shared out evenly, in the plan of a graph of decodes."""
    pages = -(-rank // PAGE_ROWS)
    runs = [
        (list(range(i * pages, (i + 1) * pages)), rows)
        for i, rows in enumerate(share(num_tokens, distinct))
    ]
    buffer = np.zeros(lora_plan_size(num_tokens, POOL_PAGES, large=False), dtype=np.int32)
    write_lora_plan(buffer, runs, num_tokens, POOL_PAGES, large=False)
    static = torch.from_numpy(buffer).to(device)
    return LoraPlan.for_graph(static, num_tokens, num_tokens, POOL_PAGES, MAX_RANK_PAGES)


def make_rows(num_tokens: int, plan: LoraPlan, device: str) -> Rows:
    return Rows(
        normal(device, num_tokens, HIDDEN),
        normal(device, num_tokens, HIDDEN),
        torch.arange(num_tokens, dtype=torch.int32, device=device),
        torch.arange(num_tokens, dtype=torch.int32, device=device),
        torch.rand(HIDDEN, 2, HEADS[2] // 2, device=device),
        plan,
    )


def run_layers(layers: Sequence[Layer], rows: Rows, *, with_lora: bool) -> torch.Tensor:
    hidden = rows.hidden
    for i in range(LAYERS_IN_GRAPH):
        layer, here = layers[i % len(layers)], replace(rows, hidden=hidden)
        hidden = lora_layer(layer, here) if with_lora else base_layer(layer, here, linear)
    return hidden


def compile_ahead(tokens: Sequence[int], forms: Sequence[str], rank: int) -> tuple[int, float]:
    """Compiles every kernel of the cases in parallel and loads them; returns how many, and the
    seconds."""
    from kernels.kernel_cache import use_cache
    from kernels.kernel_compiler import compile_all
    from kernels.triton_launch import recorded_calls

    began_s = time.perf_counter()
    capability = torch.cuda.get_device_capability()
    with traced_for(capability), recorded_calls() as calls:
        for num_tokens in tokens:
            plan = make_plan(num_tokens, 1, rank, "cpu")
            fields = ("header", "small", "units", "large", "counters", "pages")
            plan = replace(plan, **{name: getattr(plan, name).to("meta") for name in fields})
            layers = [make_layer(num_tokens, 1, rank, "meta")]
            rows = make_rows(num_tokens, plan, "meta")
            run_layers(layers, rows, with_lora=False)
            for form in forms:
                use(FORMS[form])
                run_layers(layers, rows, with_lora=True)
    cache = use_cache(None)
    failures = compile_all(list(calls), capability, cache, lambda: None, os.cpu_count() or 1)
    assert not failures, failures
    load_kernels(calls)
    return len(calls), time.perf_counter() - began_s


@dataclass(frozen=True, slots=True)
class Captured:
    graph: torch.cuda.CUDAGraph
    out: torch.Tensor

    def result(self, rows: Rows) -> torch.Tensor:
        rows.residual.zero_()
        self.graph.replay()
        return self.out.clone()

    def replay_us(self) -> float:
        start, end = _event(), _event()
        start.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / LAYERS_IN_GRAPH


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def capture(run: Callable[[], torch.Tensor], memory: object) -> Captured:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=memory):  # type: ignore[arg-type]
        out = run()
    return Captured(graph, out)


def measure(
    num_tokens: int,
    distinct: int,
    layers: Sequence[Layer],
    forms: Sequence[str],
    rank: int,
    report: Report,
) -> list[object]:
    rows = make_rows(num_tokens, make_plan(num_tokens, distinct, rank, "cuda"), "cuda")
    memory = torch.cuda.graph_pool_handle()
    captured = {"base": capture(lambda: run_layers(layers, rows, with_lora=False), memory)}
    for form in forms:
        use(FORMS[form])
        captured[form] = capture(lambda: run_layers(layers, rows, with_lora=True), memory)
    results = {form: captured[form].result(rows).float() for form in forms}
    differs = {
        form: float((result - results[forms[0]]).abs().max())
        for form, result in results.items()
        if not torch.equal(result, results[forms[0]])
    }
    times: dict[str, list[float]] = {name: [] for name in captured}
    for i in range(REPLAYS + 3):
        for name, found in captured.items():
            us = found.replay_us()
            if i >= 3:
                times[name].append(us)
    medians = {name: round(statistics.median(found), 2) for name, found in times.items()}
    share = {form: round(medians["base"] / medians[form], 4) for form in forms}
    report.emit(
        part="decode_layer",
        tokens=num_tokens,
        adapters=distinct,
        rank=rank,
        us=medians,
        of_base=share,
        differs=differs,
    )
    return [num_tokens, distinct, *medians.values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default=TOKENS)
    parser.add_argument("--adapters", default=ADAPTERS, help="distinct ones")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    tokens = [int(value) for value in options.tokens.split(",")]
    adapters = [int(value) for value in options.adapters.split(",")]
    forms = options.forms.split(",")
    report = Report(options.out)
    report.emit_machine("decode_layer")
    torch.manual_seed(0)
    with torch.inference_mode():
        count, seconds = compile_ahead(tokens, forms, options.rank)
        report.emit(part="compiled", kernels=count, seconds=round(seconds, 1))
        num_pages = max(adapters) * -(-options.rank // PAGE_ROWS)
        layers = [
            make_layer(max(tokens), num_pages, options.rank, "cuda") for _ in range(NUM_LAYERS)
        ]
        gc.freeze()  # every capture collects garbage
        table = [
            measure(num_tokens, distinct, layers, forms, options.rank, report)
            for num_tokens in tokens
            for distinct in adapters
            if distinct <= num_tokens
        ]
    print_table(["tokens", "adapters", "base", *forms], table)


if __name__ == "__main__":
    main()

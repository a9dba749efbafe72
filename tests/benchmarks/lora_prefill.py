"""The time that adapters add to a prefill: a Llama-3-8B layer without its attention, in CUDA
graphs that are replayed in turn, so that the clock favours none.

A case is `tokens x adapters`, of rank 16 on all linear layers, with equal runs of rows, or several
of them with a plus sign: 256x32+768x3 is a step of 32 adapters that decode and three prompts. With
`--graph` its plan is that of a piece graph, which has room for adapters of any rank. A line per
case gives microseconds a layer: `base`, `now`, `before` with the kernels of another folder, and of
each the parts by kernel, as far as the device waited for them. Then, at one case, `now` with other
constants of one kernel's module each: `over_us` is what such a layer takes beyond `now`.

    git archive REVISION kernels | tar -x -C FOLDER
    python -m tests.benchmarks.lora_prefill [--cases 4096x1,...] [--graph] [--before FOLDER]
        [--out FILE]
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from kernels.linear import linear
from kernels.lora_plan import LoraPlan, lora_plan_size, write_lora_plan
from kernels.rope_write import RopeWrite
from tests.benchmarks.gpu_trace import GpuTrace, break_down, warm_up_profiler
from tests.benchmarks.lora_sites import (
    EPS,
    HEADS,
    Layer,
    Rows,
    base_layer,
    constants,
    make_layer,
    make_rows,
    on_meta,
    share,
)
from tests.benchmarks.report import Report

CASES = (
    *("512x0", "512x1", "512x4", "2048x0", "2048x1", "2048x4"),
    *("4096x0", "4096x1", "4096x4", "8192x0", "8192x1", "8192x4"),
)
TUNED_CASE = "4096x1"
NUM_LAYERS = 2  # 0.9 GB of weights: none stays in the L2 cache
REPLAYS = 15
TRACED = 5
POOL_PAGES = 1024

_SHRINK = "kernels.triton_lora_shrink"
_SILU = "kernels.triton_lora_silu_mul"
_EXPAND = "kernels.triton_lora_expand"
_ROPE = "kernels.triton_lora_rope_large"
CANDIDATES: dict[str, tuple[str, dict[str, object]]] = {
    "shrink chunk 512": (_SHRINK, {"LARGE_CHUNK": 512}),
    "shrink 128 rows": (_SHRINK, {"LARGE_PART": 128}),
    "shrink step 64": (_SHRINK, {"LARGE_STEP": 64}),
    "shrink 128 rows, step 64": (_SHRINK, {"LARGE_PART": 128, "LARGE_STEP": 64}),
    "silu 64 columns": (_SILU, {"LARGE_COLUMNS": 64}),
    "silu 32 rows": (_SILU, {"LARGE_PART": 32}),
    "silu 32 rows, 64 columns": (_SILU, {"LARGE_PART": 32, "LARGE_COLUMNS": 64}),
    "silu 2 warps": (_SILU, {"LARGE_WARPS": 2}),
    "expand 256 columns": (_EXPAND, {"LARGE_COLUMNS": 256}),
    "expand 64 columns": (_EXPAND, {"LARGE_COLUMNS": 64}),
    "expand 32 rows": (_EXPAND, {"LARGE_PART": 32}),
    "rope 2 heads": (_ROPE, {"HEADS": 2}),
    "rope 8 heads": (_ROPE, {"HEADS": 8}),
}

Step = Callable[[], object]
Modules = dict[str, ModuleType]


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    replay: Step
    times_us: list[float]

    @property
    def us(self) -> float:
        return statistics.median(self.times_us)


@contextmanager
def kernels_of(folder: Path, modules: Modules) -> Iterator[None]:
    """Lets `kernels` be that of the folder; `modules` keeps what has been imported of it. Ops
    import their kernels when they are called."""

    def take() -> Modules:
        names = [name for name in sys.modules if name.split(".")[0] == "kernels"]
        return {name: sys.modules.pop(name) for name in names}

    ours = take()
    sys.modules.update(modules)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        modules.update(take())
        sys.modules.update(ours)


def lora_layer(layer: Layer, rows: Rows) -> torch.Tensor:
    """`lora_sites.lora_layer` with the ops of the `kernels` that are in place."""

    def op(module: str, name: str) -> Callable[..., torch.Tensor]:
        return getattr(importlib.import_module(f"kernels.{module}"), name)  # type: ignore[no-any-return]

    linear_shrink, plan = op("linear", "linear_shrink"), rows.plan
    add_norm = op("lora_add_rms_norm", "lora_add_rms_norm")
    sites, weights = layer.sites, layer.weights
    qkv, bridge = linear_shrink(rows.hidden, weights["qkv"], None, sites["qkv"], plan)
    write = RopeWrite(
        rows.positions, rows.cos_sin, layer.k_cache, layer.v_cache, rows.slots, *HEADS
    )
    q = op("lora_rope_kv_write", "lora_rope_kv_write")(qkv, bridge, sites["qkv"], plan, write)
    o, bridge = linear_shrink(q.flatten(1), weights["o"], None, sites["o"], plan)
    hidden, residual = add_norm(o, rows.residual, layer.norms[0], EPS, bridge, sites["o"], plan)
    gate_up, bridge = linear_shrink(hidden, weights["gate_up"], None, sites["gate_up"], plan)
    product = op("lora_silu_mul", "lora_silu_mul")(gate_up, bridge, sites["gate_up"], plan)
    down, bridge = linear_shrink(product, weights["down"], None, sites["down"], plan)
    return add_norm(down, residual, layer.norms[1], EPS, bridge, sites["down"], plan)[0]


def capture(name: str, steps: Sequence[Step], graph_pool: Any) -> Variant:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for step in steps:
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=graph_pool, stream=stream):
        for step in steps:
            step()
    return Variant(name, graph.replay, [])


def time_in_turn(variants: Sequence[Variant]) -> None:
    for turn in range(REPLAYS + 3):
        for variant in variants:
            start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            start.record()
            variant.replay()
            end.record()
            end.synchronize()
            if turn >= 3:
                variant.times_us.append(start.elapsed_time(end) * 1e3 / NUM_LAYERS)


def parts_us(variant: Variant) -> dict[str, float]:
    """Microseconds of a layer by kernel; the library's products are one part."""
    trace = GpuTrace()
    trace.start()
    for _ in range(TRACED):
        variant.replay()
    trace.stop()
    parts: dict[str, float] = {}
    found = break_down(trace.events, TRACED * NUM_LAYERS)
    for name, (us, _) in found.by_kernel.items():
        part = name if name.startswith("_") else "library"
        parts[part] = parts.get(part, 0.0) + us
    return {name: round(us, 1) for name, us in sorted(parts.items(), key=lambda one: -one[1])}


def compile_ahead(layers: Sequence[Layer], rows: Rows) -> None:
    """Compiles the candidates' kernels in parallel processes: one after the other they take
    minutes."""
    from kernels.backend import traced_for
    from kernels.kernel_cache import use_cache
    from kernels.kernel_compiler import compile_all, missing_calls, targeted
    from kernels.triton_launch import recorded_calls

    capability = torch.cuda.get_device_capability()
    cache = use_cache(None)
    layer, rows = on_meta(layers[0]), on_meta(rows)
    with traced_for(capability), recorded_calls() as calls:
        lora_layer(layer, rows)
        for module, values in CANDIDATES.values():
            with constants(importlib.import_module(module), values):
                lora_layer(layer, rows)
    with targeted(capability):
        missing = missing_calls(calls)
        compile_all(missing, capability, cache, lambda: None, os.cpu_count() or 1)


def parse_case(case: str) -> list[tuple[int, int]]:
    """Returns the tokens and adapters of each part."""
    parts = [part.split("x") for part in case.split("+")]
    return [(int(tokens), int(adapters)) for tokens, adapters in parts]


def make_plan(case: str, *, graph: bool) -> tuple[LoraPlan, int]:
    """Returns the plan of a case, with an adapter where it has none, and the number of adapters."""
    shares = [share(tokens, max(1, adapters)) for tokens, adapters in parse_case(case)]
    runs = [([page], rows) for page, rows in enumerate(chain.from_iterable(shares))]
    num_tokens = sum(rows for _, rows in runs)
    buffer = np.zeros(lora_plan_size(num_tokens, POOL_PAGES), dtype=np.int32)
    counts = write_lora_plan(buffer, runs, num_tokens, POOL_PAGES)
    device = torch.from_numpy(buffer).cuda()
    if graph:
        plan = LoraPlan.for_graph(device, num_tokens, num_tokens, POOL_PAGES, large=True)
    else:
        plan = LoraPlan.for_step(device, counts, num_tokens, POOL_PAGES)
    return plan, len(runs)


def measure(
    case: str, before: Path | None, modules: Modules, report: Report, *, graph: bool
) -> None:
    plan, num_pages = make_plan(case, graph=graph)
    rows, layers = (
        make_rows(plan.num_tokens, plan),
        [make_layer(plan.num_tokens, num_pages) for _ in range(NUM_LAYERS)],
    )
    memory = torch.cuda.graph_pool_handle()
    lora = [partial(lora_layer, layer, rows) for layer in layers]
    base = [partial(base_layer, layer, rows, linear) for layer in layers]
    variants = [capture("base", base, memory)]
    if any(adapters for _, adapters in parse_case(case)):
        variants.append(capture("now", lora, memory))
        if before is not None:
            with kernels_of(before, modules):
                variants.append(capture("before", lora, memory))
    time_in_turn(variants)
    first = variants[0].us
    report.emit(
        part="prefill_layer",
        case=case,
        graph=graph,
        us={variant.name: round(variant.us, 1) for variant in variants},
        percent={one.name: round(100 * (one.us / first - 1), 2) for one in variants[1:]},
        parts_us={variant.name: parts_us(variant) for variant in variants},
    )


def tune(case: str, report: Report, *, graph: bool) -> None:
    plan, num_pages = make_plan(case, graph=graph)
    rows = make_rows(plan.num_tokens, plan)
    layers = [make_layer(plan.num_tokens, num_pages) for _ in range(NUM_LAYERS)]
    memory = torch.cuda.graph_pool_handle()
    steps = [partial(lora_layer, layer, rows) for layer in layers]
    compile_ahead(layers, rows)
    variants = [capture("now", steps, memory)]
    for name, (module, values) in CANDIDATES.items():
        with constants(importlib.import_module(module), values):
            variants.append(capture(name, steps, memory))
    time_in_turn(variants)
    now = variants[0].us
    report.emit(
        part="prefill_candidates",
        case=case,
        graph=graph,
        now_us=round(now, 1),
        over_us={variant.name: round(variant.us - now, 1) for variant in variants[1:]},
        parts_us={variant.name: parts_us(variant) for variant in variants},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=",".join(CASES), help="tokens x adapters, or a sum")
    parser.add_argument("--tuned", default=TUNED_CASE, help="the candidates' case; empty: none")
    parser.add_argument("--graph", action="store_true", help="the plan of a piece graph")
    parser.add_argument("--before", type=Path, help="a folder with another `kernels`")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    report = Report(options.out)
    report.emit_machine("lora_prefill")
    warm_up_profiler()
    if options.tuned:
        tune(options.tuned, report, graph=options.graph)
    modules: Modules = {}
    for case in options.cases.split(","):
        torch.cuda.empty_cache()
        measure(case, options.before, modules, report, graph=options.graph)


if __name__ == "__main__":
    main()

"""Microseconds of a Llama-3-8B layer without its attention in steps of 1 to 8 rows, in CUDA graphs,
with and without an adapter, and of its products alone, for several walks of the weights; JSON
lines.

A variant is the walk of all weights, "128x6x2": columns of a warp at a time x stages x warps of a
program. The first variant is the one that others are compared with. Layers follow each other in a
graph, together more than the second-level cache holds; the graphs of all variants are replayed in
turn, so that clocks favour none. `to_first` is the median of the time relative to the first
variant's in the same round, `gb_s` the weights' bytes over the time, `error` the distance from the
library's result, with an adapter from the first variant's.

    python -m tests.benchmarks.few_rows [--rows 1,8] [--variants VARIANT,...] [--out FILE]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch.nn.functional import linear as library_linear

from engine.host_memory import available_bytes
from kernels import triton_linear_few
from kernels.backend import traced_for
from kernels.kernel_cache import use_cache
from kernels.kernel_compiler import compile_all, num_processes_for
from kernels.linear import linear
from kernels.triton_launch import recorded_calls
from tests.benchmarks.lora_sites import (
    NUM_LAYERS,
    SITES,
    Layer,
    Rows,
    base_layer,
    constants,
    lora_layer,
    make_layer,
    make_plan,
    make_rows,
    normal,
    on_meta,
)
from tests.benchmarks.report import Report

ROUNDS = 40
REPEATS = 3  # of the layers in a graph of one site's products
RANK = 16
VARIANTS = ("256x4x1", "128x6x2", "128x4x2", "256x4x2", "128x4x4", "128x6x4", "256x6x1", "512x4x1")
_BYTES = {site: 2 * sum(sizes) * width for site, (width, sizes) in SITES.items()}
Step = Callable[[], object]


def walking(variant: str) -> AbstractContextManager[None]:
    values = dict(zip(("BLOCK_K", "STAGES", "SPLIT"), map(int, variant.split("x")), strict=True))
    return constants(triton_linear_few, values)


def compile_variants(variants: Sequence[str], layer: Layer, rows: Rows) -> int:
    """Compiles the variants' kernels in parallel; returns their number. The number of rows is in
    none of them."""
    capability = torch.cuda.get_device_capability()
    layer, rows = on_meta(layer), on_meta(rows)
    with traced_for(capability), recorded_calls() as calls:
        for variant in variants:
            with walking(variant):
                base_layer(layer, rows, linear)
                lora_layer(layer, rows)
    failures = compile_all(
        tuple(calls),
        capability,
        use_cache(None),
        lambda: None,
        num_processes_for(available_bytes()),
    )
    assert not failures, failures
    return len(calls)


def captured(steps: Sequence[Step]) -> torch.cuda.CUDAGraph:
    for step in steps:
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for step in steps:
            step()
    return graph


def times_us(graphs: Sequence[torch.cuda.CUDAGraph]) -> list[list[float]]:
    """Returns the times of each graph, one of each round."""
    times: list[list[float]] = [[] for _ in graphs]
    for turn in range(ROUNDS + 3):
        graphs[0].replay()  # the device is busy when the first of the events is recorded
        marks = []
        for graph in graphs:
            start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            start.record()
            graph.replay()
            end.record()
            marks.append((start, end))
        torch.cuda.synchronize()
        for found, (start, end) in zip(times, marks, strict=True):
            if turn >= 3:
                found.append(1e3 * start.elapsed_time(end))
    return times


def compare(
    report: Report,
    steps: Sequence[Step],
    num_bytes: int,  # of the weights of a step
    errors: Mapping[str, float],  # of each variant
    **labels: object,
) -> None:
    graphs = []
    for variant in errors:
        with walking(variant):
            graphs.append(captured(steps))
    times = times_us(graphs)
    for (variant, error), found in zip(errors.items(), times, strict=True):
        us = statistics.median(found) / len(steps)
        to_first = statistics.median(a / b for a, b in zip(found, times[0], strict=True))
        report.emit(
            **labels,
            variant=variant,
            us=round(us, 2),
            to_first=round(to_first, 4),
            gb_s=round(num_bytes / us / 1e3),
            error=round(error, 5),
        )


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def measure_layers(
    report: Report, layers: Sequence[Layer], num_rows: int, variants: Sequence[str]
) -> None:
    plan, _ = make_plan(num_rows, [RANK], decode=True)
    rows = make_rows(num_rows, plan)

    def first_layer(layer_of: Callable[[Layer, Rows], torch.Tensor]) -> torch.Tensor:
        # The norms add to the residual.
        return layer_of(layers[0], replace(rows, residual=rows.residual.clone()))

    def base(layer: Layer, rows: Rows) -> torch.Tensor:
        return base_layer(layer, rows, linear)

    with walking(variants[0]):
        wanted = {base: first_layer(partial(base_layer, product=library_linear))}
        wanted[lora_layer] = first_layer(lora_layer)
    for layer_of in (base, lora_layer):
        errors = {}
        for variant in variants:
            with walking(variant):
                errors[variant] = distance(first_layer(layer_of), wanted[layer_of])
        compare(
            report,
            [partial(layer_of, layer, rows) for layer in layers],
            sum(_BYTES.values()),
            errors,
            part="layer",
            rows=num_rows,
            adapters=int(layer_of is lora_layer),
        )


def measure_site(
    report: Report, layers: Sequence[Layer], site: str, num_rows: int, variants: Sequence[str]
) -> None:
    weights = [layer.weights[site] for layer in layers]
    x = normal(num_rows, SITES[site][0])
    steps = [partial(linear, x, weight, None) for weight in weights] * REPEATS
    errors = {}
    for variant in variants:
        with walking(variant):
            errors[variant] = distance(linear(x, weights[0], None), library_linear(x, weights[0]))
    compare(
        report,
        steps,
        _BYTES[site],
        errors,
        part="site",
        site=site,
        rows=num_rows,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="1,2,4,8")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    variants, sizes = options.variants.split(","), [int(rows) for rows in options.rows.split(",")]
    report = Report(options.out)
    torch.manual_seed(0)
    plan, num_pages = make_plan(max(sizes), [RANK], decode=True)
    layers = [make_layer(max(sizes), num_pages) for _ in range(NUM_LAYERS)]
    num_kernels = compile_variants(variants, layers[0], make_rows(max(sizes), plan))
    report.emit_machine("few_rows", kernels=num_kernels)
    for num_rows in sizes:
        measure_layers(report, layers, num_rows, variants)
    for site in SITES:
        for num_rows in sorted({sizes[0], sizes[-1]}):
            measure_site(report, layers, site, num_rows, variants)


if __name__ == "__main__":
    main()

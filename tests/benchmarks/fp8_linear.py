"""Microseconds of an FP8 linear in a CUDA graph, beside the product in bfloat16; JSON lines.

    python -m tests.benchmarks.fp8_linear [--sites qkv,o] [--rows 1,8] [--tiles] [--out FILE]

The four products of a Llama-3-8B layer. A graph holds a call on each of several copies of weight
and activations, together more than the second-level cache holds; the variants' graphs are replayed
in turns, and the median is of the rounds after the first. `fp8` is all that a layer does: it
quantises the rows and multiplies; `fp8_product` has them quantised. `scaled_mm` is the library's
product at every number of rows. Each variant's result is checked against float32 of the values and
scales, the relative error is in its line. `over_floor`: times the bytes of weight, activations and
result, moved once at 4.46 TB/s (measured on an H200) or 3.35 TB/s (an H100's data sheet).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from kernels.e4m3 import E4m3Rows, empty_rows, quantize_rows
from kernels.few_rows import FEW_ROWS
from kernels.fp8_linear import fp8_linear_many, reference_product
from kernels.linear import linear
from kernels.triton_fp8_few import launch_fp8_few
from kernels.triton_fp8_mid import MAX_ROWS, MidTile, launch_fp8_mid
from tests.benchmarks.report import Report, print_table

SITES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
ROWS = (1, 8, 32, 64, 128, 512, 2048)
CACHE_BYTES = 4 * 60e6
ROUNDS = 15
BYTES_A_US = {"H200": 4.46e6, "H100": 3.35e6}
LARGEST_ERROR = 4e-3
TILES = (
    MidTile(64, 4, 4),
    MidTile(64, 6, 4),
    MidTile(64, 5, 4, 1),
    MidTile(64, 5, 4, 2),
    MidTile(128, 4, 8),
    MidTile(128, 3, 4),
)


@dataclass(frozen=True, slots=True)
class Data:
    """One copy of a linear and its input, in both types."""

    x: torch.Tensor  # [T, K]
    rows: E4m3Rows  # of x
    weight: torch.Tensor  # [N, K]
    quantised: E4m3Rows


def copies(height: int, width: int, num_rows: int) -> list[Data]:
    """Draws so many copies that the e4m3 weights of one have left the cache at its next turn."""
    found = []
    for _ in range(max(2, int(CACHE_BYTES / (height * width)) + 1)):
        x = torch.randn(num_rows, width, device="cuda").bfloat16()
        weight = (torch.randn(height, width, device="cuda") * width**-0.5).bfloat16()
        quantised = empty_rows(height, width, weight.device)
        quantised.write_(weight)
        found.append(Data(x, quantize_rows(x), weight, quantised))
    return found


def product(data: Data) -> torch.Tensor:
    if data.x.shape[0] <= FEW_ROWS:
        return launch_fp8_few(data.x, data.rows, data.quantised, None)
    if data.x.shape[0] <= MAX_ROWS:
        return launch_fp8_mid(data.rows, data.quantised, None, data.x.dtype)
    return scaled_mm(data)


def by_tile(data: Data, tile: MidTile) -> torch.Tensor:
    return launch_fp8_mid(data.rows, data.quantised, None, data.x.dtype, tile)


def scaled_mm(data: Data, *, is_fast: bool = False) -> torch.Tensor:
    return torch._scaled_mm(
        data.rows.values,
        data.quantised.values.T,
        scale_a=data.rows.scales[:, None],
        scale_b=data.quantised.scales[None, :],
        out_dtype=torch.bfloat16,
        use_fast_accum=is_fast,
    )


def variants(num_rows: int, *, tiles: bool) -> Iterator[tuple[str, Callable[[Data], torch.Tensor]]]:
    yield "bf16", lambda data: linear(data.x, data.weight, None)
    yield "fp8", lambda data: linear(data.x, data.quantised, None)
    yield "fp8_product", product
    yield "scaled_mm", scaled_mm
    yield "scaled_mm_fast", partial(scaled_mm, is_fast=True)
    if num_rows <= FEW_ROWS:
        yield "fp8_of_many", lambda data: fp8_linear_many(data.x, data.quantised, None)
    if tiles and num_rows <= MAX_ROWS:
        for tile in TILES:
            name = f"tile_{tile.block_n}x{tile.stages}x{tile.num_warps}x{tile.splits or 'auto'}"
            yield name, partial(by_tile, tile=tile)


def capture(call: Callable[[Data], torch.Tensor], all_data: Sequence[Data]) -> torch.cuda.CUDAGraph:
    for data in all_data[:1]:
        call(data)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for data in all_data:
            call(data)
    return graph


def times_us(graphs: dict[str, torch.cuda.CUDAGraph], num_calls: int) -> dict[str, list[float]]:
    """Returns the microseconds of a call in each round but the first."""
    found: dict[str, list[float]] = {name: [] for name in graphs}
    for number in range(ROUNDS + 1):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if number:
                found[name].append(1000 * start.elapsed_time(end) / num_calls)
    return found


def measure(
    args: argparse.Namespace, report: Report, site: str, num_rows: int
) -> tuple[dict[str, float], bool]:
    """Returns the medians by variant, and whether each that ran is right."""
    height, width = SITES[site]
    all_data = copies(height, width, num_rows)
    first = all_data[0]
    wanted = reference_product(first.rows, first.quantised, None, torch.float32)
    bf16 = first.x.float() @ first.weight.float().T
    graphs, errors = {}, {}
    for name, call in variants(num_rows, tiles=args.tiles):
        try:
            y = call(first).float()
            expected = bf16 if name == "bf16" else wanted
            errors[name] = float((y - expected).norm() / expected.norm())
            graphs[name] = capture(call, all_data)
        except Exception as error:  # a variant that this device or version lacks
            report.emit(site=site, rows=num_rows, variant=name, error=str(error)[:300])
    num_bytes = height * width + num_rows * (width + 2 * height)
    card = next((name for name in BYTES_A_US if name in torch.cuda.get_device_name()), "H100")
    floor_us = num_bytes / BYTES_A_US[card]
    medians = {}
    for name, times in times_us(graphs, len(all_data)).items():
        medians[name] = statistics.median(times)
        report.emit(
            site=site,
            rows=num_rows,
            variant=name,
            us=round(medians[name], 2),
            over_floor=round(medians[name] / floor_us, 2),
            error=f"{errors[name]:.1e}",
            ok=errors[name] < LARGEST_ERROR,
        )
    del all_data, graphs
    torch.cuda.empty_cache()
    return medians, all(
        error < LARGEST_ERROR for name, error in errors.items() if not name.endswith("_fast")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sites", default=",".join(SITES))
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--tiles", action="store_true", help="also other tiles of 9 to 128 rows")
    parser.add_argument("--out", type=Path, help="file that gets every line, too")
    args = parser.parse_args()
    report = Report(args.out)
    report.emit_machine("fp8_linear")
    torch.manual_seed(0)
    table, is_right = [], True
    for num_rows in map(int, args.rows.split(",")):
        sums: dict[str, float] = {}
        for site in args.sites.split(","):
            medians, is_ok = measure(args, report, site, num_rows)
            is_right &= is_ok
            for name, us in medians.items():
                sums[name] = sums.get(name, 0.0) + us
        report.emit(
            rows=num_rows,
            sites=args.sites,
            sum_us={name: round(us, 1) for name, us in sums.items()},
            bf16_over_fp8=round(sums["bf16"] / sums["fp8"], 3),
        )
        shown = ("bf16", "fp8", "fp8_product", "scaled_mm")
        ratio = sums["bf16"] / sums["fp8"]
        table.append((num_rows, *(sums.get(name) for name in shown), ratio))
    header = ("rows", "bf16 us", "fp8 us", "product us", "scaled_mm us", "bf16/fp8")
    print_table(header, table)
    report.emit(benchmark="fp8_linear", **{"pass": is_right})


if __name__ == "__main__":
    main()

"""Microseconds of a quantized linear in a CUDA graph, beside the product in bfloat16; JSON lines.

    python -m tests.benchmarks.quantized_linear --scheme fp8|int4 [--rows 1,8] [--tiles] --out FILE

The four products of a Llama-3-8B layer. A graph holds a call on each of several copies of weight
and activations, together more than the second-level cache holds; the variants' graphs are replayed
in turns, and the median is of the rounds after the first. Each variant's result is checked against
float32 of the values and scales, the relative error is in its line. `over_floor`: times the bytes
of weight, activations and result, moved once at 4.46 TB/s (measured on an H200) or 3.35 TB/s (an
H100's data sheet).

FP8: `fp8` is all that a layer does, it quantises the rows and multiplies; `fp8_product` has them
quantised; `scaled_mm` is the library's product at every number of rows. 4 bits, in groups of
`--group` columns, with zero points after `--zeros`: `int4` is what a layer does, `triton` the
kernel of machines other than Hopper, `write_out` writes the weight in bfloat16 and lets cuBLAS
multiply, `write_out_parts` does so by parts of 32 MiB, `tinygemm` is torch's `_weight_int4pack_mm`.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch.nn import functional

from kernels import int4_linear, triton_int4_few
from kernels.e4m3 import E4m3Rows, empty_rows, quantize_rows
from kernels.few_rows import FEW_ROWS
from kernels.fp8_linear import fp8_linear_many, reference_product
from kernels.int4 import Int4Format, Int4Rows, empty_int4
from kernels.linear import linear
from kernels.matrix import Matrix
from kernels.triton_fp8_few import launch_fp8_few
from kernels.triton_fp8_mid import MAX_ROWS, MidTile, launch_fp8_mid
from kernels.triton_int4 import launch_write_out
from kernels.triton_int4_mid import launch_int4_mid
from tests.benchmarks.report import Report, print_table

SITES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 2048)
CACHE_BYTES = 4 * 60e6
WRITTEN_BYTES = 32 * 1024**2  # of a weight that is written out in parts
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
INT4_FEW_TILES = tuple(
    triton_int4_few.FewTile(rows, warps, stages)
    for rows, warps, stages in (
        (16, 4, 3),
        (16, 8, 2),
        (16, 8, 3),
        (32, 2, 4),
        (32, 4, 2),
        (32, 4, 3),
        (32, 8, 2),
        (32, 8, 3),
        (64, 4, 2),
    )
)
# Warpgroups that share rows, parts of K.
INT4_WIDE_TILES = tuple((shares, splits) for shares in (1, 2, 4) for splits in (1, 2, 4))


@dataclass(frozen=True, slots=True)
class Data:
    """One copy of a linear and its input, in both types."""

    x: torch.Tensor  # [T, K]
    weight: torch.Tensor  # [N, K]
    quantised: Matrix
    rows: E4m3Rows | None = None  # of x in e4m3
    tinygemm: tuple[torch.Tensor, torch.Tensor] | None = None  # weight, scales and zeros

    @property
    def e4m3(self) -> tuple[E4m3Rows, E4m3Rows]:
        """The rows and the weight."""
        assert self.rows is not None
        assert isinstance(self.quantised, E4m3Rows)
        return self.rows, self.quantised

    @property
    def int4(self) -> Int4Rows:
        assert isinstance(self.quantised, Int4Rows)
        return self.quantised


Call = Callable[[Data], torch.Tensor]


def copies(height: int, width: int, num_rows: int, form: Int4Format | None) -> list[Data]:
    """Draws so many copies that the quantized weights of one have left the cache at its next turn.
    `form`: of 4 bits; None: FP8."""
    size = height * width if form is None else form.num_bytes(height, width)
    found = []
    for _ in range(max(2, int(CACHE_BYTES / size) + 1)):
        x = torch.randn(num_rows, width, device="cuda").bfloat16()
        weight = (torch.randn(height, width, device="cuda") * width**-0.5).bfloat16()
        if form is None:
            in_fp8 = empty_rows(height, width, weight.device)
            in_fp8.write_(weight)
            found.append(Data(x, weight, in_fp8, quantize_rows(x)))
            continue
        in_int4 = empty_int4(height, width, form, weight.device)
        in_int4.write_nearest_(weight)
        found.append(Data(x, weight, in_int4, tinygemm=_for_tinygemm(in_int4)))
    return found


def _for_tinygemm(rows: Int4Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Packs symmetric integers for torch's product; its scales are bfloat16."""
    integers = rows.integers()
    packed = (integers.q[:, ::2] << 4) | integers.q[:, 1::2]
    scales = integers.scales.T.contiguous().bfloat16()
    both = torch.stack((scales, torch.zeros_like(scales)), dim=2).contiguous()
    return torch.ops.aten._convert_weight_to_int4pack(packed.contiguous(), 8), both


def fp8_product(data: Data) -> torch.Tensor:
    rows, weight = data.e4m3
    if data.x.shape[0] <= FEW_ROWS:
        return launch_fp8_few(data.x, rows, weight, None)
    if data.x.shape[0] <= MAX_ROWS:
        return launch_fp8_mid(rows, weight, None, data.x.dtype)
    return scaled_mm(data)


def by_tile(data: Data, tile: MidTile) -> torch.Tensor:
    return launch_fp8_mid(*data.e4m3, None, data.x.dtype, tile)


def scaled_mm(data: Data, *, is_fast: bool = False) -> torch.Tensor:
    rows, weight = data.e4m3
    return torch._scaled_mm(
        rows.values,
        weight.values.T,
        scale_a=rows.scales[:, None],
        scale_b=weight.scales[None, :],
        out_dtype=torch.bfloat16,
        use_fast_accum=is_fast,
    )


def fp8_variants(num_rows: int, *, tiles: bool) -> Iterator[tuple[str, Call]]:
    yield "fp8", lambda data: linear(data.x, data.quantised, None)
    yield "fp8_product", fp8_product
    yield "scaled_mm", scaled_mm
    yield "scaled_mm_fast", partial(scaled_mm, is_fast=True)
    if num_rows <= FEW_ROWS:
        yield "fp8_of_many", lambda data: fp8_linear_many(data.x, data.e4m3[1], None)
    if tiles and num_rows <= MAX_ROWS:
        for tile in TILES:
            name = f"tile_{tile.block_n}x{tile.stages}x{tile.num_warps}x{tile.splits or 'auto'}"
            yield name, partial(by_tile, tile=tile)


def int4_variants(num_rows: int, *, tiles: bool) -> Iterator[tuple[str, Call]]:
    yield "int4", lambda data: linear(data.x, data.quantised, None)
    yield "write_out", write_out
    if num_rows > FEW_ROWS:
        yield "write_out_parts", write_out_parts
    yield "tinygemm", tinygemm
    few = num_rows <= FEW_ROWS
    if num_rows <= int4_linear.MAX_WIDE_ROWS:
        yield "triton", partial(_by_few_tile, tile=triton_int4_few.TILE) if few else _by_mid
    for tile in INT4_FEW_TILES if tiles and few else ():
        yield (
            f"tile_{tile.block_n}x{tile.num_warps}x{tile.stages}",
            partial(_by_few_tile, tile=tile),
        )
    if tiles and num_rows <= int4_linear.MAX_WIDE_ROWS:
        for shares, splits in INT4_WIDE_TILES:
            yield f"wide_{shares}x{splits}", partial(_by_wide_tile, shares=shares, splits=splits)


def write_out(data: Data) -> torch.Tensor:
    return functional.linear(data.x, launch_write_out(data.int4, data.x.dtype))


def write_out_parts(data: Data) -> torch.Tensor:
    """Writes out as many rows at a time as the second-level cache holds."""
    height, width = data.int4.shape
    y = data.x.new_empty((data.x.shape[0], height))
    step = WRITTEN_BYTES // (2 * width) // 128 * 128  # whole tiles
    for first in range(0, height, step):
        end = min(first + step, height)
        part = launch_write_out(data.int4, data.x.dtype, first, end)
        torch.mm(data.x, part.T, out=y[:, first:end])
    return y


def tinygemm(data: Data) -> torch.Tensor:
    assert data.tinygemm is not None
    packed, scales = data.tinygemm
    return torch.ops.aten._weight_int4pack_mm(data.x, packed, data.int4.group_size, scales)


def _by_few_tile(data: Data, tile: triton_int4_few.FewTile) -> torch.Tensor:
    return triton_int4_few.launch_int4_few(data.x, data.x, data.int4, None, tile)


def _by_mid(data: Data) -> torch.Tensor:
    return launch_int4_mid(data.x, data.int4, None)


def _by_wide_tile(data: Data, shares: int, splits: int) -> torch.Tensor:
    from kernels.gluon_int4_linear import WideTile, launch_int4_wide

    return launch_int4_wide(data.x, data.int4, None, WideTile(shares, splits))


def variants(scheme: str, num_rows: int, *, tiles: bool) -> Iterator[tuple[str, Call]]:
    yield "bf16", lambda data: linear(data.x, data.weight, None)
    own = fp8_variants if scheme == "fp8" else int4_variants
    yield from own(num_rows, tiles=tiles)


def expected(data: Data, variant: str) -> torch.Tensor:
    if variant == "bf16":
        return data.x.float() @ data.weight.float().T
    if isinstance(data.quantised, E4m3Rows):
        return reference_product(*data.e4m3, None, torch.float32)
    return data.x.float() @ data.int4.float().T


def capture(call: Call, all_data: Sequence[Data]) -> torch.cuda.CUDAGraph:
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


def floor_us(data: Data) -> float:
    """Returns the time of the bytes: those of rows in e4m3 are half of bfloat16's."""
    (num_rows, width), height = data.x.shape, data.weight.shape[0]
    in_size = 1 if isinstance(data.quantised, E4m3Rows) else 2
    num_bytes = data.quantised.nbytes + num_rows * (in_size * width + 2 * height)
    card = next((name for name in BYTES_A_US if name in torch.cuda.get_device_name()), "H100")
    return num_bytes / BYTES_A_US[card]


def measure(
    args: argparse.Namespace, report: Report, site: str, num_rows: int
) -> tuple[dict[str, float], float, bool]:
    """Returns the medians by variant, the floor, and whether each that ran is right."""
    form = None
    if args.scheme == "int4":
        form = Int4Format(args.group, torch.bfloat16, has_zeros=args.zeros)
    all_data = copies(*SITES[site], num_rows, form)
    first = all_data[0]
    graphs, errors = {}, {}
    for name, call in variants(args.scheme, num_rows, tiles=args.tiles):
        try:
            y, wanted = call(first).float(), expected(first, name)
            errors[name] = float((y - wanted).norm() / wanted.norm())
            graphs[name] = capture(call, all_data)
        except Exception as error:  # a variant that this device or version lacks
            report.emit(site=site, rows=num_rows, variant=name, error=str(error)[:300])
    floor = floor_us(first)
    medians = {}
    for name, times in times_us(graphs, len(all_data)).items():
        medians[name] = statistics.median(times)
        report.emit(
            site=site,
            rows=num_rows,
            variant=name,
            us=round(medians[name], 2),
            over_floor=round(medians[name] / floor, 2),
            error=f"{errors[name]:.1e}",
            ok=errors[name] < LARGEST_ERROR,
        )
    del all_data, graphs
    torch.cuda.empty_cache()
    return (
        medians,
        floor,
        all(error < LARGEST_ERROR for name, error in errors.items() if not name.endswith("_fast")),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--scheme", choices=["fp8", "int4"], required=True)
    parser.add_argument("--sites", default=",".join(SITES))
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--tiles", action="store_true", help="also other tiles of the kernels")
    parser.add_argument("--group", type=int, choices=[32, 64, 128], default=128, help="of 4 bits")
    parser.add_argument("--zeros", action="store_true", help="4 bits with zero points")
    parser.add_argument("--out", type=Path, help="file that gets every line, too")
    args = parser.parse_args()
    name = f"{args.scheme}_linear"
    report = Report(args.out)
    report.emit_machine(name, **({} if args.scheme == "fp8" else {"group": args.group}))
    torch.manual_seed(0)
    product = {"fp8": "fp8_product", "int4": "int4"}[args.scheme]
    library = {"fp8": "scaled_mm", "int4": "write_out"}[args.scheme]
    table, is_right = [], True
    for num_rows in map(int, args.rows.split(",")):
        sums: dict[str, float] = {}
        floor = 0.0
        for site in args.sites.split(","):
            medians, own_floor, is_ok = measure(args, report, site, num_rows)
            is_right &= is_ok
            floor += own_floor
            for variant, us in medians.items():
                sums[variant] = sums.get(variant, 0.0) + us
        ratio = sums["bf16"] / sums[args.scheme]
        report.emit(
            rows=num_rows,
            sites=args.sites,
            sum_us={variant: round(us, 1) for variant, us in sums.items()},
            over_floor=round(sums[product] / floor, 2),
            **{f"bf16_over_{args.scheme}": round(ratio, 3)},
        )
        shown = ("bf16", args.scheme, product, library)
        table.append((num_rows, *map(sums.get, shown), sums[product] / floor, ratio))
    units = ("bf16 us", f"{args.scheme} us", "product us", f"{library} us")
    print_table(("rows", *units, "product/floor", f"bf16/{args.scheme}"), table)
    report.emit(benchmark=name, **{"pass": is_right})


if __name__ == "__main__":
    main()

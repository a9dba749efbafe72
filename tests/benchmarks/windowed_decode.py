"""Decode attention in a window at a long context, beside full attention at the window's length: the
keys before a window should cost nothing.

The kernel: sequences of 32,768 keys that see 4,096, beside equal ones of 4,096 keys, in CUDA graphs
that are replayed in turns; for heads of Llama-3-8B and of Gemma 3 (head_dim 256). `--engine`: the
decode tokens/s of a Mistral-7B-shape base whose layers all have the window, at that context, beside
the same base without windows at the window's length, one engine each, in turns. The prompts are
computed before, and cached; the first round is apart.

    python -m tests.benchmarks.windowed_decode --out FILE [--engine] [--context 32768]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from engine.types import Request
from kernels.paged_plan import HeadShape
from tests.benchmarks.attention import Bench, Call, Case, Layer, replayed_us
from tests.benchmarks.cases import Case as Requests
from tests.benchmarks.our_engine import OurEngine, Settings, decode_rate
from tests.benchmarks.report import Report, print_table
from tests.benchmarks.shapes import SHAPES, ModelShape

HEADS = {
    "llama-3-8b": HeadShape(32, 8, 128),
    "gemma-3-4b": HeadShape(8, 4, 256),
    "gemma-3-12b": HeadShape(16, 8, 256),
}
MAX_RATIO = 1.1  # of the windowed time to the full one
CALLS_IN_GRAPH = 8
WARM_UPS = 4  # replays before those that count
BLOCK_SIZE = 16


def timer(calls: Sequence[Call], device: str) -> Callable[[], float]:
    """Returns a function that measures the microseconds of a call once: in a graph of all of them,
    or, on a CPU, one after the other."""
    in_turn = [calls[i % len(calls)] for i in range(CALLS_IN_GRAPH)]
    if device == "cpu":
        return lambda: _seconds(in_turn) * 1e6 / CALLS_IN_GRAPH
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in in_turn:
            call()

    # The default keeps the tensors of the calls, which the graph reads.
    def measure(_calls: Sequence[Call] = in_turn) -> float:
        return replayed_us(graph) / CALLS_IN_GRAPH

    return measure


def _seconds(calls: Sequence[Call]) -> float:
    began_s = time.perf_counter()
    for call in calls:
        call()
    return time.perf_counter() - began_s


def measure_kernel(args: argparse.Namespace, name: str, report: Report) -> float:
    """Emits the times of one kind of heads. Returns the ratio: the median over the replays."""
    shape, lengths = HEADS[name], {"windowed": args.context, "full": args.window}
    timers, bytes_read = {}, {}
    for variant, keys in lengths.items():
        layer = Layer(shape, args.window if variant == "windowed" else None)
        case = Case(f"{args.batch} x {keys}", [(1, keys)] * args.batch)
        # Room for two: calls of small caches rotate, and large ones exceed the L2 alone.
        tokens = 2 * args.batch * (keys + BLOCK_SIZE)
        calls = Bench(BLOCK_SIZE, layer, tokens, args.device).calls(case)
        timers[variant], bytes_read[variant] = timer(calls, args.device), case.bytes_read(layer)
    times_us: dict[str, list[float]] = {variant: [] for variant in timers}
    for number in range(args.replays + WARM_UPS):
        for variant in timers if number % 2 else tuple(reversed(timers)):
            times_us[variant].append(timers[variant]())
    pairs = zip(times_us["windowed"][WARM_UPS:], times_us["full"][WARM_UPS:], strict=True)
    ratio = round(statistics.median(windowed / full for windowed, full in pairs), 3)
    for variant, found in times_us.items():
        median_us = statistics.median(found[WARM_UPS:])
        report.emit(
            part="kernel",
            heads=[shape.num_heads, shape.num_kv_heads, shape.head_dim],
            model=name,
            variant=variant,
            batch=args.batch,
            keys=lengths[variant],
            window=args.window if variant == "windowed" else None,
            us=round(median_us, 2),
            tb_per_s=round(bytes_read[variant] / median_us / 1e6, 3),
        )
    report.emit(part="kernel_ratio", model=name, windowed_to_full=ratio)
    return ratio


def make_shapes(args: argparse.Namespace) -> dict[str, tuple[ModelShape, int]]:
    """Returns the base and the context of each engine."""
    shape = SHAPES[args.shape]
    more = {**shape.more, "sliding_window": args.window}
    windowed = replace(shape, name=f"{args.shape}-windowed", more=more)
    full = replace(shape, name=f"{args.shape}-full", more={**shape.more, "sliding_window": None})
    if shape.architecture != "MistralForCausalLM":
        raise SystemExit(f"--shape is {args.shape}; a window needs a MistralForCausalLM")
    return {"windowed": (windowed, args.context), "full": (full, args.window)}


def open_engine(args: argparse.Namespace, shape: ModelShape, context: int) -> OurEngine:
    settings = Settings(
        replace(shape, max_len=max(shape.max_len, context)),
        args.work / shape.name,
        device=args.device,
        max_num_seqs=args.sequences,
        num_blocks=args.sequences * (context // BLOCK_SIZE + 2),
        enable_prefix_caching=True,
        others={"max_model_len": context},
    )
    return OurEngine(settings, "off")


def make_requests(
    args: argparse.Namespace, ours: OurEngine, context: int, output: int
) -> list[Request]:
    """Returns requests with the same prompts at every call."""
    case = Requests("off", args.sequences, 0, prompt=context - args.output)
    return [ours.request(prompt, output, None) for prompt in ours.prompts(case, 0)]


async def measure_engines(args: argparse.Namespace, report: Report) -> float:
    """Emits the rates of both engines. Returns the ratio of the times of a token, windowed to full:
    the median over the rounds."""
    gc.collect()
    if args.device == "cuda":
        torch.cuda.empty_cache()  # of the kernels' caches
    engines = {
        variant: (open_engine(args, shape, context), context)
        for variant, (shape, context) in make_shapes(args).items()
    }
    rates: dict[str, list[float]] = {variant: [] for variant in engines}
    cached: dict[str, int] = {}
    for variant, (ours, context) in engines.items():
        began_s = time.perf_counter()
        await ours.send(make_requests(args, ours, context, 1))
        report.emit(
            part="prompts", variant=variant, seconds=round(time.perf_counter() - began_s, 2)
        )
    for _ in range(args.rounds + 1):
        for variant, (ours, context) in engines.items():
            before = ours.engine.load().prefix_hits
            _, timeline = await ours.send(make_requests(args, ours, context, args.output))
            rates[variant].append(decode_rate(timeline.times_s.values()))
            cached[variant] = ours.engine.load().prefix_hits - before
    for variant, (ours, context) in engines.items():
        report.emit(
            part="engine",
            shape=args.shape,
            variant=variant,
            sequences=args.sequences,
            context=context,
            window=args.window if variant == "windowed" else None,
            decode_tokens_per_s=round(statistics.median(rates[variant][1:]), 1),
            rounds=[round(rate, 1) for rate in rates[variant][1:]],
            first_round=round(rates[variant][0], 1),
            cached_tokens_of_last_round=cached[variant],
            late_compilations=ours.engine.load().num_late_compilations,
        )
        ours.close()
    pairs = zip(rates["full"][1:], rates["windowed"][1:], strict=True)
    ratio = round(statistics.median(full / windowed for full, windowed in pairs), 3)
    report.emit(part="engine_ratio", shape=args.shape, windowed_to_full=ratio)
    return ratio


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="file that gets every line, too")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--context", type=int, default=32768, help="keys of a windowed sequence")
    parser.add_argument("--window", type=int, default=4096, help="also the keys of a full one")
    parser.add_argument("--batch", type=int, default=32, help="sequences of the kernel's launch")
    parser.add_argument("--replays", type=int, default=40)
    parser.add_argument("--heads", choices=HEADS, nargs="*", default=list(HEADS))
    parser.add_argument("--engine", action="store_true", help="engines, too: 70 GB of memory")
    parser.add_argument("--shape", choices=SHAPES, default="mistral-7b", help="of the engines")
    parser.add_argument("--sequences", type=int, default=8, help="of the engines, at once")
    parser.add_argument("--output", type=int, default=128, help="tokens, the context's last ones")
    parser.add_argument("--rounds", type=int, default=5, help="of the engines, after the first one")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "windowed")
    return parser.parse_args(arguments)


def main_of(args: argparse.Namespace, report: Report) -> bool:
    ratios = {f"kernel {name}": measure_kernel(args, name, report) for name in args.heads}
    if args.engine:
        ratios[f"engine {args.shape}"] = asyncio.run(measure_engines(args, report))
    print_table(("windowed to full", "ratio of times"), list(ratios.items()))
    passed = all(ratio <= MAX_RATIO for ratio in ratios.values())
    report.emit(benchmark="windowed_decode", most=MAX_RATIO, ratios=ratios, **{"pass": passed})
    return passed


def main() -> None:
    args = parse_args()
    report = Report(args.out)
    report.emit_machine("windowed_decode", arguments=sys.argv[1:])
    sys.exit(0 if main_of(args, report) else 1)


if __name__ == "__main__":
    main()

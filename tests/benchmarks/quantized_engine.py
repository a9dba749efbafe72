"""Offline throughput of our engine with quantized linears, keys and values or adapters, beside the
same engine in bfloat16.

Both engines are open at once and run each case in turns, so that a clock that moves moves both; the
workload is that of `engine`: prompts of 256 random tokens, 128 tokens out, greedy, all requests at
once, with 0 and up to 32 distinct adapters of rank 16. `--scheme fp8` quantises in FP8, `int4` has
a GPTQ base, symmetric in groups of 128; `kv-fp8` is bfloat16 with `kv_cache_dtype: fp8`, of which
long prompts have the most; `lora-int8` is an FP8 base with adapters in int8 beside one with
adapters in bfloat16. vLLM with the same, where its packages are, runs before in
a process of its own.

    python -m tests.benchmarks.quantized_engine --scheme kv-fp8 --out FILE [--vllm SITE_PACKAGES]
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from engine.config import EngineConfig
from tests.benchmarks.cases import Case, cases_as_json
from tests.benchmarks.children import module, relay_vllm
from tests.benchmarks.our_engine import OurEngine, Run, Settings, figures, relative_rate, to_base
from tests.benchmarks.report import Report, print_table
from tests.benchmarks.shapes import SHAPES, in_gptq

WARM_UP_TOKENS = 8
MOST_DISTINCT = 32
HOST_BYTES = 8 * 1024**3
# Of the device: both at once, each with room for 256 requests.
MEMORY = {"bf16": 0.42, "fp8": 0.32, "int4": 0.3, "kv-fp8": 0.42, "lora-int8": 0.32}
PLAIN = {"lora-int8": "fp8"}  # the other side, where it is not bfloat16
Sides = dict[str, OurEngine]


def cases_of(args: argparse.Namespace) -> list[tuple[Case, ...]]:
    """Returns the cases of equal requests, the base first."""
    groups: list[tuple[Case, ...]] = []
    for count in map(int, args.requests.split(",")):
        distinct = min(count, MOST_DISTINCT)
        base = Case("small", count, 0, prompt=args.prompt, output=args.output)
        groups.append((base, replace(base, distinct=distinct)))
    return groups


async def run_ours(args: argparse.Namespace, report: Report) -> list[tuple[object, ...]]:
    sides: Sides = {}
    for side in (PLAIN.get(args.scheme, "bf16"), args.scheme):
        shape = SHAPES[args.shape]
        settings = Settings(
            in_gptq(shape) if side == "int4" else shape,
            args.work / f"{args.shape}-{side}",
            device=args.device,
            memory_fraction=MEMORY[side],
            max_num_batched_tokens=args.batched_tokens,
            num_blocks=None if args.device == "cuda" else 512,
            others={
                "quantization": _quantization(side),
                "lora_dtype": "int8" if side == "lora-int8" else "auto",
                "kv_cache_dtype": "fp8" if side == "kv-fp8" else "auto",
                "adapter_host_bytes": HOST_BYTES,
                "max_decode_slowdown": args.max_decode_slowdown,
            },
        )
        ours = sides[side] = OurEngine(settings, "small")
        report.emit(
            side=side,
            shape=args.shape,
            start_s=round(ours.start_s, 2),
            num_blocks=ours.engine.load().num_blocks,
        )
    rows: list[tuple[object, ...]] = []
    for group in cases_of(args):
        rows += await _measure(args, sides, group, report)
    for ours in sides.values():
        ours.close()
    return rows


async def _measure(
    args: argparse.Namespace, sides: Sides, group: Sequence[Case], report: Report
) -> list[tuple[object, ...]]:
    """Runs the cases of a group on both sides in turns. Returns the rows of the table."""
    runs: dict[tuple[str, str], list[Run]] = {}
    for case in group:
        for side, ours in sides.items():
            await ours.load_adapters(case.adapters)
            await ours.warm_up(case, min(WARM_UP_TOKENS, case.output))
            runs[side, case.name] = []
    for number in range(args.repeats):
        for case in group:
            for side, ours in sides.items():
                runs[side, case.name].append(await ours.run(case, salt=number))
    rows: list[tuple[object, ...]] = []
    for case in group:
        rates: list[float] = []
        for side in sides:
            own, base = runs[side, case.name], runs[side, group[0].name]
            line = figures(case, own) | (to_base(own, base) if case.distinct else {})
            report.emit(side=side, shape=args.shape, case=case.name, **line)
            rates.append(float(str(line["output_tokens_per_s"])))
        plain_side = PLAIN.get(args.scheme, "bf16")
        ratio = relative_rate(runs[args.scheme, case.name], runs[plain_side, case.name])
        report.emit(case=case.name, **{f"{args.scheme}_to_{plain_side}": round(ratio, 3)})
        rows.append((case.name, *rates, ratio))
    return rows


def _quantization(side: str) -> str:
    return "fp8" if side in ("fp8", "lora-int8") else "int4" if side == "int4" else "none"


def run_vllm(args: argparse.Namespace, report: Report) -> None:
    cases = [case for group in cases_of(args) for case in group]
    method = "gptq" if args.scheme == "int4" else args.scheme
    command = module("vllm_engine", "--shape", args.shape, "--lora", "1", "--quantization", method)
    command += ["--cases", cases_as_json(cases), "--repeats", str(args.repeats)]
    command += ["--work", str(args.work)]
    relay_vllm(command, report, args.vllm, args.work, args.vllm_timeout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--scheme", choices=["fp8", "int4", "kv-fp8", "lora-int8"], required=True)
    parser.add_argument("--out", type=Path, help="file that gets every line, too")
    parser.add_argument("--shape", choices=SHAPES, default="llama-3-8b")
    parser.add_argument("--requests", default="1,32,256", help="numbers of requests, by comma")
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--output", type=int, default=128, help="tokens")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--max-decode-slowdown",
        type=float,
        default=EngineConfig("", "").max_decode_slowdown,
    )
    parser.add_argument("--batched-tokens", type=int, default=8192)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--vllm", metavar="SITE_PACKAGES", help="folder that holds vLLM")
    parser.add_argument("--vllm-timeout", type=float, default=330.0, help="seconds")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "engine-bench")
    args = parser.parse_args()
    args.work = args.work.resolve()
    report = Report(args.out)
    report.emit_machine(f"{args.scheme}_engine")
    if args.vllm:
        run_vllm(args, report)
    rows = asyncio.run(run_ours(args, report))
    plain = PLAIN.get(args.scheme, "bf16")
    units = (f"{plain} tok/s", f"{args.scheme} tok/s", f"{args.scheme}/{plain}")
    print_table(("case", *units), rows)


if __name__ == "__main__":
    main()

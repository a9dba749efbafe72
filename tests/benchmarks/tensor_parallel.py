"""Offline throughput of our engine over several ranks, beside the same engine of one, and vLLM's.

The engines are open at once and run each case in turns, so that a clock that moves moves all; with
`--apart` one after another, for bases of which two do not fit. vLLM, where its packages are, runs
first over the most ranks, in a process of its own. The workload is that of `engine`:
prompts of 256 random tokens, 128 tokens out, greedy, all requests at once, with each number of
distinct adapters of rank 16. `--exchange` measures the exchanges alone, by size and way, in CUDA
graphs of several; and those of rows with the norm that follows, in one kernel and in two.

    python -m tests.benchmarks.tensor_parallel --out FILE [--ranks 1,2] [--requests 1,32,256]
        [--distinct 0,32] [--shape NAME] [--quantization fp8] [--vllm SITE_PACKAGES]
    python -m tests.benchmarks.tensor_parallel --exchange --out FILE
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from engine.step_cost import StepCost
from tests.benchmarks.cases import Case, cases_as_json
from tests.benchmarks.children import module, relay_vllm
from tests.benchmarks.exchange_times import time_exchanges, time_norms
from tests.benchmarks.our_engine import OurEngine, Run, Settings, figures, relative_rate
from tests.benchmarks.report import Report, print_table
from tests.benchmarks.shapes import SHAPES
from tests.rank_processes import on_processes

WARM_UP_TOKENS = 8
HOST_BYTES = 8 * 1024**3


def cases_of(args: argparse.Namespace) -> list[Case]:
    numbers = [int(one) for one in args.distinct.split(",")]
    cases: dict[str, Case] = {}
    for count in map(int, args.requests.split(",")):
        for distinct in numbers:
            case = Case(
                "small", count, min(count, distinct), prompt=args.prompt, output=args.output
            )
            cases[case.name] = case
    return list(cases.values())


def open_side(args: argparse.Namespace, size: int, report: Report) -> OurEngine:
    is_cuda = args.device == "cuda"
    settings = Settings(
        SHAPES[args.shape],
        args.work / f"{args.shape}-{size}-ranks",
        device=args.device,
        memory_fraction=args.memory,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.batched_tokens,
        num_blocks=None if is_cuda else 512,
        others={
            "tensor_parallel_size": size,
            "adapter_host_bytes": args.host_bytes,
            "num_threads": None if is_cuda else 1,
            "quantization": args.quantization,
            "lora_dtype": args.lora_dtype,
            "kv_cache_dtype": args.kv_cache_dtype,
        },
    )
    ours = OurEngine(settings, "small")
    report.emit(
        ranks=size,
        shape=args.shape,
        quantization=args.quantization,
        lora_dtype=args.lora_dtype,
        kv_cache_dtype=args.kv_cache_dtype,
        start_s=round(ours.start_s, 2),
        num_blocks=ours.engine.load().num_blocks,
    )
    return ours


def run_vllm(args: argparse.Namespace, report: Report) -> dict[str, float]:
    """Returns the output tokens/s of vLLM over the most ranks, by case. Its LoRA is switched on if
    a case has adapters, which changes nothing for those without."""
    cases = cases_of(args)
    ranks = max(int(one) for one in args.ranks.split(","))
    has_lora = any(case.distinct for case in cases)
    command = module("vllm_engine", "--shape", args.shape, "--ranks", str(ranks))
    command += ["--lora", str(int(has_lora)), "--cases", cases_as_json(cases)]
    command += ["--repeats", str(args.repeats), "--work", str(args.work), "--memory", "0.85"]
    if args.quantization != "none":
        command += ["--quantization", args.quantization]
    lines = relay_vllm(command, report, args.vllm, args.work, args.vllm_timeout)
    return {
        str(line["case"]): float(str(line["output_tokens_per_s"]))
        for line in lines
        if "case" in line
    }


async def run_engines(
    args: argparse.Namespace, theirs: dict[str, float], report: Report
) -> list[tuple[object, ...]]:
    """Returns the rows of the table. `theirs`: output tokens/s of vLLM by case."""
    sizes = [int(one) for one in args.ranks.split(",")]
    cases = cases_of(args)
    runs: dict[tuple[int, str], list[Run]] = {}
    for group in [[size] for size in sizes] if args.apart else [sizes]:
        sides = {size: open_side(args, size, report) for size in group}
        for case in cases:
            for size, ours in sides.items():
                await ours.load_adapters(case.adapters)
                await ours.warm_up(case, min(WARM_UP_TOKENS, case.output))
                runs[size, case.name] = []
            for number in range(args.repeats):
                for size, ours in sides.items():
                    with observed_steps() as steps:
                        runs[size, case.name].append(await ours.run(case, salt=number))
                    if args.steps:
                        report.emit(ranks=size, case=case.name, run=number, steps=steps)
            for size in sides:
                line = figures(case, runs[size, case.name])
                report.emit(ranks=size, shape=args.shape, case=case.name, clocks=clocks(), **line)
        for ours in sides.values():
            ours.close()
    return [_compared(sizes, case, runs, theirs.get(case.name), report) for case in cases]


@contextmanager
def observed_steps() -> Iterator[list[tuple[int, int, float]]]:
    """Yields the list to which the cost models of this process add each step: prompt tokens,
    decoding sequences, milliseconds."""
    steps: list[tuple[int, int, float]] = []
    observe = StepCost.observe

    def observe_too(self: StepCost, num_prompt: int, num_decoding: int, seconds: float) -> None:
        steps.append((num_prompt, num_decoding, round(1e3 * seconds, 3)))
        observe(self, num_prompt, num_decoding, seconds)

    StepCost.observe = observe_too  # type: ignore[method-assign]
    try:
        yield steps
    finally:
        StepCost.observe = observe  # type: ignore[method-assign]


def _compared(
    sizes: Sequence[int],
    case: Case,
    runs: dict[tuple[int, str], list[Run]],
    their_rate: float | None,
    report: Report,
) -> tuple[object, ...]:
    first, rates, ratios = runs[sizes[0], case.name], [], []
    for size in sizes:
        own = runs[size, case.name]
        rates.append(case.output_tokens / statistics.median(run.seconds for run in own))
        ratios.append(relative_rate(own, first))
    named = {f"{size}_ranks": round(ratio, 3) for size, ratio in zip(sizes, ratios, strict=True)}
    most = sizes.index(max(sizes))
    to_vllm = None if their_rate is None else round(rates[most] / their_rate, 3)
    base = runs.get((sizes[most], replace(case, distinct=0).name))
    to_base = None
    if case.distinct and base is not None:
        to_base = round(relative_rate(runs[sizes[most], case.name], base), 3)
    report.emit(
        case=case.name,
        faster_than=f"{sizes[0]}_ranks",
        **named,
        to_own_base=to_base,
        to_vllm=to_vllm,
    )
    return (case.name, *rates, *ratios[1:], their_rate or "", to_vllm or "")


def clocks() -> list[str]:
    """Returns the clock of each GPU's multiprocessors now; none without NVIDIA's tool."""
    command = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader"]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=10
        ).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []


def run_exchanges(args: argparse.Namespace, report: Report) -> None:
    for size in map(int, args.ranks.split(",")):
        if size == 1:
            continue
        lines = on_processes(size, time_exchanges, args.device == "cuda", timeout_s=90.0)[0]
        for line in lines:
            report.emit(ranks=size, exchange="sum", clocks=clocks(), us=line)
        header = tuple(lines[0])
        print_table(header, [tuple(line[key] for key in header) for line in lines])
        if args.device == "cuda":
            lines = on_processes(size, time_norms, timeout_s=120.0)[0]
            for line in lines:
                report.emit(ranks=size, exchange="sum and norm", clocks=clocks(), us=line)
            header = tuple(lines[0])
            print_table(header, [tuple(line.get(key, "") for key in header) for line in lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="file that gets every line, too")
    parser.add_argument("--shape", choices=SHAPES, default="llama-3-8b")
    parser.add_argument("--ranks", default="1,2", help="numbers of ranks, by comma")
    parser.add_argument("--requests", default="1,32,256", help="numbers of requests, by comma")
    parser.add_argument("--distinct", default="0,32", help="numbers of adapters, by comma")
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--output", type=int, default=128, help="tokens")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batched-tokens", type=int, default=8192)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--memory", type=float, default=0.42, help="share of each engine")
    parser.add_argument("--host-bytes", type=int, default=HOST_BYTES, help="of adapters")
    parser.add_argument("--quantization", choices=["none", "fp8"], default="none")
    parser.add_argument("--lora-dtype", choices=["auto", "int8"], default="auto")
    parser.add_argument("--kv-cache-dtype", choices=["auto", "fp8"], default="auto")
    parser.add_argument("--vllm", metavar="SITE_PACKAGES", help="folder that holds vLLM")
    parser.add_argument("--vllm-timeout", type=float, default=400.0, help="seconds")
    parser.add_argument("--apart", action="store_true", help="one engine after the other")
    parser.add_argument("--steps", action="store_true", help="a line with the steps of each run")
    parser.add_argument("--exchange", action="store_true", help="the exchanges alone")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "engine-bench")
    args = parser.parse_args()
    args.work = args.work.resolve()
    report = Report(args.out)
    report.emit_machine("tensor_parallel")
    if args.exchange:
        run_exchanges(args, report)
        return
    theirs = run_vllm(args, report) if args.vllm else {}
    rows = asyncio.run(run_engines(args, theirs, report))
    sizes = args.ranks.split(",")
    rates = (f"{size} ranks tok/s" for size in sizes)
    print_table(
        ("case", *rates, *(f"{size}/{sizes[0]}" for size in sizes[1:]), "vLLM tok/s", "to vLLM"),
        rows,
    )


if __name__ == "__main__":
    main()

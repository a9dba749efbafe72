"""Offline throughput of our engine, with and without adapters, beside vLLM on the same GPU.

Prompts of 256 random tokens, 128 tokens out, greedy, all requests at once; median of up to three
runs after a warm-up. Ours is the engine with its own loop and no server; vLLM, where its packages
are, runs first in processes of its own and leaves. Every case is a line as soon as it is measured;
the table at the end, with its ratios, counts all lines of the `--out` file: a run can be split.

    python -m tests.benchmarks.engine --out FILE [--vllm SITE_PACKAGES] [--cases 'off-*,on-r16*']
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tests.benchmarks.arrival import measure_arrivals
from tests.benchmarks.cases import Case, EngineKind, select, standard_cases, tiny
from tests.benchmarks.children import module, relay
from tests.benchmarks.our_engine import OurEngine, Settings, figures
from tests.benchmarks.report import Report, print_table
from tests.benchmarks.shapes import SHAPES

KINDS: tuple[EngineKind, ...] = ("off", "on", "small")
WARM_UP_TOKENS = 8
VLLM_ENVIRONMENT = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it would be compiled at the first request
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}


def run_vllm(args: argparse.Namespace, cases: Sequence[Case], report: Report) -> None:
    """One process an engine: without LoRA, with it, and with it for a higher rank."""
    groups: dict[tuple[int, int], list[Case]] = {}
    for case in cases:
        if case.engine != "small":  # vLLM's own 32 slots are in the others
            lora = case.engine == "on" or args.vllm_one_engine
            rank = case.rank if case.engine == "on" else 16
            groups.setdefault((int(lora), rank), []).append(case)
    for (lora, rank), group in groups.items():
        if rank > 16 and not args.vllm_rank64:
            continue
        command = module("vllm_engine", "--shape", args.shape)
        command += ["--lora", str(lora), "--max-rank", str(rank)]
        command += ["--cases", ",".join(case.name for case in group)]
        command += ["--repeats", str(args.repeats), "--work", str(args.work)]
        command += ["--seconds-per-case", str(args.seconds_per_case)]
        environment = VLLM_ENVIRONMENT | os.environ | {"PYTHONPATH": args.vllm}
        relay(
            command,
            report,
            timeout_s=args.vllm_timeout,
            environment=environment,
            folder=_folder_of_tests(args.work / "beside-vllm"),
        )


def _folder_of_tests(folder: Path) -> Path:
    """Where `tests` can be imported and none of our rooms: a library that theirs uses looks for a
    package called `kernels` and would find ours."""
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "tests"
    if not link.is_symlink():
        link.symlink_to(Path(__file__).parents[1])
    return folder


async def run_ours(
    args: argparse.Namespace, settings: Settings, cases: Sequence[Case], report: Report
) -> None:
    for kind in KINDS:
        group = [case for case in cases if case.engine == kind]
        wants_arrival = kind == "on" and args.arrivals > 0
        if not group and not wants_arrival:
            continue
        ours = OurEngine(settings, kind)
        report.emit(
            side="ours",
            shape=args.shape,
            engine=kind,
            start_s=round(ours.start_s, 2),
            adapter_pages=ours.num_pages,
            num_blocks=ours.engine.load().num_blocks,
        )
        for case in group:
            try:
                report.emit(**await _measure(args, ours, case))
            except (RuntimeError, TimeoutError, AssertionError) as error:
                report.emit(side="ours", shape=args.shape, case=case.name, error=repr(error))
        if wants_arrival:
            result = await measure_arrivals(ours, args.arrivals, is_tiny=args.tiny)
            report.emit(side="ours", shape=args.shape, case="arrival", **result)
        ours.close()


async def _measure(args: argparse.Namespace, ours: OurEngine, case: Case) -> dict[str, object]:
    small = tiny(case) if args.tiny else case
    load_s = await ours.load_adapters(small)
    await ours.run(small, salt=-1, output=min(WARM_UP_TOKENS, small.output))
    runs = [await ours.run(small, salt=0)]
    while len(runs) < args.repeats and sum(r.seconds for r in runs) < args.seconds_per_case:
        runs.append(await ours.run(small, salt=len(runs)))
    line = {"side": "ours", "shape": args.shape, "case": case.name} | figures(small, runs)
    return line | ({"load_adapters_s": round(load_s, 2)} if case.distinct else {})


def summarise(report: Report, shape: str) -> None:
    """The newest figure of each side and case; ratios to vLLM and to our own base."""
    rates: dict[str, dict[str, float]] = {"ours": {}, "vllm": {}}
    for line in report.lines():
        rate = line.get("output_tokens_per_s")
        if line.get("shape") == shape and "case" in line and isinstance(rate, float):
            rates[str(line["side"])][str(line["case"])] = rate
    rows, ratios = [], []
    for case in standard_cases():
        ours, theirs = rates["ours"].get(case.name), rates["vllm"].get(case.name)
        base = rates["ours"].get(replace(case, engine="off", distinct=0, rank=16).name)
        if case.engine == "small":
            base = rates["ours"].get(replace(case, engine="on").name)
        if case.output == 1:
            base = rates["ours"].get(replace(case, distinct=0).name)
        to_vllm = round(ours / theirs, 3) if ours and theirs else None
        to_base = round(ours / base, 3) if ours and base else None
        if ours or theirs:
            rows.append((case.name, ours, theirs, to_vllm, to_base))
            ratios.append(
                {"case": case.name, "ours": ours, "vllm": theirs}
                | {"ours_to_vllm": to_vllm, "ours_to_own_base": to_base}
            )
    report.emit(benchmark="engine", shape=shape, ratios=ratios)
    print_table(("case", "ours tok/s", "vllm tok/s", "ours/vllm", "ours/own base"), rows)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="file that gets every line, too")
    parser.add_argument("--shape", choices=SHAPES, default="llama-3-8b")
    parser.add_argument("--cases", default="*", help="shell patterns of case names, by comma")
    parser.add_argument("--list", action="store_true", help="show the cases' names and leave")
    parser.add_argument("--vllm", metavar="SITE_PACKAGES", help="folder that holds vLLM")
    parser.add_argument("--vllm-rank64", action="store_true", help="a third engine of theirs")
    parser.add_argument(
        "--vllm-one-engine",
        action="store_true",
        help="theirs with LoRA switched on also where it is not used: a start less, the same rates",
    )
    parser.add_argument("--vllm-timeout", type=float, default=330.0, help="seconds a process")
    parser.add_argument("--no-ours", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds-per-case", type=float, default=6.0, help="then no more runs")
    parser.add_argument(
        "--arrivals", type=int, default=0, help="adapters that come while others run"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--batched-tokens", type=int, default=8192)
    parser.add_argument("--memory", type=float, default=0.8, help="ours: share of the device")
    parser.add_argument("--prefix-caching", action="store_true", help="on, as a server has it")
    parser.add_argument("--eager", action="store_true", help="ours without CUDA graphs")
    parser.add_argument("--no-piecewise", action="store_true", help="prompts without CUDA graphs")
    parser.add_argument("--tiny", action="store_true", help="few short requests: a trial")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "engine-bench")
    args = parser.parse_args()
    args.work = args.work.resolve()  # a child has another working folder
    return args


def main() -> None:
    args = parse_args()
    cases = select(standard_cases(), args.cases) if args.cases else ()
    if args.list:
        sys.stdout.write("\n".join(case.name for case in cases) + "\n")
        return
    report = Report(args.out)
    report.emit_machine("engine", arguments=sys.argv[1:])
    if args.vllm:
        run_vllm(args, cases, report)
    if not args.no_ours:
        settings = Settings(
            SHAPES[args.shape],
            args.work / args.shape,
            device=args.device,
            max_num_batched_tokens=args.batched_tokens,
            memory_fraction=args.memory,
            enable_prefix_caching=args.prefix_caching,
            enforce_eager=args.eager,
            piecewise_graphs=not args.no_piecewise,
        )
        asyncio.run(run_ours(args, settings, cases, report))
    summarise(report, args.shape)


if __name__ == "__main__":
    main()

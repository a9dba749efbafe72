"""Offline throughput of our engine, with and without adapters, beside vLLM on the same GPU.

Prompts of 256 random tokens, 128 tokens out, greedy, all requests at once. The cases of equal
requests run in turns, the base first: the ratio to the own base is the median over the rounds, so
that a clock that moves moves both sides. Ours is the engine with its own loop and no server; vLLM,
where its packages are, runs first in processes of its own and leaves. Every case is a line as soon
as it is measured; the table at the end counts all lines of the `--out` file: a run can be split.

    python -m tests.benchmarks.engine --out FILE [--set cost] [--cases 'off-*,on-r16*']
    python -m tests.benchmarks.engine --set shape --shape phi-4 [--vllm SITE_PACKAGES]
    python -m tests.benchmarks.engine --rank 8 --targets q_proj,v_proj --distinct 32 --requests 32
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from engine.config import EngineConfig
from tests.benchmarks.arrival import measure_arrivals
from tests.benchmarks.cases import (
    CASE_SETS,
    Case,
    EngineKind,
    cases_as_json,
    groups_of,
    select,
    tiny,
)
from tests.benchmarks.children import module, relay_vllm
from tests.benchmarks.our_engine import (
    OurEngine,
    PoolCost,
    Run,
    Settings,
    figures,
    to_base,
)
from tests.benchmarks.report import Report, print_table
from tests.benchmarks.shapes import LINEARS, SHAPES, targets_argument

KINDS: tuple[EngineKind, ...] = ("off", "on", "small")
WARM_UP_TOKENS = 8
# Of the pool for `--set shape`, where a base of 24B leaves less room on 80 GB: its 32 adapters.
SHAPE_PAGES = 40


def run_vllm(args: argparse.Namespace, cases: Sequence[Case], report: Report) -> None:
    """Runs one process for each engine: without LoRA, with it, and with it for higher ranks."""
    groups: dict[tuple[int, int], list[Case]] = {}
    for case in cases:
        if case.engine != "small":  # vLLM's own 32 slots are in the others
            lora = case.engine == "on" or args.vllm_one_engine
            rank = max(16, case.max_rank) if case.engine == "on" else 16
            groups.setdefault((int(lora), rank), []).append(case)
    for (lora, rank), group in groups.items():
        if rank > 16 and not args.vllm_rank64:
            continue
        command = module("vllm_engine", "--shape", args.shape)
        command += ["--lora", str(lora), "--max-rank", str(rank)]
        command += ["--cases", cases_as_json(group)]
        command += ["--repeats", str(args.repeats), "--work", str(args.work)]
        command += ["--seconds-per-case", str(args.seconds_per_case)]
        command += ["--memory", str(args.memory)]
        relay_vllm(command, report, args.vllm, args.work, args.vllm_timeout)


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
            adapter_pages=settings.pages(kind),
            adapter_pool_bytes=ours.config.adapter_pool_bytes,
            num_blocks=ours.engine.load().num_blocks,
        )
        for cases_in_turns in groups_of(group):
            await _measure(args, ours, cases_in_turns, report)
        if wants_arrival:
            result = await measure_arrivals(ours, args.arrivals, is_tiny=args.tiny)
            report.emit(side="ours", shape=args.shape, case="arrival", **result)
        ours.close()


async def _measure(
    args: argparse.Namespace, ours: OurEngine, group: Sequence[Case], report: Report
) -> None:
    """Measures cases of equal requests in turns; the first is their base. A case that fails is a
    line with its error, and the others go on."""
    shown: dict[str, dict[str, object]] = {}
    runs: dict[str, list[Run]] = {}
    cases = {case.name: tiny(case) if args.tiny else case for case in group}
    await ours.unload_adapters()

    def fail(name: str, error: Exception) -> None:
        report.emit(side="ours", shape=args.shape, case=name, error=repr(error))
        runs.pop(name, None)

    for name, case in cases.items():
        try:
            load_s = await ours.load_adapters(case.adapters)
            cost = await ours.warm_up(case, min(WARM_UP_TOKENS, case.output))
        except (RuntimeError, TimeoutError, AssertionError) as error:
            fail(name, error)
            continue
        runs[name] = []
        shown[name] = _cost_fields(case, cost, load_s)
    began_s = time.perf_counter()
    limit_s = args.seconds_per_case * len(group)
    for number in range(args.repeats):
        if number and time.perf_counter() - began_s > limit_s:
            break
        for name in tuple(runs):
            try:
                runs[name].append(await ours.run(cases[name], salt=number))
            except (RuntimeError, TimeoutError, AssertionError) as error:
                fail(name, error)
    base_runs = runs.get(group[0].name, [])
    for name, of_case in runs.items():
        line = figures(cases[name], of_case) | shown[name]
        if cases[name].distinct and base_runs:
            line |= to_base(of_case, base_runs)
        report.emit(side="ours", shape=args.shape, case=name, **line)


def _cost_fields(case: Case, cost: PoolCost, load_s: float) -> dict[str, object]:
    if not case.distinct:
        return {}
    fields: dict[str, object] = {"load_adapters_s": round(load_s, 2)}
    if cost.ratio is not None and cost.num_adapters:
        fields |= {
            "new_adapters": cost.num_adapters,
            "pool_bytes": cost.pool_bytes,
            "tensor_bytes": cost.tensor_bytes,
            "pool_to_tensor_bytes": round(cost.ratio, 3),
        }
    return fields


def summarise(report: Report, shape: str) -> None:
    """Prints the newest figure of each side and case, with the ratios to vLLM and to the base of
    the same run."""
    newest: dict[str, dict[str, dict[str, object]]] = {}
    for line in report.lines():
        if line.get("shape") == shape and "output_tokens_per_s" in line and "case" in line:
            newest.setdefault(str(line["case"]), {})[str(line["side"])] = line
    rows, ratios = [], []
    for name, sides in newest.items():
        ours, theirs = sides.get("ours", {}), sides.get("vllm", {})
        rate, their_rate = ours.get("output_tokens_per_s"), theirs.get("output_tokens_per_s")
        to_vllm = None
        if isinstance(rate, float) and isinstance(their_rate, float):
            to_vllm = round(rate / their_rate, 3)
        line = {
            "case": name,
            "ours": rate,
            "vllm": their_rate,
            "ours_to_vllm": to_vllm,
            "ours_to_own_base": ours.get("to_base"),
            "vllm_to_own_base": theirs.get("to_base"),
            "pool_to_tensor_bytes": ours.get("pool_to_tensor_bytes"),
        }
        rows.append(tuple(line.values()))
        ratios.append(line)
    report.emit(benchmark="engine", shape=shape, ratios=ratios)
    header = ("case", "ours tok/s", "vllm tok/s", "ours/vllm", "ours/base", "vllm/base", "pool/B")
    print_table(header, rows)


def chosen_cases(args: argparse.Namespace) -> tuple[Case, ...]:
    """Returns the cases of `--distinct` and its options, or those of a set that match `--cases`."""
    if args.distinct is None:
        if not args.cases:
            return ()  # the arrivals alone
        return select(CASE_SETS[args.set](), args.cases)
    targets, ranks = args.targets, _numbers(args.ranks) if args.ranks else ()
    return tuple(
        Case("on", count, distinct, args.rank, args.prompt, args.output, targets, ranks)
        if distinct
        else Case("on", count, 0, prompt=args.prompt, output=args.output)
        for count in _numbers(args.requests)
        for distinct in _numbers(args.distinct)
    )


def pool_pages(args: argparse.Namespace) -> int | None:
    is_shape = args.set == "shape" and args.distinct is None
    return SHAPE_PAGES if args.pool_pages is None and is_shape else args.pool_pages


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="file that gets every line, too")
    parser.add_argument("--shape", choices=SHAPES, default="llama-3-8b")
    parser.add_argument("--set", choices=CASE_SETS, default="standard", help="named cases")
    parser.add_argument("--cases", default="*", help="shell patterns of case names, by comma")
    own = parser.add_argument_group("cases of your own, instead of a set")
    own.add_argument("--distinct", help="numbers of adapters in use, by comma (0: the base alone)")
    own.add_argument("--requests", default="32", help="numbers of requests at once, by comma")
    own.add_argument("--rank", type=int, default=16)
    own.add_argument("--ranks", help="by comma, of the adapters in turn, instead of --rank")
    names = ",".join(LINEARS.values())
    own.add_argument(
        "--targets", type=targets_argument, default="all", help=f"all, or by comma: {names}"
    )
    own.add_argument("--prompt", type=int, default=256, help="tokens")
    own.add_argument("--output", type=int, default=128, help="tokens")
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
    parser.add_argument(
        "--max-decode-slowdown",
        type=float,
        default=EngineConfig("", "").max_decode_slowdown,
        help="ours",
    )
    parser.add_argument("--memory", type=float, default=0.8, help="share of the device")
    parser.add_argument(
        "--pool-pages",
        type=int,
        help="ours: adapters of rank 16 that the pool holds; 128, for --set shape 40",
    )
    parser.add_argument("--prefix-caching", action="store_true", help="on, as a server has it")
    parser.add_argument("--eager", action="store_true", help="ours without CUDA graphs")
    parser.add_argument(
        "--no-mixed-graphs", action="store_true", help="prompts without CUDA graphs"
    )
    parser.add_argument("--tiny", action="store_true", help="few short requests: a trial")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "engine-bench")
    args = parser.parse_args()
    args.work = args.work.resolve()  # a child has another working folder
    return args


def main() -> None:
    args = parse_args()
    cases = chosen_cases(args)
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
            pool_pages=pool_pages(args),
            enable_prefix_caching=args.prefix_caching,
            enforce_eager=args.eager,
            mixed_graphs=not args.no_mixed_graphs,
            others={"max_decode_slowdown": args.max_decode_slowdown},
        )
        asyncio.run(run_ours(args, settings, cases, report))
    summarise(report, args.shape)


if __name__ == "__main__":
    main()

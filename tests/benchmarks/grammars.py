"""The cost of grammars at the engine alone: equal requests, none, some or all of them constrained.

All requests decode at once; the shares take turns, the first is the base. The grammar never ends
within the output, and forced text is off, so that all shares draw the same number of tokens. The
figures of rows with and without a grammar are apart. Ours is the engine with its own loop; vLLM,
where its packages are, runs first in a process of its own, with its own choice of a backend.
`--forced` instead compares whole answers to forms with and without forced text.

    python -m tests.benchmarks.grammars --out FILE [--shape llama-3-8b] [--vllm SITE_PACKAGES]
    python -m tests.benchmarks.grammars --out FILE --forced --requests 32 [--model FOLDER]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from itertools import cycle, pairwise
from pathlib import Path

from engine.types import Grammar, Request, SamplingParams
from tests.benchmarks.cases import Case
from tests.benchmarks.children import module, relay_vllm
from tests.benchmarks.grammar_tokenizer import GRAMMARS, write_tokenizer
from tests.benchmarks.our_engine import OurEngine, Settings, finish
from tests.benchmarks.report import Report, percentile, print_table, spread
from tests.benchmarks.shapes import SHAPES

WARM_UP_TOKENS = 8
FORM_TOKENS = 2000  # no answer to a form is as long
FORCED_BLOCKS = 6000  # of KV for each of two engines


_SIDES = {"without": False, "forced": True}


@dataclass(frozen=True, slots=True)
class Figures:
    seconds: float
    free_gaps_s: list[float]
    limited_gaps_s: list[float]


def grammars_of(name: str) -> list[Grammar]:
    return [Grammar("regex" if name == "regex" else "json_schema", text) for text in GRAMMARS[name]]


async def run(
    ours: OurEngine, case: Case, grammars: list[Grammar], share: float, salt: int
) -> Figures:
    """Runs all requests once; a share of them, evenly among the others, has a grammar."""
    requests: list[Request] = []
    limited: set[str] = set()
    turns = cycle(grammars)
    for i, prompt in enumerate(ours.prompts(case, salt)):
        request = ours.request(prompt, case.output, None)
        if int((i + 1) * share) > int(i * share):
            params = SamplingParams(max_tokens=case.output, temperature=0.0, grammar=next(turns))
            request = replace(request, params=params)
            limited.add(request.request_id)
        requests.append(request)
    with ours.watch(len(requests)) as timeline:
        start_s = time.perf_counter()
        await asyncio.gather(*(ours.engine.submit(request) for request in requests))
        await finish(timeline)
    times = timeline.times_s
    assert all(len(times[request.request_id]) == case.output for request in requests)
    gaps = {
        is_limited: [
            later - earlier
            for name, found in times.items()
            if (name in limited) == is_limited
            for earlier, later in pairwise(found)
        ]
        for is_limited in (False, True)
    }
    last_s = max(found[-1] for found in times.values())
    return Figures(last_s - start_s, gaps[False], gaps[True])


async def run_ours(args: argparse.Namespace, report: Report) -> dict[float, dict[str, object]]:
    shape = SHAPES[args.shape]
    folder = args.work / shape.name
    write_tokenizer(folder, shape)
    settings = Settings(
        shape,
        folder,
        device=args.device,
        max_num_seqs=args.requests,
        num_blocks=args.num_blocks,
        others={"force_grammar_tokens": False},
    )
    ours = OurEngine(settings, "off")
    case = Case("off", args.requests, 0, prompt=args.prompt, output=args.output)
    short = replace(case, output=min(WARM_UP_TOKENS, case.output))
    grammars = grammars_of(args.grammar)
    found: dict[float, list[Figures]] = {share: [] for share in args.shares}
    for share in args.shares:
        await run(ours, short, grammars, share, salt=-1)
    for number in range(args.repeats):
        for share in args.shares:
            found[share].append(await run(ours, case, grammars, share, salt=number))
    late = ours.engine.load().num_late_compilations
    ours.close()
    lines: dict[float, dict[str, object]] = {}
    base_s = [one.seconds for one in found[args.shares[0]]]
    for share, figures in found.items():
        middle = sorted(figures, key=lambda one: one.seconds)[len(figures) // 2]
        ratios = [base / one.seconds for base, one in zip(base_s, figures, strict=True)]
        lines[share] = line = {
            "side": "ours",
            "shape": args.shape,
            "requests": args.requests,
            "grammar": args.grammar,
            "share": share,
            "seconds": round(middle.seconds, 4),
            "output_tokens_per_s": round(case.output_tokens / middle.seconds, 1),
            "to_base": round(percentile(ratios, 50), 3),
            "free_gaps_ms": _milliseconds(middle.free_gaps_s),
            "limited_gaps_ms": _milliseconds(middle.limited_gaps_s),
            "late_compilations": late,
        }
        report.emit(**line)
    return lines


async def run_forms(ours: OurEngine, case: Case, salt: int) -> tuple[float, int, int]:
    """Runs one form a request to its end. Returns the seconds, the tokens and the drawn steps."""
    turns = cycle(grammars_of("mixed"))
    requests = [
        replace(
            ours.request(prompt, case.output, None),
            params=SamplingParams(max_tokens=case.output, temperature=0.0, grammar=next(turns)),
        )
        for prompt in ours.prompts(case, salt)
    ]
    with ours.watch(len(requests)) as timeline:
        timeline.may_stop = True
        start_s = time.perf_counter()
        await asyncio.gather(*(ours.engine.submit(request) for request in requests))
        await finish(timeline)
    last_s = max(times[-1] for times in timeline.times_s.values())
    return last_s - start_s, timeline.num_tokens, sum(map(len, timeline.times_s.values()))


async def run_forced(args: argparse.Namespace, report: Report) -> dict[str, object]:
    """Compares engines with and without forced text, in turns. The texts differ: where a key may be
    cut into tokens in several ways, the model chooses, and forced text takes the tokenizer's."""
    shape = SHAPES[args.shape]
    folder = args.work / shape.name
    write_tokenizer(folder, shape)
    model = {"model_path": str(args.model), "load_format": "auto"} if args.model else {}
    case = Case("off", args.requests, 0, prompt=args.prompt, output=FORM_TOKENS)
    engines = {
        is_forced: OurEngine(
            Settings(
                shape,
                folder,
                device=args.device,
                max_num_seqs=args.requests,
                num_blocks=args.num_blocks or FORCED_BLOCKS,
                others={"force_grammar_tokens": is_forced, **model},
            ),
            "off",
        )
        for is_forced in (False, True)
    }
    found: dict[bool, list[tuple[float, int, int]]] = {False: [], True: []}
    for number in range(-1, args.repeats):
        for is_forced, ours in engines.items():
            figures = await run_forms(ours, case, number)
            if number >= 0:
                found[is_forced].append(figures)
    for ours in engines.values():
        ours.close()
    sums = {name: [sum(one[i] for one in runs) for i in range(3)] for name, runs in found.items()}
    ratios = [forced[0] / drawn[0] for drawn, forced in zip(found[False], found[True], strict=True)]
    line: dict[str, object] = {
        "forced": True,
        "model": args.model.name if args.model else args.shape,
        "requests": args.requests,
        "seconds": {name: round(sums[is_forced][0], 3) for name, is_forced in _SIDES.items()},
        "tokens": {name: sums[is_forced][1] for name, is_forced in _SIDES.items()},
        "steps_of_requests": {name: sums[is_forced][2] for name, is_forced in _SIDES.items()},
        "drawn_to_without": round(sums[True][2] / sums[False][2], 3),
        "time_to_without": round(percentile(ratios, 50), 3),
    }
    report.emit(**line)
    return line


def run_vllm(args: argparse.Namespace, report: Report) -> dict[float, dict[str, object]]:
    shape = SHAPES[args.shape]
    folder = args.work / f"{shape.name}-vllm"
    write_tokenizer(shape.write_config(folder), shape)
    options = {name: getattr(args, name) for name in ("requests", "prompt", "output", "repeats")}
    command = module("grammars_vllm", "--model", str(folder), "--shares", json.dumps(args.shares))
    command += ["--grammar", args.grammar]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    lines = relay_vllm(command, report, args.vllm, args.work, args.vllm_timeout)
    return {line["share"]: line for line in lines if isinstance(line.get("share"), float)}  # type: ignore[misc]


def _milliseconds(gaps_s: list[float]) -> dict[str, float] | None:
    return spread([1000 * gap for gap in gaps_s], 2) if gaps_s else None


def _p99(line: dict[str, object], name: str) -> object:
    gaps = line.get(name)
    return gaps["p99"] if isinstance(gaps, dict) else None


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="file that gets every line, too")
    parser.add_argument("--shape", choices=SHAPES, default="llama-3-8b")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--shares", type=json.loads, default=[0.0, 0.2, 1.0], help="JSON list")
    parser.add_argument("--grammar", choices=GRAMMARS, default="json")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--output", type=int, default=128, help="tokens")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--num-blocks", type=int, help="KV blocks; unset: what fits")
    parser.add_argument("--vllm", metavar="SITE_PACKAGES", help="folder that holds vLLM")
    parser.add_argument("--vllm-timeout", type=float, default=400.0, help="seconds")
    parser.add_argument("--no-ours", action="store_true")
    parser.add_argument("--forced", action="store_true", help="whole answers, with forced text")
    parser.add_argument("--model", type=Path, help="folder of a base for --forced")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "grammar-bench")
    args = parser.parse_args(arguments)
    args.work = args.work.resolve()  # a child has another working folder
    args.shares = [float(share) for share in args.shares]
    return args


def main() -> None:
    args = parse_args()
    report = Report(args.out)
    report.emit_machine("grammars", arguments=sys.argv[1:])
    if args.forced:
        asyncio.run(run_forced(args, report))
        return
    sides = {"vllm": run_vllm(args, report)} if args.vllm else {}
    if not args.no_ours:
        sides["ours"] = asyncio.run(run_ours(args, report))
    print_table(
        ("side", "share", "tok/s", "to base", "free p99 ms", "limited p99 ms"),
        [
            (
                side,
                share,
                line["output_tokens_per_s"],
                line["to_base"],
                _p99(line, "free_gaps_ms"),
                _p99(line, "limited_gaps_ms"),
            )
            for side, lines in sides.items()
            for share, line in lines.items()
        ],
    )


if __name__ == "__main__":
    main()

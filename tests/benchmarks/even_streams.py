"""Gaps between tokens while prompts arrive, at the engine alone, with and without the bound on
prompts beside decoding sequences (`max_decode_slowdown`).

Prompts of 512 to 2,048 random tokens arrive at random times while others decode; then 256 and 32
prompts of 256 tokens at once, as `serve` sends them. The settings take turns on one engine. With
`--steps` each step's prompt tokens, decoding sequences and milliseconds are kept.

    python -m tests.benchmarks.even_streams --out FILE [--shape llama-3-8b] [--rounds 2]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from engine.config import EngineConfig
from engine.core import Engine
from tests.benchmarks.our_engine import OurEngine, Settings, finish
from tests.benchmarks.report import Report, percentile, print_table, spread
from tests.benchmarks.shapes import SHAPES

OFF = 1e6


@dataclass(frozen=True, slots=True)
class Arrival:
    at_s: float
    num_prompt: int
    num_output: int


def open_loop(rate: float, count: int) -> list[Arrival]:
    draw, now_s, arrivals = random.Random(5), 0.0, []
    for _ in range(count):
        now_s += draw.expovariate(rate)
        arrivals.append(Arrival(now_s, draw.randint(512, 2048), draw.randint(96, 384)))
    return arrivals


def burst(count: int) -> list[Arrival]:
    return [Arrival(0.0, 256, 128)] * count


@contextmanager
def bound(ours: OurEngine, slowdown: float, max_tokens: int) -> Iterator[None]:
    """Runs the engine's scheduler with other limits: only how much a step holds changes."""
    scheduler = _engine(ours).scheduler
    before = scheduler._config
    scheduler._config = replace(
        before, max_decode_slowdown=slowdown, max_num_batched_tokens=max_tokens
    )
    try:
        yield
    finally:
        scheduler._config = before


def _engine(ours: OurEngine) -> Engine:
    return cast(Engine, ours.engine._engine)


class StepLog:
    """The (prompt tokens, decoding sequences, milliseconds) of steps, as `StepCost` gets them."""

    def __init__(self, engine: Engine) -> None:
        self.steps: list[tuple[int, int, float]] = []
        cost = engine._times._cost
        observe = cost.observe

        def record(num_prompt: int, num_decoding: int, seconds: float) -> None:
            self.steps.append((num_prompt, num_decoding, round(1000 * seconds, 3)))
            observe(num_prompt, num_decoding, seconds)

        engine._times._cost = _Recorded(cost, record)  # type: ignore[assignment]


class _Recorded:
    def __init__(self, cost: object, observe: object) -> None:
        self._cost = cost
        self.observe = observe

    def __getattr__(self, name: str) -> object:
        return getattr(self._cost, name)


async def run(ours: OurEngine, arrivals: Sequence[Arrival], salt: str) -> dict[str, object]:
    """Sends the arrivals once; other prompts for every salt, so that no prefix is found."""
    draw = random.Random(salt)
    highest = ours.engine.model_limits.vocab_size - 16
    requests = [
        ours.request(tuple(draw.choices(range(10, highest), k=a.num_prompt)), a.num_output, None)
        for a in arrivals
    ]
    sent_s: dict[str, float] = {}
    submitted: list[asyncio.Future[None]] = []  # each waits for the end of a step
    with ours.watch(len(requests)) as timeline:
        start_s = time.perf_counter()
        for one, request in zip(arrivals, requests, strict=True):
            if (wait_s := start_s + one.at_s - time.perf_counter()) > 0:
                await asyncio.sleep(wait_s)
            sent_s[request.request_id] = time.perf_counter()
            submitted.append(asyncio.ensure_future(ours.engine.submit(request)))
        await asyncio.gather(*submitted)
        await finish(timeline)
    ttft = [times[0] - sent_s[name] for name, times in timeline.times_s.items()]
    seconds = max(times[-1] for times in timeline.times_s.values()) - start_s
    gaps = spread([1000 * s for s in timeline.gaps_s()], 2)
    return {
        "requests": len(requests),
        "seconds": round(seconds, 3),
        "output_tokens_per_s": round(sum(a.num_output for a in arrivals) / seconds, 1),
        "gap_ms": gaps,
        "gap_p99_to_p50": round(gaps["p99"] / gaps["p50"], 2),
        "ttft_ms": spread([1000 * s for s in ttft], 1),
        "ttft_p95_ms": round(1000 * percentile(ttft, 95), 1),
    }


def loads_of(args: argparse.Namespace) -> list[tuple[str, list[Arrival]]]:
    if args.device == "cpu":  # a trial
        small = [replace(a, num_prompt=a.num_prompt // 16, num_output=8) for a in open_loop(4.0, 4)]
        return [("open", small), ("burst 4", [replace(a, num_output=8) for a in burst(4)])]
    loads = [(f"open {rate:g}/s", open_loop(rate, args.requests)) for rate in args.rates]
    return loads + [(f"burst {count}", burst(count)) for count in (256, 32)]


async def main_of(args: argparse.Namespace, report: Report) -> None:
    is_cuda = args.device == "cuda"
    settings = Settings(
        SHAPES[args.shape],
        args.work / args.shape,
        device=args.device,
        max_num_batched_tokens=8192 if is_cuda else 512,
        enable_prefix_caching=True,
    )
    ours = OurEngine(settings, "off")
    report.emit(part="start", seconds=round(ours.start_s, 2))
    log = StepLog(_engine(ours))
    most = settings.max_num_batched_tokens
    usual = args.slowdowns or [EngineConfig("", "").max_decode_slowdown]
    variants = [(most, OFF), (most // 4, OFF), *((most, slowdown) for slowdown in usual)]
    await run(ours, burst(8), "warm-up")
    rows = []
    for name, arrivals in loads_of(args):
        for number in range(args.rounds):
            for max_tokens, slowdown in variants:
                first = len(log.steps)
                with bound(ours, slowdown, max_tokens):
                    seen = await run(ours, arrivals, f"{name}/{number}/{max_tokens}/{slowdown}")
                line: dict[str, object] = {
                    "part": "run",
                    "load": name,
                    "round": number,
                    "max_num_batched_tokens": max_tokens,
                    "max_decode_slowdown": None if slowdown == OFF else slowdown,
                    **seen,
                }
                steps = {"steps": log.steps[first:]} if args.steps else {}
                report.emit(**line, **steps)
                gap, first_token = (cast(dict[str, float], seen[n]) for n in ("gap_ms", "ttft_ms"))
                rate = seen["output_tokens_per_s"]
                shown = "-" if slowdown == OFF else slowdown
                rows.append((name, max_tokens, shown, *gap.values(), rate, *first_token.values()))
    ours.close()
    head = ("load", "tokens", "bound", "gap p50", "p99", "max", "tok/s", "ttft p50", "p99", "max")
    print_table(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="file that gets every line, too")
    parser.add_argument("--shape", choices=SHAPES, default="llama-3-8b")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--rates", type=float, nargs="*", default=[20.0])
    parser.add_argument("--slowdowns", type=float, nargs="*", help="instead of the default")
    parser.add_argument("--requests", type=int, default=256, help="of an open load")
    parser.add_argument("--steps", action="store_true", help="keep each step")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "even-streams")
    args = parser.parse_args()
    args.work = args.work.resolve()
    report = Report(args.out)
    report.emit_machine("even_streams", arguments=sys.argv[1:])
    asyncio.run(main_of(args, report))


if __name__ == "__main__":
    main()

"""The decode rate of kinds of adapters, in turns on one engine: plain LoRA, DoRA, LoRA with biases,
two adapters a request beside one of their ranks together, and the base.

The requests share out the adapters, all of which are on the device; pairs have weights and are of
twice as many. The rate is that of the tokens while every request decodes: prompts are left out. A
ratio is the median over the rounds, in which the variants run forwards and backwards by turns; the
first round is apart.

    python -m tests.benchmarks.adapter_kinds --out FILE [--shape llama-3-8b] [--requests 1,32,256]
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.types import WeightedAdapter, adapter_key
from tests.benchmarks.cases import PAGE_RANK, AdapterKind, AdapterSpec, Case
from tests.benchmarks.our_engine import OurEngine, Settings, decode_rate
from tests.benchmarks.report import Report, print_table
from tests.benchmarks.shapes import SHAPES

RANK = 16
WEIGHTS = (0.75, 0.5)
WARM_UP_TOKENS = 8
POOL_ROOM = 1.2  # of the pool over the adapters' pages: vectors, and strips that leave gaps
LEAST_ROUNDS = 2
# Ratios of the rates of two variants: name -> (numerator, denominator, least value or None).
RATIOS: dict[str, tuple[str, str, float | None]] = {
    "plain_to_base": ("plain", "base", None),
    "dora_to_plain": ("dora", "plain", 0.97),
    "bias_to_plain": ("bias", "plain", None),
    "two_r16_to_one_r32": ("two_r16", "one_r32", 0.97),
}


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    keys: tuple[str | None, ...]  # of adapters, of the requests in turn
    specs: tuple[AdapterSpec, ...]  # all adapters of the keys


def make_variants(distinct: int) -> tuple[Variant, ...]:
    """Returns the variants of so many adapters, or pairs of them."""

    def of_kind(name: str, kind: AdapterKind, rank: int = RANK) -> Variant:
        specs = tuple(AdapterSpec(rank, i, kind=kind) for i in range(distinct))
        return Variant(name, tuple(spec.digest for spec in specs), specs)

    halves = tuple(AdapterSpec(RANK, i) for i in range(2 * distinct))
    pairs = tuple(zip(halves[:distinct], halves[distinct:], strict=True))
    keys = tuple(
        adapter_key([WeightedAdapter(s.digest, w) for s, w in zip(pair, WEIGHTS, strict=True)])
        for pair in pairs
    )
    return (
        Variant("base", (None,), ()),
        of_kind("plain", "plain"),
        of_kind("dora", "dora"),
        of_kind("bias", "bias"),
        Variant("two_r16", keys, halves),
        of_kind("one_r32", "plain", 2 * RANK),
    )


def pages_of(variants: Sequence[Variant]) -> int:
    """Returns the pages of all adapters together, with room to spare."""
    specs = {spec for variant in variants for spec in variant.specs}
    return math.ceil(POOL_ROOM * sum(-(-spec.rank // PAGE_RANK) for spec in specs))


async def run(
    ours: OurEngine, case: Case, variant: Variant, salt: int, output: int
) -> list[list[float]]:
    """Runs all requests of the case once. Returns the times of each one's tokens."""
    keys = variant.keys
    requests = [
        ours.request(prompt, output, keys[i % len(keys)])
        for i, prompt in enumerate(ours.prompts(case, salt))
    ]
    _, timeline = await ours.send(requests)
    return list(timeline.times_s.values())


async def measure(
    ours: OurEngine, variants: Sequence[Variant], case: Case, rounds: int, seconds: float
) -> tuple[dict[str, list[float]], int]:
    """Returns the rates of each variant, those of the first round first, and the adapters that were
    copied to the device within the rounds. No more rounds begin after `seconds`."""
    for variant in variants:
        await run(ours, case, variant, -1, min(WARM_UP_TOKENS, case.output))
    copied = ours.engine.load().num_adapter_copies
    rates: dict[str, list[float]] = {variant.name: [] for variant in variants}
    began_s = time.perf_counter()
    for number in range(rounds + 1):
        if number > LEAST_ROUNDS and time.perf_counter() - began_s > seconds:
            break
        for variant in variants if number % 2 else tuple(reversed(variants)):
            times_s = await run(ours, case, variant, number, case.output)
            rates[variant.name].append(decode_rate(times_s))
    return rates, ours.engine.load().num_adapter_copies - copied


def ratios_of(rates: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Returns the medians of the ratios within each round but the first."""
    return {
        name: round(
            statistics.median(
                one / other for one, other in zip(rates[above][1:], rates[below][1:], strict=True)
            ),
            3,
        )
        for name, (above, below, _) in RATIOS.items()
    }


def holds(ratios: Mapping[str, float]) -> bool:
    return all(ratios[name] >= least for name, (_, _, least) in RATIOS.items() if least is not None)


async def main_of(args: argparse.Namespace, report: Report) -> bool:
    counts = [int(count) for count in args.requests.split(",")]
    variants = make_variants(args.distinct)
    settings = Settings(
        SHAPES[args.shape],
        args.work / args.shape,
        device=args.device,
        max_num_seqs=max(counts),
        num_blocks=args.num_blocks,
        pool_pages=pages_of(variants),
    )
    ours = OurEngine(settings, "on")
    specs = {spec for variant in variants for spec in variant.specs}
    load_s = await ours.load_adapters(sorted(specs, key=lambda spec: spec.digest))
    report.emit(
        part="start",
        shape=args.shape,
        start_s=round(ours.start_s, 2),
        adapters=len(specs),
        load_adapters_s=round(load_s, 2),
        pool_pages=settings.pool_pages,
    )
    passed, rows = True, []
    for count in counts:
        case = Case("on", count, 0, prompt=args.prompt, output=args.output)
        rates, copies = await measure(ours, variants, case, args.rounds, args.seconds)
        for name, found in rates.items():
            report.emit(
                part="rate",
                requests=count,
                variant=name,
                decode_tokens_per_s=round(statistics.median(found[1:]), 1),
                rounds=[round(rate, 1) for rate in found[1:]],
                first_round=round(found[0], 1),
            )
        ratios = ratios_of(rates)
        passed &= holds(ratios)
        report.emit(part="ratios", requests=count, adapter_copies=copies, **ratios)
        medians = [statistics.median(found[1:]) for found in rates.values()]
        rows.append((count, *medians, *ratios.values()))
    late = ours.engine.load().num_late_compilations
    ours.close()
    print_table(("requests", *(variant.name for variant in variants), *RATIOS), rows)
    least = {name: least for name, (_, _, least) in RATIOS.items() if least is not None}
    report.emit(benchmark="adapter_kinds", least=least, late_compilations=late, **{"pass": passed})
    return passed


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="file that gets every line, too")
    parser.add_argument("--shape", choices=SHAPES, default="llama-3-8b")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--requests", default="32", help="numbers of requests at once, by comma")
    parser.add_argument("--distinct", type=int, default=32, help="adapters, or pairs, of a variant")
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--output", type=int, default=128, help="tokens")
    parser.add_argument("--rounds", type=int, default=6, help="after the first one")
    parser.add_argument(
        "--seconds", type=float, default=45.0, help="of a number of requests; then no more rounds"
    )
    parser.add_argument("--num-blocks", type=int, help="KV blocks; unset: what fits")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "adapter-kinds")
    return parser.parse_args(arguments)


def main() -> None:
    args = parse_args()
    report = Report(args.out)
    report.emit_machine("adapter_kinds", arguments=sys.argv[1:])
    sys.exit(0 if asyncio.run(main_of(args, report)) else 1)


if __name__ == "__main__":
    main()

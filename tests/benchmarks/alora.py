"""The first token of an adapter with invocation tokens (aLoRA) behind a long prompt that others
have computed, beside that of an adapter that is active from the first token on.

A round has a prompt of its own. The base computes it; then come, each with its adapter's invocation
and a question behind that prompt: an aLoRA, whose KV blocks before its invocation are the base's; a
second one; the base again; and a plain adapter, under whose key nothing is cached. Every second
round begins with the plain adapter. One request at a time, one token out, adapters on the device,
the first round apart.

    python -m tests.benchmarks.alora --out FILE [--shape llama-3-8b] [--prompt 4000] [--rounds 8]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.benchmarks.cases import INVOCATION, AdapterSpec, Case
from tests.benchmarks.our_engine import OurEngine, Settings
from tests.benchmarks.report import Report, print_table
from tests.benchmarks.shapes import SHAPES

QUESTION_TOKENS = 13  # behind the invocation
MAX_RATIO = 0.2  # of the time to the first token, aLoRA to plain
# Variant -> adapter. The first computes the prompt alone.
BASE = {"base_cold": None}
FOLLOWERS = {
    f"alora{name}": AdapterSpec(16, i, kind="alora") for i, name in enumerate(("", "_second"))
}
PLAIN = {"plain": AdapterSpec(16, 2)}
VARIANTS: dict[str, AdapterSpec | None] = {**BASE, **FOLLOWERS, "base_cached": None, **PLAIN}


def make_order(number: int) -> tuple[str, ...]:
    """Returns the variants of a round; the base computes the prompt before others share it."""
    names = tuple(VARIANTS)
    return names if number % 2 == 0 else (names[-1], *names[:-1])


async def first_token(
    ours: OurEngine, prompt: tuple[int, ...], spec: AdapterSpec | None
) -> tuple[float, int]:
    """Returns the seconds to the first token, and the prompt's tokens that were cached."""
    adapter = None if spec is None else spec.digest
    before = ours.engine.load().prefix_hits
    request = ours.request(prompt, 1, adapter)
    start_s, timeline = await ours.send([request])
    return timeline.times_s[request.request_id][
        0
    ] - start_s, ours.engine.load().prefix_hits - before


async def run_round(
    ours: OurEngine, length: int, number: int
) -> tuple[dict[str, float], dict[str, int]]:
    """Returns the seconds to the first token and the cached tokens of each variant."""
    (shared,) = ours.prompts(Case("on", 1, 0, prompt=length), number)
    draw = random.Random(f"question/{number}")
    times_s, cached = {}, {}
    for name in make_order(number):
        question = tuple(draw.choice(shared) for _ in range(QUESTION_TOKENS))
        prompt = shared if name in BASE else (*shared, *INVOCATION, *question)
        times_s[name], cached[name] = await first_token(ours, prompt, VARIANTS[name])
    return times_s, cached


def check_cached(cached: Mapping[str, int], length: int, block_size: int) -> None:
    """Raises RuntimeError if a variant found other blocks than it should have: the times would not
    be those that are compared."""
    shared = length // block_size * block_size
    for name, tokens in cached.items():
        is_cold = name in BASE or name in PLAIN
        if tokens >= block_size if is_cold else tokens < shared:
            raise RuntimeError(f"{name} found {tokens} cached tokens of {length}")


async def main_of(args: argparse.Namespace, report: Report) -> bool:
    settings = Settings(
        SHAPES[args.shape],
        args.work / args.shape,
        device=args.device,
        max_num_seqs=8,
        enable_prefix_caching=True,
        num_blocks=args.num_blocks,
        pool_pages=2 * len(VARIANTS),
    )
    ours = OurEngine(settings, "on")
    specs = [spec for spec in VARIANTS.values() if spec is not None]
    await ours.load_adapters(specs)
    for spec in specs:  # onto the device
        await ours.send([ours.request((*INVOCATION, 10), 1, spec.digest)])
    times_s: dict[str, list[float]] = {name: [] for name in VARIANTS}
    cached: dict[str, int] = {}
    for number in range(args.rounds + 1):
        found, cached = await run_round(ours, args.prompt, number)
        check_cached(cached, args.prompt, ours.config.block_size)
        for name, seconds in found.items():
            times_s[name].append(seconds)
    late = ours.engine.load().num_late_compilations
    ours.close()
    return summarise(args, times_s, cached, late, report)


def ratio_to_plain(times_s: Mapping[str, Sequence[float]], name: str) -> float:
    """Returns the median of the ratios within each round but the first."""
    pairs = zip(times_s[name][1:], times_s["plain"][1:], strict=True)
    return round(statistics.median(one / plain for one, plain in pairs), 4)


def summarise(
    args: argparse.Namespace,
    times_s: Mapping[str, Sequence[float]],
    cached: Mapping[str, int],
    late: int,
    report: Report,
) -> bool:
    rows = []
    for name, seconds in times_s.items():
        ttft_ms = [round(1000 * value, 2) for value in seconds]
        median_ms = round(statistics.median(ttft_ms[1:]), 2)
        ratio = ratio_to_plain(times_s, name)
        report.emit(
            part="first_token",
            shape=args.shape,
            prompt=args.prompt,
            variant=name,
            cached_tokens=cached[name],
            ttft_ms=median_ms,
            rounds_ms=ttft_ms[1:],
            first_round_ms=ttft_ms[0],
            to_plain=ratio,
        )
        rows.append((name, cached[name], median_ms, ratio))
    print_table(("variant", "cached tokens", "ttft ms", "to plain"), rows)
    passed = all(ratio_to_plain(times_s, name) <= MAX_RATIO for name in FOLLOWERS)
    report.emit(benchmark="alora", most=MAX_RATIO, late_compilations=late, **{"pass": passed})
    return passed


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="file that gets every line, too")
    parser.add_argument("--shape", choices=SHAPES, default="llama-3-8b")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--prompt", type=int, default=4000, help="tokens that all share")
    parser.add_argument("--rounds", type=int, default=8, help="after the first one")
    parser.add_argument("--num-blocks", type=int, help="KV blocks; unset: what fits")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "alora-bench")
    return parser.parse_args(arguments)


def main() -> None:
    args = parse_args()
    report = Report(args.out)
    report.emit_machine("alora", arguments=sys.argv[1:])
    sys.exit(0 if asyncio.run(main_of(args, report)) else 1)


if __name__ == "__main__":
    main()

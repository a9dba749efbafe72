"""Many adapters in little memory: first tokens beside the same traffic with all of them resident.

One server with two engines of equal shape. Both get the same requests in turns: 200 adapters, used
in a skewed way (Zipf), open-loop arrivals. `resident` has them all on the device; `tiered` has
1,000 registered, room for 16 on the device, 64 in host memory and 128 on disk. Then every one of
the 1,000 is used once: no limit may be passed.

    python -m tests.benchmarks.tiers [--out FILE] [--home FOLDER]    (a kept home saves registering)
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from engine.model_config import read_model_config
from tests.benchmarks.memory_adapters import pool_bytes
from tests.benchmarks.report import Report, percentile, print_table
from tests.benchmarks.serve_client import Stream, check, connect, make_request
from tests.benchmarks.serve_home import open_home, write_serve_file
from tests.benchmarks.serve_sides import serving
from tests.benchmarks.tiers_home import (
    RESIDENT,
    TIERED,
    adapter_file_bytes,
    adapter_name,
    prepare,
)
from tests.benchmarks.watch import repeating
from tests.ports import free_port

TIERS = ("device", "host", "disk", "registry")
TARGET_RATIO = 3.0  # of the medians of the time to first token
_SAMPLE_S = 2.0
_SAMPLE = re.compile(r"^(\w+)\{(.*)\} (\S+)$")
_CONFIG_BYTES = 4096  # of an adapter's small files


def write_config(args: argparse.Namespace, home: Path, port: int) -> Path:
    model = read_model_config(home / "made" / TIERED)
    image_bytes = 2 * adapter_file_bytes() + 1024  # fp32 of bf16, and its table
    base_bytes = sum(p.stat().st_size for p in (home / "made" / TIERED).iterdir())
    common = {"device": "cpu", "dtype": "float32", "num_threads": 1, "max_num_seqs": 64}

    def served(name: str, on_device: int, on_host: int) -> dict[str, object]:
        return {
            "name": name,
            "graceful_shutdown_timeout_s": 2,
            "engine": common
            | {
                "kv_cache_bytes": 64 * 1024**2,
                "adapter_pool_bytes": pool_bytes(model, on_device, 4),
                "adapter_host_bytes": on_host * image_bytes,
            },
        }

    arguments = {
        "registry": {
            "poll_interval_s": 5,
            "cache_bytes": args.disk * (adapter_file_bytes() + _CONFIG_BYTES) + 2 * base_bytes,
        },
        "ingress": {"graceful_shutdown_timeout_s": 2},
        "models": [
            served(TIERED, args.device, args.host),
            served(RESIDENT, args.used, args.used + 20),
        ],
    }
    return write_serve_file(home, port, arguments)


@dataclass(slots=True)
class Numbers:
    """The values of /metrics, by (name, base, tier or "")."""

    values: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    @classmethod
    def read(cls, port: int) -> Numbers:
        numbers = cls()
        text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=30).text
        for line in text.splitlines():
            found = _SAMPLE.match(line)
            if found is not None:
                labels = dict(re.findall(r'(\w+)="([^"]*)"', found[2]))
                key = (found[1], labels.get("model_name", ""), labels.get("tier", ""))
                numbers.values[key] += float(found[3])
        return numbers

    def hits(self, base: str) -> dict[str, float]:
        name = "loraplex_adapter_tier_hits_total"
        return {tier: self.values[name, base, tier] for tier in TIERS}

    def memory(self, base: str) -> dict[str, float]:
        values = self.values
        return {
            "rss": values["loraplex_engine_resident_bytes", base, ""],
            "device": values["loraplex_adapter_memory_bytes", base, "device"],
            "host": values["loraplex_adapter_memory_bytes", base, "host"],
            "disk": values["loraplex_cache_bytes", base, ""],
        }


@contextmanager
def peak_memory(port: int) -> Iterator[dict[str, float]]:
    """The highest of what each two seconds show, filled at the end of the block."""
    peak: dict[str, float] = {}

    def take() -> None:
        for name, value in Numbers.read(port).memory(TIERED).items():
            peak[name] = max(peak.get(name, 0.0), value)

    try:
        with repeating(take, _SAMPLE_S):
            yield peak
    finally:
        take()


async def send(port: int, model: str, draw: random.Random, tokens: int) -> Stream:
    stream = Stream()
    reader = await connect(port, stream)
    reader.send(make_request(model, tokens, 64, draw))
    await reader.done
    return stream


async def traffic(port: int, base: str, seed: int, args: argparse.Namespace) -> list[Stream]:
    """The same adapters at the same moments for the same seed, whatever the base."""
    draw = random.Random(seed)
    order = list(range(args.used))
    random.Random(0).shuffle(order)
    weights = [1 / (rank + 1) ** args.skew for rank in range(args.used)]
    tasks = []
    due_s = time.monotonic()
    for index in draw.choices(order, weights, k=args.requests):
        due_s += draw.expovariate(args.rate)
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        model = f"{base}:{adapter_name(base, index)}"
        tasks.append(asyncio.create_task(send(port, model, random.Random(due_s), args.tokens)))
    return list(await asyncio.gather(*tasks))


async def use_each(port: int, base: str, count: int, args: argparse.Namespace) -> list[Stream]:
    """Eight at a time."""
    slots = asyncio.Semaphore(8)

    async def one(index: int) -> Stream:
        async with slots:
            model = f"{base}:{adapter_name(base, index)}"
            return await send(port, model, random.Random(index), 2)

    return list(await asyncio.gather(*(one(index) for index in range(count))))


def first_token_ms(streams: Sequence[Stream]) -> list[float]:
    check(streams)
    return [1000 * (stream.times_s[0] - stream.sent_s) for stream in streams]


def figures(values: Sequence[float]) -> dict[str, float]:
    return {
        "p50": round(statistics.median(values), 1),
        "p95": round(percentile(values, 95), 1),
        "p99": round(percentile(values, 99), 1),
        "max": round(max(values), 1),
    }


def measure(args: argparse.Namespace, port: int, report: Report) -> None:
    warm = asyncio.run(use_each(port, RESIDENT, args.used, args))
    report.emit(part="all resident now", ttft_ms=figures(first_token_ms(warm)))
    before = Numbers.read(port)
    ttft: dict[str, list[float]] = {RESIDENT: [], TIERED: []}
    cold = first_token_ms(asyncio.run(traffic(port, TIERED, 1000, args)))
    report.emit(part="tiered, from nothing", ttft_ms=figures(cold), **_shares(before, port))
    start = Numbers.read(port)
    with peak_memory(port) as peak:
        for number in range(args.rounds):
            for base, values in ttft.items():
                seen = first_token_ms(asyncio.run(traffic(port, base, number, args)))
                values += seen
                report.emit(
                    part="round",
                    number=number,
                    base=base,
                    ttft_ms=figures(seen),
                    load_average=os.getloadavg()[0],
                )
    shares = _shares(start, port)
    report.emit(part="memory", phase="traffic", peak=peak, **_limits(args, start, port))
    before = Numbers.read(port)
    with peak_memory(port) as peak:
        swept = first_token_ms(asyncio.run(use_each(port, TIERED, args.adapters, args)))
    report.emit(
        part="memory",
        phase=f"each of {args.adapters} once",
        peak=peak,
        **_limits(args, before, port),
    )
    report.emit(part="each once", ttft_ms=figures(swept), **_shares(before, port))
    _conclude(args, ttft, shares, report)


def _shares(before: Numbers, port: int) -> dict[str, object]:
    then, now = before.hits(TIERED), Numbers.read(port).hits(TIERED)
    counts = {tier: now[tier] - then[tier] for tier in TIERS}
    total = sum(counts.values())
    return {
        "requests": total,
        "hit_rates": {tier: round(count / total, 3) for tier, count in counts.items()},
    }


def _limits(args: argparse.Namespace, before: Numbers, port: int) -> dict[str, object]:
    now = Numbers.read(port)
    return {
        "before": before.memory(TIERED),
        "after": now.memory(TIERED),
        "host_limit": args.host * (2 * adapter_file_bytes() + 1024),
        "disk_limit": now.values["loraplex_cache_limit_bytes", TIERED, ""],
        "disk_evictions": now.values["loraplex_cache_evictions_total", TIERED, ""],
    }


def _conclude(
    args: argparse.Namespace,
    ttft: dict[str, list[float]],
    shares: dict[str, object],
    report: Report,
) -> None:
    ours, theirs = figures(ttft[TIERED]), figures(ttft[RESIDENT])
    ratios = {name: round(ours[name] / theirs[name], 2) for name in ours}
    report.emit(
        benchmark="tiers",
        ttft_ms={"tiered": ours, "resident": theirs},
        ratio=ratios,
        **shares,
        target_p50_ratio=TARGET_RATIO,
        **{"pass": ratios["p50"] <= TARGET_RATIO},
    )
    rows = [(name, theirs[name], ours[name], ratios[name]) for name in ours]
    print_table(("TTFT ms", "all resident", "tiers", "ratio"), rows)
    rates = shares["hit_rates"]
    assert isinstance(rates, dict)
    print_table(("found in", *TIERS), [("share", *(rates[tier] for tier in TIERS))])


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="file that gets every line, too")
    parser.add_argument("--home", type=Path, help="kept; made where it is not there")
    parser.add_argument("--adapters", type=int, default=1000, help="registered for the tiered base")
    parser.add_argument("--used", type=int, default=200)
    parser.add_argument("--skew", type=float, default=1.0, help="exponent of Zipf's law")
    parser.add_argument("--device", type=int, default=16, help="room, in adapters")
    parser.add_argument("--host", type=int, default=64, help="room, in adapters")
    parser.add_argument("--disk", type=int, default=128, help="room, in adapters")
    parser.add_argument("--rate", type=float, default=12.0, help="requests a second")
    parser.add_argument("--requests", type=int, default=300, help="a round and base")
    parser.add_argument("--tokens", type=int, default=16, help="of an answer")
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


def run(args: argparse.Namespace, home: Path) -> None:
    os.environ["LORAPLEX_HOME"] = str(home)
    report = Report(args.out)
    report.emit_machine("tiers", arguments=sys.argv[1:])
    began_s = time.monotonic()
    prepare(home, {TIERED: args.adapters, RESIDENT: args.used})
    report.emit(part="registered", seconds=round(time.monotonic() - began_s, 1))
    port = free_port()
    config = write_config(args, home, port)
    with serving(config, home / "serve.log", f"http://127.0.0.1:{port}", {}, False):
        measure(args, port, report)


def main() -> None:
    args = parse_args()
    with open_home(args.home, "tiers-") as home:
        run(args, home)


if __name__ == "__main__":
    main()

"""S-LoRA's workload S1 on our engine: few, a thousand and two thousand adapters of one base.

Llama-7B shape, adapters of rank 8 on q, k, v and o, their popularity Zipf's (exponent 1), arrivals
from a Gamma process, prompts and answers of 8 to 512 tokens, uniform (Sheng et al., "S-LoRA:
Serving Thousands of Concurrent LoRA Adapters", 2023, section 7). The engine runs by its own loop,
with the settings of a server. Traces with different numbers of adapters run in turns in one engine,
on the same arrivals and lengths, so that a ratio to the fewest is one of the same minutes. The
adapters are made in memory and enter by the engine's own insertion, each with its own copy.

    python -m tests.benchmarks.slora --out FILE [--adapters 5,1000,2000] [--rate 33] [--seconds 60]
    python -m tests.benchmarks.slora --shape tiny --device cpu --adapters 2,20 --seconds 3
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from engine.host_memory import total_bytes
from tests.benchmarks.cases import AdapterSpec
from tests.benchmarks.our_engine import OurEngine, Settings, Timeline, finish
from tests.benchmarks.report import Report, percentile, print_table
from tests.benchmarks.shapes import SHAPES, targets_argument

_WARM_UP_TOKENS = 32
_LOAD_AT_ONCE = 16  # the pool's form of so many adapters is in memory twice at most


@dataclass(frozen=True, slots=True)
class Arrival:
    at_s: float  # from the start of the trace
    adapter: int  # popularity: 0 is the most popular
    prompt: int  # tokens
    output: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """The times of one request, from its arrival on."""

    first_token_s: float
    total_s: float
    ended_s: float  # from the start of the trace


def make_trace(
    rate: float,
    seconds: float,
    num_adapters: int,
    *,
    cv: float,
    alpha: float,
    lengths: tuple[int, int],
    seed: int,
) -> list[Arrival]:
    """Returns the arrivals of a trace. Their times and lengths depend on the seed, the rate and the
    seconds alone: traces with other numbers of adapters differ in the adapters only."""
    times, adapters = random.Random(f"{seed} arrivals"), random.Random(f"{seed} adapters")
    # A Gamma distribution with shape 1/cv^2 has the coefficient of variation cv.
    shape = 1 / cv**2
    weights = list(accumulate(1 / place**alpha for place in range(1, num_adapters + 1)))
    trace: list[Arrival] = []
    at_s = times.gammavariate(shape, 1 / (rate * shape))
    while at_s < seconds:
        adapter = adapters.choices(range(num_adapters), cum_weights=weights)[0]
        trace.append(Arrival(at_s, adapter, times.randint(*lengths), times.randint(*lengths)))
        at_s += times.gammavariate(shape, 1 / (rate * shape))
    return trace


class Bench:
    def __init__(self, ours: OurEngine, targets: str, rank: int, vocab_size: int) -> None:
        self._ours = ours
        self._targets, self._rank = targets, rank
        self._highest = vocab_size - 16  # away from the special ids
        self._draw = random.Random(1)

    def spec(self, index: int) -> AdapterSpec:
        return AdapterSpec(self._rank, index, self._targets)

    async def load(self, count: int) -> dict[str, object]:
        """Loads all adapters into the host tier. Returns their bytes there and the seconds."""
        seconds = 0.0
        for first in range(0, count, _LOAD_AT_ONCE):
            specs = [self.spec(i) for i in range(first, min(count, first + _LOAD_AT_ONCE))]
            seconds += await self._ours.load_adapters(specs)
        loaded = set(self._ours.engine.load().adapters_on_host)
        missing = [i for i in range(count) if self.spec(i).digest not in loaded]
        if missing:
            raise SystemExit(f"the host tier holds {len(loaded)} of {count} adapters; lower it")
        tensor_bytes = self._ours.reader.tensor_bytes(self.spec(0).digest)
        return {
            "adapters": count,
            "load_s": round(seconds, 1),
            "host_bytes": self._ours.reader.pool.host_bytes_used,
            "tensor_bytes_each": tensor_bytes,
            "device_bytes": self._ours.config.adapter_pool_bytes,
        }

    async def run(self, trace: Sequence[Arrival], limit_s: float) -> list[Outcome]:
        """Sends each request at its time, whatever has become of those before it."""
        requests = [
            self._ours.request(self._prompt(one.prompt), one.output, self.spec(one.adapter).digest)
            for one in trace
        ]
        with self._ours.watch(len(requests)) as timeline:
            start_s = time.perf_counter()
            async with asyncio.TaskGroup() as submits:
                for one, request in zip(trace, requests, strict=True):
                    delay_s = start_s + one.at_s - time.perf_counter()
                    if delay_s > 0:
                        await asyncio.sleep(delay_s)
                    submits.create_task(self._ours.engine.submit(request))
            await finish(timeline, limit_s)
        ids = [request.request_id for request in requests]
        return _outcomes(trace, ids, timeline, start_s)

    def _prompt(self, length: int) -> tuple[int, ...]:
        return tuple(self._draw.choices(range(10, self._highest), k=length))


def _outcomes(
    trace: Sequence[Arrival], ids: Sequence[str], timeline: Timeline, start_s: float
) -> list[Outcome]:
    outcomes = []
    for one, request_id in zip(trace, ids, strict=True):
        times = timeline.times_s[request_id]
        if len(times) != one.output:
            raise RuntimeError(f"{request_id} has {len(times)} of {one.output} tokens")
        arrived_s = start_s + one.at_s
        outcomes.append(Outcome(times[0] - arrived_s, times[-1] - arrived_s, times[-1] - start_s))
    return outcomes


def figures(outcomes: Sequence[Outcome], seconds: float) -> dict[str, object]:
    """Returns the figures of one trace: requests/s until the last has ended, requests/s within the
    time of the arrivals, and latencies from the moment of arrival."""
    first = [1000 * one.first_token_s for one in outcomes]
    total = [one.total_s for one in outcomes]
    last_s = max(one.ended_s for one in outcomes)
    return {
        "requests": len(outcomes),
        "requests_per_s": round(len(outcomes) / last_s, 3),
        "ended_while_arriving_per_s": round(
            sum(one.ended_s <= seconds for one in outcomes) / seconds, 3
        ),
        "last_ended_s": round(last_s, 2),
        "ttft_ms": {f"p{p}": round(percentile(first, p), 1) for p in (50, 95, 99)},
        "total_s": {f"p{p}": round(percentile(total, p), 2) for p in (50, 95, 99)},
    }


async def measure(args: argparse.Namespace, report: Report) -> None:
    shape = SHAPES[args.shape]
    others: dict[str, object] = {
        "adapter_pool_bytes": args.pool_bytes,
        "adapter_host_bytes": int(total_bytes() * args.host),
        "max_lora_rank": max(16, args.rank),
    }
    settings = Settings(
        shape,
        args.work / args.shape,
        device=args.device,
        max_num_seqs=args.seqs,
        max_num_batched_tokens=args.batched_tokens,
        memory_fraction=args.memory,
        enable_prefix_caching=True,
        others=others,
    )
    counts = [int(count) for count in args.adapters.split(",")]
    ours = OurEngine(settings, "on")
    try:
        bench = Bench(ours, args.targets, args.rank, shape.vocab_size)
        load = ours.engine.load()
        report.emit(start_s=round(ours.start_s, 2), num_blocks=load.num_blocks)
        report.emit(part="adapters", **await bench.load(max(counts)))
        await _measure_traces(args, bench, ours, counts, report)
    finally:
        ours.close()


def _warm_up_trace(args: argparse.Namespace, num_adapters: int) -> list[Arrival]:
    """Returns requests that all come at once: every size of a step up to theirs, few tokens."""
    draw = random.Random(0)
    longest = min(args.longest, _WARM_UP_TOKENS)
    return [
        Arrival(
            0.0,
            place % num_adapters,
            draw.randint(args.shortest, args.longest),
            draw.randint(1, longest),
        )
        for place in range(args.seqs)
    ]


async def _measure_traces(
    args: argparse.Namespace, bench: Bench, ours: OurEngine, counts: Sequence[int], report: Report
) -> None:
    lengths = (args.shortest, args.longest)

    def trace_of(rate: float, seconds: float, count: int, seed: int) -> list[Arrival]:
        return make_trace(
            rate, seconds, count, cv=args.cv, alpha=args.zipf, lengths=lengths, seed=seed
        )

    await bench.run(_warm_up_trace(args, max(counts)), args.limit)
    rates: dict[int, list[float]] = {count: [] for count in counts}
    rows = []
    for number in range(args.rounds):
        for count in counts:
            copies = ours.engine.load().num_adapter_copies
            trace = trace_of(args.rate, args.seconds, count, number)
            outcomes = await bench.run(trace, args.seconds + args.limit)
            line = figures(outcomes, args.seconds)
            rate, ttft, total = line["requests_per_s"], line["ttft_ms"], line["total_s"]
            assert isinstance(rate, float)
            assert isinstance(ttft, dict)
            assert isinstance(total, dict)
            rates[count].append(rate)
            to_fewest = round(rate / rates[counts[0]][number], 3)
            report.emit(
                part="trace",
                round=number,
                adapters=count,
                used=len({one.adapter for one in trace}),
                copies_to_device=ours.engine.load().num_adapter_copies - copies,
                to_fewest=to_fewest,
                **line,
            )
            rows.append((count, rate, to_fewest, ttft["p50"], ttft["p95"], total["p50"]))
    report.emit(
        benchmark="slora",
        ratios={
            str(count): round(
                statistics.median(
                    a / b for a, b in zip(rates[count], rates[counts[0]], strict=True)
                ),
                3,
            )
            for count in counts
        },
    )
    header = ("adapters", "requests/s", "to fewest", "TTFT p50 ms", "p95", "total p50 s")
    print_table(header, rows)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="file that gets every line, too")
    parser.add_argument("--shape", choices=SHAPES, default="llama-2-7b")
    parser.add_argument("--adapters", default="5,1000,2000", help="numbers of them, by comma")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--targets", type=targets_argument, default="q_proj,k_proj,v_proj,o_proj")
    parser.add_argument("--rate", type=float, default=33.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=60.0, help="of arrivals, each trace")
    parser.add_argument(
        "--rounds", type=int, default=1, help="each number of adapters once in each"
    )
    parser.add_argument(
        "--cv", type=float, default=1.0, help="variation of the arrivals' distances"
    )
    parser.add_argument("--zipf", type=float, default=1.0, help="exponent of the popularity")
    parser.add_argument("--shortest", type=int, default=8, help="tokens of a prompt and an answer")
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds after the last arrival")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--seqs", type=int, default=256)
    parser.add_argument("--batched-tokens", type=int, default=2048)
    parser.add_argument("--memory", type=float, default=0.8, help="share of the device")
    parser.add_argument(
        "--pool-bytes", type=int, help="adapters on the device; as the engine's own"
    )
    parser.add_argument("--host", type=float, default=0.75, help="share of the host for adapters")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "engine-bench")
    args = parser.parse_args()
    return args


def main() -> None:
    args = parse_args()
    report = Report(args.out)
    report.emit_machine("slora", shape=args.shape, arguments=sys.argv[1:])
    asyncio.run(measure(args, report))


if __name__ == "__main__":
    main()

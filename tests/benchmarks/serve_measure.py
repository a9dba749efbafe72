"""What clients of a running server see: rates, first tokens, gaps, and the pauses of newcomers."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

from tests.benchmarks.report import percentile, spread
from tests.benchmarks.serve_base import BASE
from tests.benchmarks.serve_client import (
    Load,
    Stream,
    check,
    connect,
    make_request,
    run_in_processes,
    run_load,
)
from tests.benchmarks.side_stream import cpu_seconds

NUM_OTHERS = 32
QUIET_S = 1.0  # between two newcomers
NEWCOMER_TOKENS = 8
PROMPT_LETTERS = 256


def measure_streams(load: Load, rounds: int, num_clients: int) -> dict[str, object]:
    """The round with the median time counts; the gaps are those of all rounds."""
    rates, gaps_ms, ttft_ms = [], [], []
    num_events = 0
    before, began_s = cpu_seconds(), time.monotonic()
    for number in range(rounds):
        seed = 1000 * load.streams + 10 * len(load.models) + number
        seen = run_in_processes(replace(load, seed=seed), num_clients)
        check(seen)
        span_s = max(s.times_s[-1] for s in seen) - min(s.sent_s for s in seen)
        rates.append(load.streams * load.tokens / span_s)
        num_events += sum(stream.num_events for stream in seen)
        gaps_ms += [1000 * gap for stream in seen for gap in stream.gaps_s()]
        ttft_ms += [1000 * (stream.times_s[0] - stream.sent_s) for stream in seen]
    wall_s = time.monotonic() - began_s
    used = {k: round((v - before.get(k, 0.0)) / wall_s, 2) for k, v in cpu_seconds().items()}
    gaps = spread(gaps_ms, 2) if gaps_ms else {}  # none if each answer came in one read
    return {
        "streams": load.streams,
        "adapters": sum(model != BASE for model in load.models),
        "output_tokens_per_s": round(statistics.median(rates), 1),
        "rounds": [round(rate, 1) for rate in rates],
        "ttft_ms": spread(ttft_ms, 2),
        "gap_ms": gaps,
        "gap_p99_to_p50": round(gaps["p99"] / gaps["p50"], 2) if gaps_ms else None,
        "events_a_token": round(num_events / (rounds * load.streams * load.tokens), 3),
        "cores_used": used,
    }


async def measure_arrivals(port: int, adapters: Sequence[str], tokens: int) -> dict[str, object]:
    """32 streams of the base; newcomers of the base and of unused adapters, in turns."""
    draw = random.Random(7)
    known = [Stream() for _ in range(NUM_OTHERS)]
    readers = [await connect(port, stream) for stream in known]
    for reader in readers:
        reader.send(make_request(BASE, tokens, PROMPT_LETTERS, draw))
    await asyncio.sleep(QUIET_S)
    quiet_from_s = time.monotonic()
    await asyncio.sleep(2 * QUIET_S)
    usual_ms = _gaps_ms(known, quiet_from_s, time.monotonic())
    pauses: dict[str, list[float]] = {"base": [], "adapter": []}
    first_token_ms: dict[str, list[float]] = {"base": [], "adapter": []}
    for i, adapter in enumerate(adapters):
        for kind, model in (("base", BASE), ("adapter", f"{BASE}:{adapter}")):
            began_s = time.monotonic()
            newcomer = Load(port, 1, (model,), NEWCOMER_TOKENS, seed=100 + i)
            stream = (await run_load(newcomer, began_s))[0]
            check([stream])
            longest_ms = max(_gaps_ms(known, began_s, stream.times_s[-1]), default=0.0)
            pauses[kind].append(longest_ms)
            first_token_ms[kind].append(1000 * (stream.times_s[0] - stream.sent_s))
            await asyncio.sleep(QUIET_S)
    are_running = not any(reader.done.done() for reader in readers)
    for reader in readers:
        reader.close()
    p99 = percentile(usual_ms, 99)
    return {
        "others": NUM_OTHERS,
        "ran_throughout": are_running,
        "usual_gap_ms": spread(usual_ms, 2),
        "longest_gap_base_ms": [round(value, 2) for value in pauses["base"]],
        "longest_gap_adapter_ms": [round(value, 2) for value in pauses["adapter"]],
        "ttft_base_ms": [round(value, 1) for value in first_token_ms["base"]],
        "ttft_adapter_ms": [round(value, 1) for value in first_token_ms["adapter"]],
        "worst_adapter_to_usual_p99": round(max(pauses["adapter"]) / p99, 2),
        "worst_base_to_usual_p99": round(max(pauses["base"]) / p99, 2),
    }


def _gaps_ms(streams: Sequence[Stream], first_s: float, last_s: float) -> list[float]:
    return [
        1000 * (b - a)
        for stream in streams
        for a, b in zip(stream.times_s, stream.times_s[1:], strict=False)
        if b >= first_s and a <= last_s
    ]

"""Measurements by clients of a running server: rates, first tokens, gaps, pauses by newcomers."""

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
    StreamReader,
    check,
    check_status,
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
    """Measures rounds of equal streams: their median rate, and the first tokens and gaps of all
    rounds."""
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


class Others:
    """Streams of the base that run throughout. Some that come near their end are replaced between
    two newcomers, never beside one."""

    def __init__(self, port: int, tokens: int, count: int = NUM_OTHERS) -> None:
        self._port, self._tokens = port, tokens
        self._draw = random.Random(7)
        self._open: list[tuple[Stream, StreamReader]] = []
        self.seen = [Stream() for _ in range(count)]
        self._new = self.seen.copy()

    async def start(self) -> None:
        for stream in self._new:
            reader = await connect(self._port, stream)
            reader.send(make_request(BASE, self._tokens, PROMPT_LETTERS, self._draw))
            self._open.append((stream, reader))
        while not all(stream.num_events > 2 for stream in self._new):
            check_status(self._new)
            await asyncio.sleep(0.01)
        await asyncio.sleep(QUIET_S)

    async def renew(self) -> int:
        """Replaces the streams that have fewer than half of their tokens left. Returns their
        number."""
        old = [one for one in self._open if one[0].num_events > self._tokens / 2]
        for one in old:
            self._open.remove(one)
            one[1].close()
        if old:
            self._new = [Stream() for _ in old]
            self.seen += self._new
            await self.start()
        return len(old)

    @property
    def are_running(self) -> bool:
        return not any(reader.done.done() for _, reader in self._open)

    def close(self) -> None:
        for _, reader in self._open:
            reader.close()


async def measure_arrivals(port: int, adapters: Sequence[str], tokens: int) -> dict[str, object]:
    """Measures newcomers of the base and of unused adapters, in turns, beside 32 streams of the
    base."""
    others = Others(port, tokens)
    await others.start()
    quiet_from_s = time.monotonic()
    await asyncio.sleep(2 * QUIET_S)
    usual_ms = _gaps_ms(others.seen, quiet_from_s, time.monotonic())
    if not usual_ms:
        raise RuntimeError(f"no stream had two tokens in {2 * QUIET_S:g} s")
    pauses: dict[str, list[float]] = {"base": [], "adapter": []}
    first_token_ms: dict[str, list[float]] = {"base": [], "adapter": []}
    renewed, ran_throughout = 0, True
    for i, adapter in enumerate(adapters):
        for kind, model in (("base", BASE), ("adapter", f"{BASE}:{adapter}")):
            renewed += await others.renew()
            began_s = time.monotonic()
            stream = await newcomer(port, model, seed=100 + i)
            ran_throughout &= others.are_running
            longest_ms = max(_gaps_ms(others.seen, began_s, stream.times_s[-1]), default=0.0)
            pauses[kind].append(longest_ms)
            first_token_ms[kind].append(1000 * (stream.times_s[0] - stream.sent_s))
            await asyncio.sleep(QUIET_S)
    others.close()
    p99 = percentile(usual_ms, 99)
    return {
        "others": NUM_OTHERS,
        "renewed": renewed,
        "ran_throughout": ran_throughout,
        "usual_gap_ms": spread(usual_ms, 2),
        "longest_gap_base_ms": [round(value, 2) for value in pauses["base"]],
        "longest_gap_adapter_ms": [round(value, 2) for value in pauses["adapter"]],
        "ttft_base_ms": [round(value, 1) for value in first_token_ms["base"]],
        "ttft_adapter_ms": [round(value, 1) for value in first_token_ms["adapter"]],
        "worst_adapter_to_usual_p99": round(max(pauses["adapter"]) / p99, 2),
        "worst_base_to_usual_p99": round(max(pauses["base"]) / p99, 2),
    }


async def measure_idle_arrivals(port: int, adapters: Sequence[str]) -> dict[str, object]:
    """Measures the first token of unused adapters on an idle server, after one of the base each."""
    first_token_ms: dict[str, list[float]] = {"base": [], "adapter": [], "again": []}
    for i, adapter in enumerate(adapters):
        model = f"{BASE}:{adapter}"
        for kind, asked in (("base", BASE), ("adapter", model), ("again", model)):
            stream = await newcomer(port, asked, seed=200 + i)
            first_token_ms[kind].append(1000 * (stream.times_s[0] - stream.sent_s))
    return {f"ttft_{k}_ms": [round(v, 1) for v in values] for k, values in first_token_ms.items()}


async def newcomer(port: int, model: str, seed: int) -> Stream:
    """Returns one whole stream of few tokens, sent now."""
    load = Load(port, 1, (model,), NEWCOMER_TOKENS, PROMPT_LETTERS, seed)
    stream = (await run_load(load, time.monotonic()))[0]
    check([stream])
    return stream


def _gaps_ms(streams: Sequence[Stream], first_s: float, last_s: float) -> list[float]:
    return [
        1000 * (b - a)
        for stream in streams
        for a, b in zip(stream.times_s, stream.times_s[1:], strict=False)
        if b >= first_s and a <= last_s
    ]

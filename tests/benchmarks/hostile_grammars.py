"""Streams beside hostile constraints: the demo's server, over HTTP, on this machine.

Rounds of three windows that take turns: 16 ordinary streams alone; beside them every constraint of
`hostile_specs`, one at a time; and all of them at once. The figures are the gaps between two events
of one stream within the window, medians over the rounds after the first. A constraint has to be
refused with 400 or to give an answer; it is new in each window, so that nothing remembers it.

    python -m tests.benchmarks.hostile_grammars --out FILE [--rounds 3] [--home FOLDER] [--url URL]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from serve_app.cli.demo.prepare import BASE_NAME
from tests.benchmarks.adversary_client import Reply, post, send
from tests.benchmarks.hostile_specs import HOSTILE, salted
from tests.benchmarks.report import Report, percentile, print_table
from tests.demo_server import ROOT, run_cli, serving, write_config

PATH = "/v1/completions"
SPEC_S = 300.0  # for one constraint, whose answer waits behind the others
VARIANTS = ("none", "one at a time", "all at once")
QUANTILES = (50, 99, 99.9)


@dataclass(slots=True)
class Gaps:
    """The gaps between events of streams, while they count."""

    is_counting: bool = False
    gaps_s: list[float] = field(default_factory=list)
    num_cut: int = 0  # streams that ended in an error, or were refused


class Streams:
    """Ordinary streams that begin anew when they end."""

    def __init__(self, port: int, count: int, tokens: int) -> None:
        self._port, self._tokens = port, tokens
        self.seen = Gaps()
        self._has_event = [asyncio.Event() for _ in range(count)]
        self._tasks = [asyncio.create_task(self._run(number)) for number in range(count)]

    async def next_events(self) -> None:
        """Returns when each stream has had one more event."""
        for event in self._has_event:
            event.clear()
        await asyncio.gather(*(event.wait() for event in self._has_event))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, number: int) -> None:
        body = {"model": BASE_NAME, "prompt": f"Stream {number}:", "max_tokens": self._tokens}
        options = {"stream": True, "ignore_eos": True, "temperature": 1.0, "seed": number}
        request = post(PATH, body | options)
        while True:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            try:
                writer.write(request)
                await self._read(reader, number)
            finally:
                writer.close()

    async def _read(self, reader: asyncio.StreamReader, number: int) -> None:
        last_s: float | None = None
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                now_s = time.perf_counter()
                if last_s is not None and self.seen.is_counting:
                    self.seen.gaps_s.append(now_s - last_s)
                last_s = now_s
                self._has_event[number].set()
            elif line.startswith(b"data: [DONE]"):
                return
            elif line.startswith(b"event: error"):
                break
        self.seen.num_cut += 1
        await asyncio.sleep(0.2)


@dataclass(slots=True)
class Told:
    """The outcomes of one constraint over all windows."""

    outcomes: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, list[float]] = field(default_factory=dict)  # by variant
    words: str = ""  # of the newest refusal

    def add(self, variant: str, reply: Reply) -> bool:
        """Returns True if the constraint was refused, or followed within the limits."""
        self.outcomes[reply.word] += 1
        self.seconds.setdefault(variant, []).append(reply.seconds)
        error = reply.json().get("error")
        if isinstance(error, dict):
            self.words = " ".join(str(error["message"]).split())[:120]
        return reply.status in (200, 400)


class Attack:
    def __init__(self, port: int, output: int) -> None:
        self._port, self._output = port, output
        self.told = {name: Told() for name in HOSTILE}
        self.failures: list[str] = []

    async def none(self, salt: str, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def one_at_a_time(self, salt: str, seconds: float) -> None:
        for name in HOSTILE:
            await self._send(name, salt, VARIANTS[1])

    async def all_at_once(self, salt: str, seconds: float) -> None:
        await asyncio.gather(*(self._send(name, salt, VARIANTS[2]) for name in HOSTILE))

    async def _send(self, name: str, salt: str, variant: str) -> None:
        body = {"model": BASE_NAME, "prompt": "Answer:", "max_tokens": self._output, "seed": 1}
        request = post(PATH, body | salted(HOSTILE[name], salt))
        reply = await send(self._port, request, SPEC_S)
        if not self.told[name].add(variant, reply):
            self.failures.append(f"{name}: {reply.word} {reply.body[:200]!r}")


def figures(seen: Gaps, seconds: float) -> dict[str, object]:
    gaps_ms = [1000 * gap for gap in seen.gaps_s]
    found: dict[str, object] = {f"p{q:g}": round(percentile(gaps_ms, q), 1) for q in QUANTILES}
    return {
        "gaps_ms": found | {"max": round(max(gaps_ms), 1)},
        "tokens_per_s": round(len(gaps_ms) / seconds, 1),
        "num_gaps": len(gaps_ms),
        "cut_streams": seen.num_cut,
    }


async def measure(args: argparse.Namespace, port: int, report: Report) -> dict[str, object]:
    streams, attack = Streams(port, args.streams, args.tokens), Attack(port, args.output)
    windows: dict[str, Callable[[str, float], Awaitable[None]]] = dict(
        zip(VARIANTS, (attack.none, attack.one_at_a_time, attack.all_at_once), strict=True)
    )
    found: dict[str, list[dict[str, object]]] = {name: [] for name in VARIANTS}
    try:
        await streams.next_events()
        for number in range(args.rounds + 1):
            turn = number % len(VARIANTS)
            for variant in (*VARIANTS[turn:], *VARIANTS[:turn]):
                streams.seen = seen = Gaps(is_counting=True)
                began_s = time.perf_counter()
                await windows[variant](f"{os.getpid()}-{number}-{variant}", args.seconds)
                seconds = time.perf_counter() - began_s
                await streams.next_events()  # a gap belongs to the window that it began in
                seen.is_counting = False
                line = figures(seen, seconds) | {"seconds": round(seconds, 1)}
                is_first = number == 0
                report.emit(round=number, variant=variant, is_warm_up=is_first, **line)
                if not is_first:
                    found[variant].append(line)
    finally:
        await streams.close()
    for name, told in attack.told.items():
        seconds_of = {key: round(statistics.median(s), 3) for key, s in told.seconds.items()}
        report.emit(spec=name, outcomes=dict(told.outcomes), seconds=seconds_of, refusal=told.words)
    medians = {name: _medians(lines) for name, lines in found.items()}
    return {"variants": medians, "failures": attack.failures}


def _medians(lines: list[dict[str, object]]) -> dict[str, float]:
    gaps = [line["gaps_ms"] for line in lines]
    names = [*(f"p{q:g}" for q in QUANTILES), "max"]
    return {
        name: statistics.median(one[name] for one in gaps if isinstance(one, dict))
        for name in names
    }


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="file that gets every line, too")
    parser.add_argument("--rounds", type=int, default=3, help="after the first, which is apart")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=400, help="of a stream, which begins anew")
    parser.add_argument("--output", type=int, default=24, help="tokens of a constrained answer")
    parser.add_argument("--seconds", type=float, default=20.0, help="of the streams alone")
    parser.add_argument("--home", type=Path, help="with the demo; by default a new one")
    parser.add_argument("--url", help="a demo server that runs already")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    report = Report(args.out)
    report.emit_machine("hostile_grammars", arguments=sys.argv[1:])
    with ExitStack() as stack:
        url = args.url
        if url is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            home = args.home
            if home is None:
                home = folder / "home"
                run_cli(home, "demo")
            config = folder / "quickstart.yaml"
            url = write_config(ROOT / "configs" / "quickstart.yaml", config, device="cpu")
            stack.enter_context(serving(home, config, url))
        port = urlsplit(url).port
        assert port is not None
        line = asyncio.run(measure(args, port, report))
    is_kept = not line["failures"]
    report.emit(
        benchmark="hostile_grammars",
        specs=len(HOSTILE),
        load_average=round(os.getloadavg()[0], 1),
        **line,
        **{"pass": is_kept},
    )
    variants = json.loads(json.dumps(line["variants"]))
    print_table(
        ("variant", "p50 ms", "p99 ms", "p99.9 ms", "max ms"),
        [(name, *values.values()) for name, values in variants.items()],
    )
    return int(not is_kept)


if __name__ == "__main__":
    raise SystemExit(main())

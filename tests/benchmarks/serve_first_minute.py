"""The first minute of a server: `serve --first-minute`.

The server starts twice, with an empty cache of compiled kernels and with the one that the first
start left. Each time: the seconds until it is ready, with the loading of the weights apart; rounds
of streams from then on, of which a warm server makes equal ones; and the first tokens of adapters
that were never used, their files in the disk cache, on the idle server and beside 32 streams. The
clients of a round start within 2 s after the one before it has ended.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tests.benchmarks.report import Report, print_table, spread
from tests.benchmarks.serve_base import BASE
from tests.benchmarks.serve_client import Load, check, run_in_processes
from tests.benchmarks.serve_measure import measure_arrivals, measure_idle_arrivals
from tests.benchmarks.serve_sides import Ours, Vllm

# The folders of compiled code: Triton's, the CUDA driver's, torch.compile's and vLLM's.
_CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "CUDA_CACHE_PATH": "cuda",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "VLLM_CACHE_ROOT": "vllm",
}
_MOST_STREAMS_OF_ADAPTERS = 32


def measure_first_minute(
    args: argparse.Namespace,
    side: Ours | Vllm,
    names: Sequence[str],
    environment: dict[str, str],
    report: Report,
) -> None:
    """Measures both starts. `names`: adapters that were never used, four times `--cold` of them
    after those of the rounds."""
    used, cold = names[: args.adapters], names[args.adapters :]
    rows: list[tuple[object, ...]] = []
    # Not in the home: its path is in no key of a cache, and it must outlive the first server.
    with tempfile.TemporaryDirectory(prefix="kernel-cache-") as folder:
        caches = {name: str(Path(folder) / below) for name, below in _CACHES.items()}
        for number, state in enumerate(("empty", "filled")):
            mine = cold[2 * number * args.cold :][: 2 * args.cold]
            began_s = time.monotonic()
            with side.serving(environment | caches, is_timed=True) as port:
                ready_s = time.monotonic() - began_s
                parts = side.start_parts()
                fields = {"side": side.name, "shape": args.shape, "cache": state}
                weights_s = parts["weights_s"]
                rest_s = None if weights_s is None else round(ready_s - weights_s, 2)
                report.emit(
                    part="start", **fields, ready_s=round(ready_s, 2), rest_s=rest_s, **parts
                )
                lines = _rounds(args, port, used)
                for line in lines:
                    report.emit(part="first_rounds", **fields, **line)
                idle, beside = mine[: args.cold], mine[args.cold :]
                report.emit(
                    part="cold_adapters_idle",
                    **fields,
                    **asyncio.run(measure_idle_arrivals(port, idle)),
                )
                arrivals = asyncio.run(measure_arrivals(port, beside, args.arrival_tokens))
                report.emit(part="cold_adapters_beside_streams", **fields, **arrivals)
            rows += [
                (state, round(ready_s, 1), line["streams"], line["adapters"], *_row(line))
                for line in lines
            ]
    header = ("cache", "ready s", "streams", "adapters", "first tokens/s", "last", "first/last")
    print_table((*header, "worst gap ms, first", "last"), rows)


def _rounds(
    args: argparse.Namespace, port: int, adapters: Sequence[str]
) -> list[dict[str, object]]:
    """Runs the rounds of the base, then those of adapters. Returns a line for each kind."""
    most = max(int(count) for count in args.streams.split(","))
    kinds = [(most, (BASE,))]
    if adapters:
        models = tuple(f"{BASE}:{name}" for name in adapters)
        kinds.append((min(most, _MOST_STREAMS_OF_ADAPTERS), models))
    return [
        _rounds_of(Load(port, count, models, args.tokens, args.letters), args.rounds, args.clients)
        for count, models in kinds
    ]


def _rounds_of(load: Load, rounds: int, num_clients: int) -> dict[str, object]:
    rates, gaps_ms, usual_gaps_ms, ttft_ms = [], [], [], []
    for number in range(rounds):
        seed = 5000 + 10 * len(load.models) + number
        seen = run_in_processes(replace(load, seed=seed), num_clients)
        check(seen)
        span_s = max(s.times_s[-1] for s in seen) - min(s.sent_s for s in seen)
        rates.append(round(load.streams * load.tokens / span_s, 1))
        gaps = [1000 * gap for stream in seen for gap in stream.gaps_s()]
        gaps_ms.append(round(max(gaps, default=0.0), 1))
        usual_gaps_ms.append(spread(gaps, 2))
        ttft_ms.append(spread([1000 * (s.times_s[0] - s.sent_s) for s in seen], 1))
    return {
        "streams": load.streams,
        "adapters": sum(model != BASE for model in load.models),
        "output_tokens_per_s": rates,
        "first_to_last": round(rates[0] / rates[-1], 3),
        "worst_gap_ms": gaps_ms,
        "gap_ms": usual_gaps_ms,
        "ttft_ms": ttft_ms,
    }


def _row(line: dict[str, object]) -> tuple[object, ...]:
    rates, gaps = line["output_tokens_per_s"], line["worst_gap_ms"]
    assert isinstance(rates, list)
    assert isinstance(gaps, list)
    return rates[0], rates[-1], line["first_to_last"], gaps[0], gaps[-1]

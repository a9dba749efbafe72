"""The parts of a time to first token: the server's figures of each request beside its client's
clock, and the router's expectation beside the result.

One server; prompts of three lengths for some adapters, more than its memory holds, arrive open loop
at parts of what it can do. `parts`: the terms that were measured, their sum against the client's
time to the first token. `expected`: the score's terms when the replica was chosen, their sum
against the time from there to the first token. Differences are of each request, then the median.

    python -m tests.benchmarks.explain --out FILE                     (the demo, two engines)
    python -m tests.benchmarks.explain --shape llama-3-8b --out FILE  (random weights, one GPU)
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.benchmarks import overload_server
from tests.benchmarks.overload_client import Clients, Flow, Load, Outcome, send
from tests.benchmarks.overload_server import Served, Setting
from tests.benchmarks.report import Report, print_table, spread
from tests.benchmarks.serve_base import BASE, prepare_home, write_config
from tests.benchmarks.serve_sides import serving
from tests.benchmarks.shapes import SHAPES
from tests.ports import free_port

PARTS = ("prepare", "fair", "route", "adapter", "queue", "prefill", "deliver")
TERMS = ("queue", "adapter", "prefill", "way")
FROM_CHOICE = ("adapter", "queue", "prefill")  # the parts after the replica was chosen
TARGET = 0.10
WARM_PART = 0.2  # of a load, until it counts


@contextmanager
def server(args: argparse.Namespace, home: Path, port: int) -> Iterator[Served]:
    if args.shape is None:
        setting = Setting(False, args.replicas, args.rows, 0, 4.0, args.adapters)
        served = overload_server.prepare(home, setting)
        config = overload_server.write_config(home, served, setting, port)
        with overload_server.server(home, config, port, haproxy=False):
            yield Served(served.base, served.adapters[: args.adapters])
        return
    names = prepare_home(home, SHAPES[args.shape], args.adapters, has_weights=False, device="cuda")
    engine: dict[str, object] = {"load_format": "dummy", "max_num_seqs": args.rows}
    engine["max_num_batched_tokens"] = 2048
    pages = max(1, 3 * args.adapters // 4)
    config = write_config(home, port, ingresses=1, engine=engine, pages=pages)
    with serving(config, home / "serve.log", f"http://127.0.0.1:{port}", {}, haproxy=False):
        yield Served(BASE, tuple(names))


def models_of(served: Served) -> list[str]:
    return [served.base, *(served.model(i) for i in range(len(served.adapters)))]


def mix(
    args: argparse.Namespace, models: Sequence[str], port: int, rate: float, seed: int
) -> list[Load]:
    """Half of the prompts short, some eight times as long; all models alike."""
    loads = []
    for number, (factor, part) in enumerate(((1, 0.5), (4, 0.3), (8, 0.2))):
        flows = tuple(Flow("all", model, part * rate / len(models)) for model in models)
        letters = factor * args.letters
        loads.append(Load(port, args.seconds, args.tokens, letters, flows, seed * 10 + number))
    return loads


def capacity(args: argparse.Namespace, models: Sequence[str], port: int) -> float:
    """Requests a second: closed loop, as many workers as rows."""
    workers = max(1, args.replicas * args.rows // len(models))
    letters = round(args.letters * (0.5 + 4 * 0.3 + 8 * 0.2))  # the mean of `mix`
    flows = tuple(Flow("all", model, workers=workers) for model in models)
    seconds = args.seconds / 2
    for _ in range(2):  # the first one is a warm-up
        clients = Clients([Load(port, seconds, args.tokens, letters, flows)])
        outcomes = clients.outcomes()
        if wrong := [one for one in outcomes if not one.is_served]:
            raise SystemExit(f"{len(wrong)} of {len(outcomes)} requests failed: {wrong[0]}")
    begin_s = clients.start_s + WARM_PART * seconds
    done = [o for o in outcomes if begin_s < o.done_s <= clients.start_s + seconds]
    return len(done) / ((1 - WARM_PART) * seconds)


def figures(outcomes: Sequence[Outcome]) -> dict[str, object]:
    """Seconds, and differences as parts of what was measured."""
    told = [one for one in outcomes if one.is_served and "total" in one.timing]
    sums = [sum(one.timing[name] for name in PARTS) for one in told]
    by_client = [abs(s - one.ttft_s) / one.ttft_s for s, one in zip(sums, told, strict=True)]
    scored = [one for one in told if "expected-prefill" in one.timing]
    expected = [sum(one.timing[f"expected-{name}"] for name in TERMS) for one in scored]
    actual = [sum(one.timing[name] for name in FROM_CHOICE) for one in scored]
    by_score = [abs(e - a) / a for e, a in zip(expected, actual, strict=True)]
    return {
        "requests": len(outcomes),
        "not_served": sum(not one.is_served for one in outcomes),
        "told": len(told),
        "ttft_s": spread([one.ttft_s for one in told]),
        "parts_s": {name: spread([one.timing[name] for one in told], 5) for name in PARTS},
        "parts_to_client": spread(by_client),
        "expected_s": {
            name: spread([one.timing[f"expected-{name}"] for one in scored], 5) for name in TERMS
        },
        "expected_total_s": spread(expected, 5),
        "actual_total_s": spread(actual, 5),
        # The terms of the score are means: of one request they say where it goes, of many when.
        "medians_expected_to_actual": round(
            statistics.median(expected) / statistics.median(actual), 3
        ),
        "expected_to_actual": spread(by_score),
    }


def run(args: argparse.Namespace, home: Path) -> None:
    report = Report(args.out)
    report.emit_machine("explain", arguments=sys.argv[1:])
    port = free_port()
    rows = []
    with server(args, home, port) as served:
        models = models_of(served)
        full = capacity(args, models, port)
        report.emit(part="capacity", requests_per_s=round(full, 2))
        for number, part in enumerate(float(text) for text in args.loads.split(",")):
            loads = mix(args, models, port, part * full, number + 1)
            outcomes = send(loads)
            steady_s = outcomes[0].sent_s + WARM_PART * args.seconds
            seen = figures([one for one in outcomes if one.sent_s >= steady_s])
            report.emit(part="load", load=part, target=TARGET, **seen)
            medians = (seen["ttft_s"], seen["parts_to_client"], seen["expected_to_actual"])
            rows.append((part, *(one["p50"] for one in medians)))
    print_table(("load", "TTFT p50 s", "parts differ", "expected differs"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="file that gets every line, too")
    parser.add_argument("--shape", choices=SHAPES, help="random weights of this shape, on a GPU")
    parser.add_argument("--loads", default="0.2,0.5,0.8", help="of what the server can do")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each load")
    parser.add_argument("--replicas", type=int, default=2, help="of the demo's engine")
    parser.add_argument("--rows", type=int, default=8, help="of each replica")
    parser.add_argument("--adapters", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32, help="of an answer")
    parser.add_argument("--letters", type=int, default=32, help="of the shortest prompts")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="explain-") as folder:
        run(args, Path(folder))


if __name__ == "__main__":
    main()

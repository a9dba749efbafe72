"""HTTP streaming through the whole server beside the bare engine, and an adapter that arrives.

`serve run` with one base of random weights; clients in processes of their own hold 1 to 256 streams
(256 letters in, 128 tokens out, greedy): output tokens/s, time to the first token, gaps between
tokens; the bare engine on the same workload before it, and the ratio. Then 32 streams run while
requests come for adapters that were never used: the longest gap that the others see.

    python -m tests.benchmarks.serve --out FILE [--shape llama-3-8b] [--weights dummy]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from serve_app.cli import launch
from serve_app.config import ADMIN_TOKEN
from tests.benchmarks.children import module, relay
from tests.benchmarks.report import Report, print_table
from tests.benchmarks.serve_base import BASE, prepare_home, write_config
from tests.benchmarks.serve_client import Load, check, run_in_processes
from tests.benchmarks.serve_measure import measure_arrivals, measure_streams
from tests.benchmarks.shapes import SHAPES
from tests.serve_rig import free_port

READY_S = 300.0
LORA_STREAMS = ("32", "256")  # what is measured with adapters, too


@contextmanager
def serving(
    config: Path, log: Path, url: str, extra: dict[str, str], haproxy: bool
) -> Iterator[launch.Child]:
    """`extra`: of the server's environment. Clients that this process starts inherit the admin
    token, which they need to be told the reasons of an answer."""
    os.environ.setdefault(ADMIN_TOKEN, secrets.token_hex())
    child = launch.start(config, log, os.environ | extra, haproxy=haproxy)
    try:
        _wait_ready(child, url)
        yield child
    finally:
        launch.stop(child)


def _wait_ready(child: launch.Child, url: str) -> None:
    deadline_s = time.monotonic() + READY_S
    while True:
        text = launch.log_text(child)
        is_late = time.monotonic() > deadline_s
        if child.has_ended() or launch.failed_application(text) or is_late:
            code = child.process.poll()
            raise SystemExit(f"the server does not start (exit code {code}):\n{text[-4000:]}")
        try:
            if httpx.get(f"{url}/ready", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)


def bare_rates(args: argparse.Namespace, cases: Sequence[str], report: Report) -> dict[str, float]:
    """Case -> output tokens/s: measured now, or read from a file of `engine`."""
    if args.bare_from is not None:
        lines = Report(args.bare_from).lines()
    else:
        command = module("engine", "--shape", args.shape, "--cases", ",".join(cases))
        command += [
            "--device",
            args.device,
            "--work",
            str(args.work / "engine"),
            "--prefix-caching",
            "--batched-tokens",
            str(args.batched_tokens),
        ]
        lines = relay(command, report, timeout_s=240)
    rates = {}
    for line in lines:
        rate = line.get("output_tokens_per_s")
        is_ours = line.get("side") == "ours" and line.get("shape") == args.shape
        if is_ours and isinstance(rate, float):
            rates[str(line["case"])] = rate
    return rates


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="file that gets every line, too")
    parser.add_argument("--shape", choices=SHAPES, default="llama-3-8b")
    parser.add_argument("--weights", choices=["dummy", "file"], default="dummy")
    parser.add_argument("--streams", default="1,32,128,256")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--letters", type=int, default=256, help="of a prompt; one is a token")
    parser.add_argument("--adapters", type=int, default=8, help="in use at once, after the base")
    parser.add_argument(
        "--arrivals", type=int, default=4, help="adapters used first while others run"
    )
    parser.add_argument("--arrival-tokens", type=int, default=2400, help="of the others, at most")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--batched-tokens", type=int, default=8192, help="of a step: fewer, and prompts stall less"
    )
    parser.add_argument("--clients", type=int, default=4, help="processes")
    parser.add_argument("--ingresses", type=int, default=4, help="ingress replicas")
    parser.add_argument("--haproxy", action="store_true", help="in front, as `loraplex serve` can")
    parser.add_argument("--env", action="append", default=[], metavar="KEY=VALUE", help="server's")
    parser.add_argument("--no-bare", action="store_true")
    parser.add_argument("--bare-from", type=Path, help="a file of `engine` from this machine")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "serve-bench")
    return parser.parse_args()


def measure_server(
    args: argparse.Namespace,
    port: int,
    names: Sequence[str],
    bare: dict[str, float],
    report: Report,
) -> None:
    used, unused = names[: args.adapters], names[args.adapters :]
    run_in_processes(Load(port, 32, (BASE,), 16, args.letters), args.clients)  # warm-up
    rows = []
    plans = [(int(count), [BASE]) for count in args.streams.split(",")]
    if used:
        models = [f"{BASE}:{name}" for name in used]
        check(run_in_processes(Load(port, len(models), tuple(models), 4, args.letters), 1))
        plans += [(count, models) for count, _ in plans if str(count) in LORA_STREAMS]
    for count, models in plans:
        case = f"on-base-n{count}" if models == [BASE] else f"on-r16x{len(models)}-n{count}"
        load = Load(port, count, tuple(models), args.tokens, args.letters)
        line = measure_streams(load, args.rounds, args.clients)
        rate, of_engine = line["output_tokens_per_s"], bare.get(case)
        assert isinstance(rate, float)
        ratio = round(rate / of_engine, 3) if of_engine else None
        report.emit(part="streams", shape=args.shape, **line, bare=of_engine, to_bare=ratio)
        gaps, first = line["gap_ms"], line["ttft_ms"]
        assert isinstance(gaps, dict)
        assert isinstance(first, dict)
        rows.append((case, rate, of_engine, ratio, first["p50"], gaps.get("p50"), gaps.get("p99")))
    if unused:
        arrivals = asyncio.run(measure_arrivals(port, unused, args.arrival_tokens))
        report.emit(part="arrivals", shape=args.shape, **arrivals)
    header = ("case", "tokens/s", "bare", "ratio", "TTFT p50 ms", "gap p50 ms", "gap p99 ms")
    print_table(header, rows)


def main() -> None:
    args = parse_args()
    report = Report(args.out)
    settings = dict(pair.split("=", 1) for pair in args.env)
    report.emit_machine("serve", arguments=sys.argv[1:], shape=args.shape)
    counts = args.streams.split(",")
    cases = [f"on-base-n{count}" for count in counts]
    if args.adapters in (1, 8, 32):  # the engine's benchmark has these
        cases += [f"on-r16x{args.adapters}-n{count}" for count in counts if count in LORA_STREAMS]
    bare = {} if args.no_bare else bare_rates(args, cases, report)
    args.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.work) as folder:
        home, port = Path(folder), free_port()
        began_s = time.monotonic()
        names = prepare_home(
            home,
            SHAPES[args.shape],
            args.adapters + args.arrivals,
            has_weights=args.weights == "file",
            device=args.device,
        )
        prepared_s = time.monotonic() - began_s
        engine: dict[str, object] = {"max_num_batched_tokens": args.batched_tokens}
        if args.weights == "dummy":
            engine["load_format"] = "dummy"
        pages = args.adapters + args.arrivals
        config = write_config(home, port, ingresses=args.ingresses, engine=engine, pages=pages)
        began_s = time.monotonic()
        url = f"http://127.0.0.1:{port}"
        with serving(config, home / "serve.log", url, settings, args.haproxy):
            ready_s = time.monotonic() - began_s
            report.emit(prepared_s=round(prepared_s, 1), ready_s=round(ready_s, 1), env=settings)
            measure_server(args, port, names, bare, report)


if __name__ == "__main__":
    main()

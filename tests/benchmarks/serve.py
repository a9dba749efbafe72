"""HTTP streaming through the whole server beside the bare engine, and an adapter that arrives.

`serve run` with one base of random weights; clients in processes of their own hold 1 to 256 streams
(256 letters in, 128 tokens out, greedy): output tokens/s, time to the first token, gaps between
tokens; the bare engine on the same workload before it, and the ratio. Then 32 streams run while
requests come for adapters that were never used: the longest gap that the others see.

With `--first-minute` it is the start instead, with an empty and then with a filled kernel cache:
the seconds until the server is ready, its first rounds of streams beside its third, and the first
tokens of adapters that nobody has used. `--vllm` measures vLLM's own server by the same clients.

    python -m tests.benchmarks.serve --out FILE [--shape llama-3-8b] [--weights dummy]
    python -m tests.benchmarks.serve --out FILE --first-minute [--vllm SITE_PACKAGES]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks.children import module, relay
from tests.benchmarks.report import Report, print_table
from tests.benchmarks.serve_base import BASE
from tests.benchmarks.serve_client import Load, check, run_in_processes
from tests.benchmarks.serve_first_minute import measure_first_minute
from tests.benchmarks.serve_measure import measure_arrivals, measure_streams
from tests.benchmarks.serve_sides import Ours, Vllm
from tests.benchmarks.shapes import SHAPES

LORA_STREAMS = ("32", "256")  # also measured with adapters


def bare_rates(args: argparse.Namespace, cases: Sequence[str], report: Report) -> dict[str, float]:
    """Returns the bare engine's output tokens/s by case: measured now, or read from a file of
    `engine`."""
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
    parser.add_argument("--arrival-tokens", type=int, default=3600, help="of each of the others")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--batched-tokens", type=int, default=8192, help="of a step: fewer, and prompts stall less"
    )
    parser.add_argument("--clients", type=int, default=4, help="processes")
    parser.add_argument("--ingresses", type=int, default=4, help="ingress replicas")
    parser.add_argument(
        "--haproxy",
        action=argparse.BooleanOptionalAction,
        help="in front; by default as `loraplex serve` has it, for a base on a GPU",
    )
    parser.add_argument("--env", action="append", default=[], metavar="KEY=VALUE", help="server's")
    parser.add_argument("--no-bare", action="store_true")
    parser.add_argument("--bare-from", type=Path, help="a file of `engine` from this machine")
    parser.add_argument("--first-minute", action="store_true", help="the start, twice")
    parser.add_argument("--cold", type=int, default=4, help="unused adapters: idle, and beside 32")
    parser.add_argument("--vllm", metavar="SITE_PACKAGES", help="vLLM's server instead of ours")
    parser.add_argument(
        "--vllm-tokens", type=int, help="of a step of vLLM's; without it, as vLLM chooses"
    )
    parser.add_argument("--vllm-slots", type=int, default=32, help="its adapters on the device")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "serve-bench")
    args = parser.parse_args()
    if args.haproxy is None:
        args.haproxy = args.device == "cuda"
    return args


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
        side = "vllm" if args.vllm else "ours"
        report.emit(
            part="streams", side=side, shape=args.shape, **line, bare=of_engine, to_bare=ratio
        )
        gaps, first = line["gap_ms"], line["ttft_ms"]
        assert isinstance(gaps, dict)
        assert isinstance(first, dict)
        rows.append((case, rate, of_engine, ratio, first["p50"], gaps.get("p50"), gaps.get("p99")))
    if unused:
        arrivals = asyncio.run(measure_arrivals(port, unused, args.arrival_tokens))
        report.emit(part="arrivals", side=side, shape=args.shape, **arrivals)
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
    is_bare = not (args.no_bare or args.first_minute or args.vllm)
    bare = bare_rates(args, cases, report) if is_bare else {}
    args.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.work) as folder:
        side = Vllm(args, Path(folder)) if args.vllm else Ours(args, Path(folder))
        num_adapters = args.adapters + (4 * args.cold if args.first_minute else args.arrivals)
        began_s = time.monotonic()
        names = side.prepare(num_adapters)
        report.emit(side=side.name, prepared_s=round(time.monotonic() - began_s, 1), env=settings)
        if args.first_minute:
            measure_first_minute(args, side, names, settings, report)
            return
        began_s = time.monotonic()
        with side.serving(settings) as port:
            report.emit(side=side.name, ready_s=round(time.monotonic() - began_s, 1))
            measure_server(args, port, names, bare, report)


if __name__ == "__main__":
    main()

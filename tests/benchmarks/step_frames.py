"""The cost of sending every ingress a step, in the engine's process, by the number of ingresses.

`IngressLinks.send` over real sockets on loopback, to a process that only reads: the time of
the call, which encodes, and the processor time of a whole step with what the event loop does.
Once with all links idle, once with tokens of 64 sequences for one of them. 200 adapters in memory,
two prefixes come and go with each step.

    python -m tests.benchmarks.step_frames [--links 0 1 2 8 32] [--steps 2000]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import time

import uvloop

from engine.types import EngineLoad, StepOutput, TokenOutput
from serve_app.messages import StreamAddress
from serve_app.stream.client import IngressLinks
from tests.benchmarks.report import emit, emit_machine

NUM_ADAPTERS = 200
NUM_SEQUENCES = 64
DIGESTS = tuple(f"{i:064x}" for i in range(NUM_ADAPTERS))
STEP_S = 0.002  # from one to the next: the reader keeps up


class Sink(asyncio.Protocol):
    pass


async def read_and_forget() -> None:
    server = await asyncio.get_running_loop().create_server(Sink, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def make_step(number: int) -> StepOutput:
    load = EngineLoad(
        num_running=NUM_SEQUENCES,
        num_blocks=100_000,
        num_free_blocks=90_000,
        num_steps=number,
        adapters_on_device=DIGESTS[:50],
        adapters_on_host=DIGESTS[:],
        step_fixed_s=0.006,
        step_token_s=4e-5,
        step_sequence_s=3e-5,
    )
    return StepOutput((), load, (number << 40, number << 41), (number << 42, number << 43))


async def measure(port: int, num_links: int, num_steps: int) -> None:
    links = IngressLinks("engine", lambda *_: None, lambda _: None)
    opened = [
        await links.open(StreamAddress("127.0.0.1", port, "token", f"ingress{i}"))
        for i in range(num_links)
    ]
    figures: dict[str, float] = {}
    for name in ("idle", "tokens"):
        times_us: list[float] = []
        cpu_s = time.process_time()
        for number in range(num_steps):
            step = make_step(number)
            outputs = {}
            if name == "tokens" and opened:
                outputs[opened[0]] = [
                    TokenOutput(f"{i:032x}", 0, number, (number,)) for i in range(NUM_SEQUENCES)
                ]
            began_s = time.perf_counter()
            links.send(step, outputs)
            times_us.append((time.perf_counter() - began_s) * 1e6)
            await asyncio.sleep(STEP_S)
        cpu_s = time.process_time() - cpu_s
        figures[f"{name}_cpu_us"] = round(cpu_s / num_steps * 1e6, 1)
        figures[f"{name}_us"] = round(statistics.median(times_us), 1)
        figures[f"{name}_p99_us"] = round(statistics.quantiles(times_us, n=100)[98], 1)
    links.close()
    emit(links=num_links, **figures)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--links", type=int, nargs="+", default=[0, 1, 2, 8, 32])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--sink", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.sink:
        uvloop.run(read_and_forget())
        return
    emit_machine("step_frames")
    command = [sys.executable, "-m", "tests.benchmarks.step_frames", "--sink"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as sink:
        try:
            assert sink.stdout is not None
            port = int(sink.stdout.readline())
            for num_links in args.links:
                uvloop.run(measure(port, num_links, args.steps))
        finally:
            sink.kill()


if __name__ == "__main__":
    main()

"""A base comes and goes while another one streams: what its streams see; what a cold start costs.

`loraplex serve` with one base of random weights on the CPU, several streams of it without a pause;
meanwhile a second base is added by an admin call, asked, removed, three times over. Gaps between
the tokens of the streams while nothing happens, while the second base starts, while it is there and
while it goes. For comparison: while a process of no part of the server imports what an engine's
process imports, and ends. Then the second base sleeps and is woken by a request: time to its first
token.

    python -m tests.benchmarks.base_swap --out FILE [--streams 4] [--rounds 3]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import httpx
import psutil
import torch
from safetensors.torch import save_file

from engine.model_config import read_model_config
from engine.weight_files import SINGLE_FILE
from engine.weight_shapes import expected_shapes
from registry.entities import BaseFacts
from serve_app.cli.commands.store import open_registry
from tests.benchmarks.report import Report, percentile, print_table, spread
from tests.benchmarks.serve_base import write_tokenizer
from tests.benchmarks.serve_client import Stream, connect, make_request
from tests.benchmarks.serve_home import write_serve_file
from tests.benchmarks.shapes import SHAPES, ModelShape
from tests.demo_server import DemoServer, run_cli, serving
from tests.ports import free_port

# About 25 ms a step of 4 streams on one core: a pace that readers know, with time between.
STREAMER = replace(
    SHAPES["tiny"],
    name="streamer",
    hidden_size=512,
    intermediate_size=1536,
    num_layers=16,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    vocab_size=8192,
)
NEWCOMER = replace(SHAPES["tiny"], name="newcomer")
QUIET_S, SETTLE_S = 20.0, 3.0
TOKENS = 1500  # of one stream; another follows it at once


def register(home: Path, shape: ModelShape) -> None:
    """Random weights, made by the engine: the file holds a placeholder."""
    folder = shape.write_config(home / shape.name)
    write_tokenizer(folder, shape.vocab_size)
    model = read_model_config(folder)
    count = sum(int(torch.Size(dims).numel()) for dims in expected_shapes(model).values())
    save_file({"placeholder": torch.zeros(1)}, folder / SINGLE_FILE)
    facts = BaseFacts(shape.architecture, count, shape.max_len)
    open_registry(None).register_base(folder, shape.name, facts=facts)


def write_config(home: Path, port: int) -> Path:
    engine = {
        "load_format": "dummy",
        "device": "cpu",
        "dtype": "float32",
        "num_threads": 1,
        "max_model_len": 2048,
        "max_num_seqs": 16,
        "kv_cache_bytes": 256 * 1024**2,
        "adapter_pool_bytes": 16 * 1024**2,
    }
    return write_serve_file(home, port, {"models": [{"name": STREAMER.name, "engine": engine}]})


class Streams:
    """Keeps so many streams of one base open, in a thread of its own; every token's moment."""

    def __init__(self, port: int, model: str, count: int) -> None:
        self.failed: list[str] = []
        self.num_complete = 0
        self._port, self._model, self._count = port, model, count
        self._seen: list[Stream] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> Streams:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def gaps_ms(self, spans: Sequence[tuple[float, float]]) -> list[float]:
        """Returns the gaps between two tokens of one stream, of which the second is in a span."""
        return [
            1000 * (after - before)
            for stream in tuple(self._seen)
            for before, after in pairwise(tuple(stream.times_s))
            if any(begin <= after <= end for begin, end in spans)
        ]

    async def _run(self) -> None:
        await asyncio.gather(*(self._stream_on(number) for number in range(self._count)))

    async def _stream_on(self, number: int) -> None:
        draw = random.Random(number)
        while not self._is_over.is_set():
            stream = Stream()
            self._seen.append(stream)
            reader = await connect(self._port, stream)
            reader.send(make_request(self._model, TOKENS, 32, draw))
            while not reader.done.done() and not self._is_over.is_set():
                await asyncio.wait([reader.done], timeout=0.1)
            if not reader.done.done():
                reader.close()
            elif stream.is_complete and not stream.error and " 200 " in stream.status:
                self.num_complete += 1
            else:
                self.failed.append(f"{stream.status} {stream.error}")


class Admin:
    """The admin calls, and what of the second base failed."""

    def __init__(self, server: DemoServer) -> None:
        token = (server.home / "admin_token").read_text().strip()
        headers = {"authorization": f"Bearer {token}"}
        self._client = httpx.Client(base_url=server.url, headers=headers, timeout=120)
        self.failed: list[str] = []

    def add(self) -> None:
        engine = {"load_format": "dummy", "device": "cpu", "num_threads": 1}
        sizes = {"kv_cache_bytes": 64 * 1024**2, "adapter_pool_bytes": 16 * 1024**2}
        body = {"name": NEWCOMER.name, "engine": engine | sizes}
        self._client.post("/admin/bases", json=body).raise_for_status()
        self.wait("running")

    def remove(self) -> None:
        self._client.delete(f"/admin/bases/{NEWCOMER.name}").raise_for_status()
        self.wait(None)

    def sleep(self) -> None:
        while True:
            answer = self._client.post(f"/admin/bases/{NEWCOMER.name}/sleep")
            if answer.status_code != 409:  # until the ingress reported our last request's end
                break
            time.sleep(0.2)
        answer.raise_for_status()
        self.wait("asleep")
        time.sleep(SETTLE_S)  # its processes end

    def wait(self, state: str | None) -> None:
        deadline_s = time.monotonic() + 120
        while True:
            lines = self._client.get("/admin/bases").json()["bases"]
            now = next((one["state"] for one in lines if one["name"] == NEWCOMER.name), None)
            if now == state:
                return
            assert time.monotonic() < deadline_s, lines
            time.sleep(0.1)

    def first_token_s(self) -> float:
        """Returns the time of a request to the second base, which must be answered whole."""
        body = {"model": NEWCOMER.name, "prompt": "abc", "max_tokens": 16, "stream": True}
        began_s, first_s = time.monotonic(), None
        with self._client.stream("POST", "/v1/completions", json=body) as answer:
            lines = []
            for text in answer.iter_lines():
                if first_s is None and text.startswith("data: {"):
                    first_s = time.monotonic()
                lines.append(text)
        if answer.status_code != 200 or "data: [DONE]" not in lines or first_s is None:
            self.failed.append(f"{answer.status_code} {lines[:3]}")
        return (first_s or time.monotonic()) - began_s


@dataclass(slots=True)
class Phase:
    """All rounds of one phase."""

    spans: list[tuple[float, float]] = field(default_factory=list)
    busy_s: float = 0.0  # of all cores, by whomever
    waited_s: float = 0.0  # the streaming engine's threads, ready and without a core
    loads: list[float] = field(default_factory=list)

    @contextmanager
    def round(self, engine: Path) -> Iterator[None]:
        began_s, busy_s, waited_s = time.monotonic(), busy_seconds(), waited_seconds(engine)
        yield
        self.waited_s += waited_seconds(engine) - waited_s
        self.spans.append((began_s, time.monotonic()))
        self.busy_s += busy_seconds() - busy_s
        self.loads.append(round(os.getloadavg()[0], 2))

    def figures(self, gaps_ms: list[float], usual_p99_ms: float) -> dict[str, object]:
        seconds = [end - begin for begin, end in self.spans]
        return {
            "gaps": len(gaps_ms),
            "gap_ms": spread(gaps_ms, 1),
            "above_twice_the_usual_p99": sum(gap > 2 * usual_p99_ms for gap in gaps_ms),
            "seconds": [round(one, 2) for one in seconds],
            "busy_cores": round(self.busy_s / sum(seconds), 2),
            "engine_waits_for_cores": round(self.waited_s / sum(seconds), 3),
            "load_averages": self.loads,
        }


def busy_seconds() -> float:
    """Returns those of the machine since its start. The file begins: user, nice, system, idle."""
    fields = [int(text) for text in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    return (sum(fields[:8]) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def engine_process(server: DemoServer) -> Path:
    """Returns the folder of /proc of the only engine that runs yet."""
    found = [
        child.pid
        for child in psutil.Process(server.process.pid).children(recursive=True)
        if " ".join(child.cmdline()).startswith("ray::EngineActor")
    ]
    assert len(found) == 1, found
    return Path("/proc") / str(found[0])


def waited_seconds(process: Path) -> float:
    """Returns the sum over its threads, from the kernel's count of nanoseconds on a queue."""
    counts = [path.read_text().split() for path in process.glob("task/*/schedstat")]
    return sum(int(count[1]) for count in counts) / 1e9


def import_elsewhere(niceness: int) -> None:
    """Imports the packages of an engine's process in a process that does nothing else."""
    command = ["nice", "-n", str(niceness), sys.executable, "-c"]
    subprocess.run([*command, "import ray.serve, mlflow, torch, engine.factory"], check=True)


def measure_swap(admin: Admin, streams: Streams, engine: Path, rounds: int, report: Report) -> None:
    phases: dict[str, Phase] = {}

    def phase(name: str) -> AbstractContextManager[None]:
        return phases.setdefault(name, Phase()).round(engine)

    time.sleep(SETTLE_S)
    for _ in range(rounds):
        with phase("quiet"):
            time.sleep(QUIET_S / rounds)
        with phase("second base starts"):
            admin.add()
        with phase("second base there"):
            for _ in range(5):
                admin.first_token_s()
        with phase("second base goes"):
            admin.remove()
        for niceness in (0, 10):
            with phase(f"imports elsewhere, nice {niceness}"):
                import_elsewhere(niceness)
        time.sleep(SETTLE_S)
    usual = percentile(streams.gaps_ms(phases["quiet"].spans), 99)
    rows = []
    for name, one in phases.items():
        line = one.figures(streams.gaps_ms(one.spans), usual)
        report.emit(phase=name, **line)
        gaps = line["gap_ms"]
        assert isinstance(gaps, dict)
        rows.append((name, *gaps.values(), line["above_twice_the_usual_p99"], line["busy_cores"]))
    print_table(("phase", "p50 ms", "p99", "max", "> 2 p99", "busy cores"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="file that gets every line, too")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--label", default="", help="kept with the machine's line")
    args = parser.parse_args()
    report = Report(args.out)
    report.emit_machine("base_swap", streams=args.streams, label=args.label)
    with tempfile.TemporaryDirectory() as folder:
        home, port = Path(folder), free_port()
        os.environ["LORAPLEX_HOME"] = folder
        for shape in (STREAMER, NEWCOMER):
            register(home, shape)
        config = write_config(home, port)
        url = f"http://127.0.0.1:{port}"
        with serving(home, config, url) as server:
            admin = Admin(server)
            with Streams(port, STREAMER.name, args.streams) as streams:
                measure_swap(admin, streams, engine_process(server), args.rounds, report)
            report.emit(
                streams_complete=streams.num_complete,
                failed_streams=streams.failed,
                failed_requests=admin.failed,
            )
            admin.add()
            cold_s = []
            for _ in range(args.rounds):
                admin.sleep()
                cold_s.append(round(admin.first_token_s(), 2))
            warm_s = [round(admin.first_token_s(), 3) for _ in range(5)]
            report.emit(
                sleep_to_first_token_s=cold_s,
                warm_first_token_s=warm_s,
                failed_requests=admin.failed,
                load_average=round(os.getloadavg()[0], 2),
            )
            run_cli(home, "bases", "list", "--url", url)


if __name__ == "__main__":
    main()

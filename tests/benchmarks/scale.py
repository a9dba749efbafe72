"""A base scales from no replica to three and back: the streams meanwhile, and the times.

A server with one base that sleeps when idle and scales between one and three engine replicas. It
falls asleep; then a client process opens many long streams, then few, then none: the base wakes,
scales up, scales down while streams run on the replicas that go, and sleeps again. Every stream is
judged token by token; replicas, queue and time to first token over time as lines and as a plot.

    python -m tests.benchmarks.scale [--out FILE] [--plot FILE]     (the demo's base on the CPU)
    python -m tests.benchmarks.scale --paced [...]    (engines that cost nothing: pace and rows)
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from serve_app.cli.demo.prepare import ADAPTER_NAMES, BASE_NAME, prepare
from serve_app.config import AutoscalingArgs, ModelArgs, default_home
from tests.benchmarks.children import module
from tests.benchmarks.report import Report, print_table, spread
from tests.benchmarks.scale_client import Phase, take_texts
from tests.benchmarks.scale_plot import draw
from tests.benchmarks.serve_home import write_serve_file
from tests.benchmarks.watch import repeating
from tests.demo_server import serving
from tests.serve_rig import (
    RIG_ADAPTER,
    RIG_BASE,
    RIG_TOKEN,
    deploy,
    free_port,
    rig_args,
    running_serve,
    wait_ready,
)

PROMPTS = ("The sea was", "Once upon a time", "Two and two", "In the morning", "A letter to")
PACE = 40  # tokens a second of every stream of the paced engine
SAMPLE_S = 0.5
GAUGES = {
    "loraplex_open_engine_requests": "open",
    "vllm:num_requests_running": "in_batch",
    "vllm:num_requests_waiting": "waiting",
    "loraplex_requests_migrated": "migrated",
}
SLEEP_LIMIT_S = 180.0


@dataclass(frozen=True, slots=True)
class Target:
    """A server that runs."""

    url: str
    token: str
    models: tuple[str, ...]


class Line(msgspec.Struct):
    """The fields that are read of a base's line of an answer."""

    state: str
    replicas: int
    wanted_replicas: int
    draining_replicas: int


class Lines(msgspec.Struct):
    bases: list[Line]


@dataclass(slots=True)
class Watcher:
    """Looks at the server twice a second."""

    target: Target
    began_s: float
    samples: list[dict[str, float]] = field(default_factory=list)

    @contextmanager
    def watching(self) -> Iterator[None]:
        headers = {"authorization": f"Bearer {self.target.token}"}
        with (
            httpx.Client(base_url=self.target.url, headers=headers, timeout=30) as client,
            repeating(lambda: self.samples.append(self._look(client)), SAMPLE_S),
        ):
            yield

    def _look(self, client: httpx.Client) -> dict[str, float]:
        line = base_line(client)
        found = dict.fromkeys(GAUGES.values(), 0.0)
        for family in text_string_to_metric_families(client.get("/metrics").text):
            if (name := GAUGES.get(family.name)) is not None:
                found[name] += sum(sample.value for sample in family.samples)
        return {
            "at_s": round(time.monotonic() - self.began_s, 2),
            "running": line.replicas,
            "wanted": line.wanted_replicas,
            "draining": line.draining_replicas,
        } | found


def base_line(client: httpx.Client) -> Line:
    answer = client.get("/admin/bases").raise_for_status().content
    lines = msgspec.json.decode(answer, type=Lines).bases
    return next(line for line in lines if line.state != "draining")


def wait_asleep(target: Target) -> float:
    headers = {"authorization": f"Bearer {target.token}"}
    began_s = time.monotonic()
    with httpx.Client(base_url=target.url, headers=headers, timeout=30) as client:
        while (line := base_line(client)).state != "asleep" or line.draining_replicas:
            assert time.monotonic() - began_s < SLEEP_LIMIT_S, "it does not fall asleep"
            time.sleep(SAMPLE_S)
    return time.monotonic() - began_s


def model_of(args: argparse.Namespace, name: str, engine: Mapping[str, object]) -> ModelArgs:
    scaling = AutoscalingArgs(
        max_replicas=args.max_replicas,
        upscale_delay_s=args.upscale_delay,
        downscale_delay_s=args.downscale_delay,
    )
    fields = {
        "name": name,
        "engine": {"max_num_seqs": args.rows, **engine},
        "idle_timeout_s": args.idle_timeout,
        "autoscaling": scaling,
    }
    return ModelArgs.model_validate(fields)


@contextmanager
def demo_server(args: argparse.Namespace) -> Iterator[Target]:
    home, port = default_home(), free_port()
    prepare(home)
    engine = {"device": "cpu", "dtype": "float32", "num_threads": 1, "max_model_len": 1024}
    sizes = {"kv_cache_bytes": "256MiB", "adapter_pool_bytes": "64MiB"}
    model = model_of(args, BASE_NAME, engine | sizes)
    arguments = {
        "models": [model.model_dump(mode="json", exclude_unset=True)],
        "fairness": {"max_queue_s": 600},  # one slow engine is no overload: others are coming
    }
    with tempfile.TemporaryDirectory() as folder:
        config = write_serve_file(Path(folder), port, arguments)
        with serving(home, config, f"http://127.0.0.1:{port}") as server:
            token = (home / "admin_token").read_text().strip()
            adapters = tuple(f"{BASE_NAME}:{name}" for name in ADAPTER_NAMES)
            yield Target(server.url, token, (BASE_NAME, *adapters))


@contextmanager
def paced_server(args: argparse.Namespace) -> Iterator[Target]:
    platform = rig_args(PACE, RIG_BASE)
    model = model_of(args, RIG_BASE, {"seed": PACE})
    platform = platform.model_copy(update={"models": (model,)})
    with running_serve() as port, tempfile.TemporaryDirectory() as folder:
        rig = deploy(port, platform, Path(folder))
        wait_ready(rig)
        yield Target(rig.url, RIG_TOKEN, (RIG_BASE, f"{RIG_BASE}:{RIG_ADAPTER}"))


def expected_texts(args: argparse.Namespace, target: Target) -> dict[str, dict[str, str]]:
    if not args.paced:
        return asyncio.run(take_texts(target.url, target.models, PROMPTS, args.tokens))
    # Token k is the prompt's letter k, over and over, whatever the adapter.
    texts = {prompt: (prompt * args.tokens)[: args.tokens] for prompt in PROMPTS}
    return dict.fromkeys(target.models, texts)


def run_client(work: Mapping[str, object]) -> list[dict[str, object]]:
    child = subprocess.Popen(
        module("scale_client"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    output, _ = child.communicate(json.dumps(work))
    if child.returncode != 0:
        raise RuntimeError(f"the client ended with {child.returncode}")
    return [json.loads(line) for line in output.splitlines()]


def measure(args: argparse.Namespace, target: Target, report: Report) -> None:
    phases = (Phase(args.high, args.high_s), Phase(args.low, args.low_s), Phase(0, 0.0))
    texts = expected_texts(args, target)
    report.emit(asleep_after_s=round(wait_asleep(target), 1))
    watcher = Watcher(target, time.monotonic())
    with watcher.watching():
        streams = run_client(
            {
                "url": target.url,
                "phases": [(phase.streams, phase.seconds) for phase in phases],
                "tokens": (args.tokens // 3, args.tokens),
                "expected": texts,
            }
        )
        ended_s = time.monotonic() - watcher.began_s
        wait_asleep(target)
        time.sleep(2 * SAMPLE_S)  # the plot ends at zero
    for sample in watcher.samples:
        report.emit(**sample)
    tell(args, report, phases, watcher, streams, ended_s)


def tell(
    args: argparse.Namespace,
    report: Report,
    phases: Sequence[Phase],
    watcher: Watcher,
    streams: Sequence[dict[str, object]],
    ended_s: float,
) -> None:
    def seconds(stream: Mapping[str, object], name: str) -> float:
        value = stream[name]
        assert isinstance(value, float)
        return value

    for stream in streams:
        if stream["verdict"] != "right":
            report.emit(**stream)
    heard = [one for one in streams if one["first_s"] is not None]
    first = [
        (
            seconds(one, "sent_s") - watcher.began_s,
            seconds(one, "first_s") - seconds(one, "sent_s"),
            str(one["verdict"]),
        )
        for one in heard
    ]
    verdicts = Counter(str(one["verdict"]) for one in streams)
    changes = [
        {"at_s": after["at_s"], "running": after["running"]}
        for before, after in pairwise([dict.fromkeys(watcher.samples[0], -1.0), *watcher.samples])
        if before["running"] != after["running"]
    ]
    settled_s = args.high_s / 2
    later = [ttft for at_s, ttft, _ in first if at_s > settled_s]
    most = max(sample["running"] for sample in watcher.samples)
    report.emit(
        phases=[asdict(phase) for phase in phases],
        streams=len(streams),
        verdicts={word: verdicts[word] for word in ("right", "error", "truncated", "mixed")},
        replicas=changes,
        most_replicas=most,
        load_ended_s=round(ended_s, 1),
        first_token_s=spread([ttft for _, ttft, _ in first], 3),
        first_token_s_after_half_of_the_load=spread(later, 3),
        longest_gap_s=spread([seconds(one, "max_gap_s") for one in heard], 3),
        **{"pass": verdicts["right"] == len(streams) and most == args.max_replicas},
    )
    print_table(("s", "replicas"), [(one["at_s"], one["running"]) for one in changes])
    if args.plot is not None:
        kind = "paced engines" if args.paced else "SmolLM2-135M on the CPU"
        title = (
            f"{kind}, {args.rows} rows a replica: {args.high} streams, then {args.low}, then none. "
            f"{verdicts['right']} of {len(streams)} right"
        )
        draw(args.plot, title, watcher.samples, first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="file that gets every line, too")
    parser.add_argument("--plot", type=Path, help="PNG")
    parser.add_argument("--paced", action="store_true")
    parser.add_argument("--rows", type=int, default=4, help="max_num_seqs of a replica")
    parser.add_argument("--max-replicas", type=int, default=3)
    parser.add_argument("--high", type=int, default=10, help="streams")
    parser.add_argument("--high-s", type=float, default=120.0)
    parser.add_argument("--low", type=int, default=3)
    parser.add_argument("--low-s", type=float, default=120.0)
    parser.add_argument("--tokens", type=int, default=600, help="of the longest stream")
    parser.add_argument("--upscale-delay", type=float, default=2.0)
    parser.add_argument("--downscale-delay", type=float, default=15.0)
    parser.add_argument("--idle-timeout", type=float, default=10.0)
    args = parser.parse_args()
    report = Report(args.out)
    report.emit_machine("scale", paced=args.paced)
    with (paced_server if args.paced else demo_server)(args) as target:
        measure(args, target, report)


if __name__ == "__main__":
    main()

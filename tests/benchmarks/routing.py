"""Routing policies in a real service of three replicas, beside what the simulator predicts.

Ray Serve, ingress, router, side streams, schedulers and caches are real; the engines' device is a
clock, so that three of them fit on two cores. Clients replay seeded traffic over HTTP, open loop,
from processes of their own, and time first tokens. The way to an idle engine and back is measured
once, before; nothing is fitted to a load.

    python -m tests.benchmarks.routing --out FILE [--policy NAMES] [--loads 0.3,0.6,0.85]
    python -m tests.benchmarks.simulate agree --measured FILE      (the prediction alone, again)
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import httpx
import numpy as np
from ray import serve

from engine.admission import EngineLimits
from registry.catalog import Catalog
from serve_app.app import build_with
from serve_app.config import EngineArgs, ModelArgs, PlatformArgs, RouterArgs
from serve_app.platform_view import Sources
from tests.benchmarks.report import Report, print_table
from tests.benchmarks.routing_client import ask_one, run_in_processes
from tests.benchmarks.simulator.agreement import Plan, compare, predict
from tests.benchmarks.simulator.calibration import Calibration
from tests.benchmarks.simulator.pace import Pace
from tests.benchmarks.simulator.records import quantiles_ms
from tests.benchmarks.simulator.setting import Setting, capacity
from tests.benchmarks.simulator.tiers import TierRoom, TierSpeeds
from tests.benchmarks.simulator.traffic import name_of
from tests.fakes_registry import FolderRegistry
from tests.serve_rig import RIG_BASE, Rig, rig_args, running_serve, wait_ready
from tests.timed_engine import Times

NUM_REPLICAS = 3
# A step of some ten milliseconds: what HTTP and Ray add is small beside it, and measured.
TIMES = Times(
    fixed_s=0.02,
    token_s=0.0003,
    sequence_s=0.001,
    copy_s=0.005,
    read_s=0.15,
    on_device=8,
    on_host=12,
    num_blocks=2048,
)
MAX_SEQS, MAX_TOKENS = 16, 512
STREAM_S = 0.001  # of the way back; the rest of what is measured is the way there
IDLE_ASKS, IDLE_PROMPT = 24, 64


def calibration(front_s: float) -> Calibration:
    return Calibration(
        "three timed engines",
        Pace(TIMES.fixed_s, TIMES.token_s, TIMES.sequence_s),
        EngineLimits(4096, 257, TIMES.num_blocks * 16, MAX_SEQS, MAX_TOKENS),
        TIMES.runs_ahead,
        TierSpeeds(TIMES.copy_s, TIMES.read_s, 0.0),
        TierRoom(TIMES.on_device, TIMES.on_host, 1 << 20),
        front_s,
        STREAM_S,
        {"front_s": f"median of {IDLE_ASKS} requests to the idle service, less their step"},
    )


def platform(policy: str) -> PlatformArgs:
    model = ModelArgs(
        name=RIG_BASE,
        replicas=NUM_REPLICAS,
        engine=EngineArgs(max_num_seqs=MAX_SEQS, max_num_batched_tokens=MAX_TOKENS),
        router=RouterArgs(policy=policy),
        graceful_shutdown_timeout_s=1,
    )
    return rig_args(100, RIG_BASE).model_copy(update={"models": (model,)})


@contextmanager
def service(policy: str, num_adapters: int) -> Iterator[Rig]:
    with running_serve() as port, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        registry = FolderRegistry(folder)
        base = registry.add_base(RIG_BASE)
        TIMES.write(folder / base.digest)
        names = [name_of(number) for number in range(num_adapters)]
        adapters = tuple(replace(registry.add_adapter(one, base), rank=16) for one in names)
        registry.write(Catalog((base,), adapters))
        sources = Sources(partial(FolderRegistry, folder), "tests.timed_engine:open_timed_engine")
        serve.run(build_with(platform(policy), sources), name="api", route_prefix="/")
        rig = Rig(port, registry)
        wait_ready(rig)
        _wait_known(rig)
        yield rig


def _wait_known(rig: Rig) -> None:
    """Waits until requests are answered and every engine has reported to the ingress."""
    deadline_s = time.monotonic() + 60
    body = {"model": RIG_BASE, "prompt": "warm", "max_tokens": 2, "ignore_eos": True}
    with httpx.Client(base_url=rig.url, timeout=30) as client:
        while time.monotonic() < deadline_s:
            if client.post("/v1/completions", json=body).status_code == 200:
                time.sleep(3)  # the engines' first heartbeats
                return
            time.sleep(0.2)
    raise TimeoutError("the service answers nothing")


def idle_front_s(rig: Rig) -> float:
    async def ask_all() -> list[float]:
        found = []
        for number in range(IDLE_ASKS):
            found.append(await ask_one(rig.port, RIG_BASE, IDLE_PROMPT, number))
            await asyncio.sleep(0.1)
        return found

    step_s = Pace(TIMES.fixed_s, TIMES.token_s, TIMES.sequence_s).step_s(IDLE_PROMPT, 0, 0)
    return max(0.0, statistics.median(asyncio.run(ask_all())) - step_s - STREAM_S)


def measure(policy: str, plan: Plan, num_processes: int) -> tuple[dict[str, float], float]:
    """(quantiles of the time to the first token, the front's share at idle)."""
    with service(policy, plan.num_adapters) as rig:
        front_s = idle_front_s(rig)
        seen = run_in_processes(plan, rig.port, RIG_BASE, num_processes)
    if seen.failures:
        raise SystemExit(f"{len(seen.failures)} requests failed: {seen.failures[0]}")
    if seen.late_s > 0.1:
        sys.stderr.write(f"the clients were late by up to {seen.late_s:.2f} s\n")
    return quantiles_ms(np.asarray(seen.ttft_s)), front_s


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="file that gets every line, too")
    parser.add_argument("--policy", default="expected_ttft", help="names, by comma")
    parser.add_argument("--loads", default="0.3,0.6,0.85", help="of what three engines can do")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each run")
    parser.add_argument("--processes", type=int, default=2, help="of clients")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    report = Report(args.out)
    report.emit_machine("routing", arguments=sys.argv[1:])
    probe = Plan(1.0, 1, args.seed)
    full = capacity(Setting(calibration(0.005)), probe.traffic(), NUM_REPLICAS) * NUM_REPLICAS
    report.emit(part="capacity", requests_per_s=round(full, 2))
    rows = []
    for load in [float(text) for text in args.loads.split(",")]:
        plan = Plan(load * full, int(load * full * args.seconds), args.seed)
        for policy in args.policy.split(","):
            measured, front_s = measure(policy, plan, args.processes)
            numbers = calibration(front_s)
            report.emit(part="calibration", calibration=asdict(numbers), replicas=NUM_REPLICAS)
            predicted = predict(numbers, plan, policy, NUM_REPLICAS)
            report.emit(**compare(policy, load, plan, measured, predicted))
            pairs = [(measured[name], predicted[name]) for name in ("p50", "p95")]
            rows.append((policy, load, *pairs[0], *pairs[1], 1000 * front_s))
    header = ("policy", "load", "p50 ms", "simulated", "p95 ms", "simulated", "front ms")
    print_table(header, rows)


if __name__ == "__main__":
    main()

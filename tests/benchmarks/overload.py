"""Ten times more requests than the engines can take, from tenants of equal weight, one of which
sends ten times what each other does.

`loraplex serve`'s own server with two engine replicas: the demo's base on the CPU, or, with
`--paced`, paced engines whose capacity does not depend on the machine. Measured: the capacity
(closed loop), what is left of it in the overload, how evenly tenants share it, how fast the others
are told to come back, what a request for a cold adapter waits amid a flood for a hot one, memory,
health, and how soon the server is as quick as before. With `--spread` also how soon an adapter that
suddenly takes most of the traffic of three replicas is served by more than one.

    python -m tests.benchmarks.overload [--paced] [--seconds 60] [--spread] [--keys] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from serve_app.cli.launch import Child
from tests.benchmarks.keyed import give_keys
from tests.benchmarks.overload_client import Clients, Flow, Load, Outcome, send, split
from tests.benchmarks.overload_server import (
    Served,
    Setting,
    Watched,
    prepare,
    server,
    watching,
    write_config,
)
from tests.benchmarks.report import Report, print_table, spread
from tests.benchmarks.serve_home import open_home
from tests.ports import free_port

TENANTS = 5
LOUD = 10.0  # times what each other tenant sends
OVERLOAD = 10.0  # times the capacity
BOUND_S = 10.0  # FairnessArgs.max_wait_s
WARM_PART = 0.2  # of a load, until it counts
IDLE_S, IDLE_RATE, IDLE_TOKENS = 5.0, 2.0, 8
RECOVERY_S = 15.0
SPREAD_ADAPTERS, HOT_FACTOR = 50, 5.0
PARTS = ("fair", "route", "adapter", "queue", "prefill")
TARGETS = {
    "goodput": 0.95,
    "jain": 0.95,
    "shed_p99_s": 0.05,
    "cold_wait_max_s": BOUND_S,
    "recovery_s": 5.0,
}


class Bench:
    def __init__(self, args: argparse.Namespace, served: Served, port: int) -> None:
        self.args = args
        self.served = served
        self.port = port

    def load(self, seconds: float, *flows: Flow, seed: int = 0, delay_s: float = 0.0) -> Load:
        tokens, letters = self.args.tokens, self.args.letters
        return Load(self.port, seconds, tokens, letters, flows, seed, delay_s)

    def idle(self, seconds: float, *, seed: int, delay_s: float = 0.0) -> Load:
        """Two short requests a second of a tenant that nobody else is."""
        flow = Flow("idle", self.served.model(0), IDLE_RATE)
        load = self.load(seconds, flow, seed=seed, delay_s=delay_s)
        return replace(load, tokens=min(IDLE_TOKENS, load.tokens))

    def warm(self) -> None:
        """Adapters in memory, steps measured."""
        workers = self.args.replicas * self.args.rows
        flows = [Flow("warm", self.served.model(number), workers=workers) for number in range(2)]
        send([self.load(min(10.0, self.args.seconds / 4), *flows)])

    def capacity(self) -> float:
        """Output tokens a second, with half as many more requests open as there are rows."""
        workers = 3 * self.args.replicas * self.args.rows // 2
        flow = Flow("all", self.served.model(0), workers=workers)
        load = self.load(self.args.seconds / 2, flow, seed=2)
        clients = Clients(split(load, self.args.clients))
        outcomes = clients.outcomes()
        if wrong := [one for one in outcomes if not one.is_served and not one.is_shed]:
            raise RuntimeError(f"{len(wrong)} of {len(outcomes)} failed unprovoked: {wrong[0]}")
        return self.rate(outcomes, clients.start_s, load.seconds)

    def rate(self, outcomes: Sequence[Outcome], start_s: float, seconds: float) -> float:
        """Output tokens a second while the load was steady, of answers that came to their end;
        each one's tokens come evenly."""
        begin_s, end_s = start_s + WARM_PART * seconds, start_s + seconds
        parts = [
            (min(end_s, one.done_s) - max(begin_s, one.first_s)) / (one.done_s - one.first_s)
            for one in outcomes
            if one.is_served and one.first_s < end_s and one.done_s > begin_s
        ]
        return sum(parts) * self.args.tokens / (end_s - begin_s)

    def flood(self, capacity: float) -> Load:
        """All tenants want the same adapter."""
        rate = OVERLOAD * capacity / self.args.tokens
        one, hot = rate / (LOUD + TENANTS - 1), self.served.model(0)
        quiet = [Flow(f"tenant-{number}", hot, one) for number in range(1, TENANTS)]
        return self.load(self.args.seconds, Flow("tenant-0", hot, LOUD * one), *quiet, seed=3)


def measure(bench: Bench, child: Child, report: Report) -> None:
    seconds = bench.args.seconds
    bench.warm()
    idle = [one.ttft_s for one in send([bench.idle(IDLE_S, seed=1)]) if one.is_served]
    idle_s = statistics.median(idle)
    capacity = bench.capacity()
    report.emit(part="capacity", output_tokens_per_s=round(capacity, 1), idle_ttft=spread(idle))
    # Every second a request for another adapter, or as often as is half of its share.
    share = capacity / bench.args.tokens / (TENANTS + 1)
    cold_rate = min(1.0, share / 2)
    cold = bench.load(seconds, Flow("cold", bench.served.model(1), cold_rate), seed=4)
    after = bench.idle(RECOVERY_S, seed=5, delay_s=seconds)
    clients = Clients([*split(bench.flood(capacity), bench.args.clients), cold, after])
    with watching(bench.port, child) as watched:
        outcomes = clients.outcomes()
    end_s = clients.start_s + seconds
    flood = [one for one in outcomes if one.tenant.startswith("tenant-")]
    if bench.args.outcomes is not None:
        lines = [json.dumps(asdict(one)) + "\n" for one in outcomes]
        bench.args.outcomes.write_text("".join(lines))
    figures = {
        "cold_rate": round(cold_rate, 2),
        **overload_figures(bench, flood, clients.start_s),
        **goodput_figures(bench, outcomes, clients.start_s, capacity),
        **cold_figures([one for one in outcomes if one.tenant == "cold"]),
        **recovery_figures([o for o in outcomes if o.tenant == "idle"], end_s, 2 * idle_s),
    }
    report.emit(part="overload", load_average=os.getloadavg()[0], **figures)
    report.emit(part="server", **server_figures(watched))
    conclude(figures, report)


def overload_figures(bench: Bench, flood: Sequence[Outcome], start_s: float) -> dict[str, object]:
    seconds = bench.args.seconds
    steady_s = start_s + WARM_PART * seconds
    steady = [one for one in flood if one.sent_s >= steady_s]
    served = [one for one in steady if one.is_served]
    shed = [one for one in steady if one.is_shed]
    tokens = {
        f"tenant-{number}": bench.rate(
            [one for one in flood if one.tenant == f"tenant-{number}"], start_s, seconds
        )
        for number in range(TENANTS)
    }
    statuses = Counter(str(one.status) for one in flood)
    return {
        "requests": len(flood),
        "requests_per_s": round(len(flood) / seconds, 1),
        "statuses": dict(statuses),
        "broken": sum(one.status == 200 and not one.is_whole for one in flood),
        "tenants_tokens_per_s": {name: round(rate, 1) for name, rate in tokens.items()},
        "jain": round(jain(list(tokens.values())), 4),
        "shed_s": spread([one.done_s - one.sent_s for one in shed]) if shed else None,
        "without_retry_after": sum(not one.retry_after for one in shed),
        "ttft_s": spread([one.ttft_s for one in served]) if served else None,
        "parts_s": {name: spread([one.timing.get(name, 0.0) for one in served]) for name in PARTS}
        if served
        else None,
        "late_refusals": sum(one.done_s - one.sent_s > 0.5 for one in shed),
    }


def goodput_figures(
    bench: Bench, outcomes: Sequence[Outcome], start_s: float, capacity: float
) -> dict[str, object]:
    """Returns the figures of all that was served meanwhile."""
    goodput = bench.rate(outcomes, start_s, bench.args.seconds)
    return {
        "output_tokens_per_s": round(goodput, 1),
        "capacity": round(capacity, 1),
        "goodput": round(goodput / capacity, 3),
    }


def cold_figures(cold: Sequence[Outcome]) -> dict[str, object]:
    served = [one for one in cold if one.is_served]
    return {
        "cold_requests": len(cold),
        "cold_not_served": len(cold) - len(served),
        "cold_wait_s": spread([one.timing.get("fair", 0.0) for one in served]) if served else None,
        "cold_ttft_s": spread([one.ttft_s for one in served]) if served else None,
    }


def recovery_figures(idle: Sequence[Outcome], end_s: float, limit_s: float) -> dict[str, object]:
    """The moment from which four in a row were quick."""
    quick = [one.is_served and one.ttft_s <= limit_s for one in idle]
    first = next((i for i in range(len(quick) - 3) if all(quick[i : i + 4])), None)
    return {
        "recovery_s": None if first is None else round(idle[first].sent_s - end_s, 2),
        "ttft_after_s": [round(one.ttft_s, 3) for one in idle if one.is_served],
    }


def server_figures(watched: Watched) -> dict[str, object]:
    uses = {
        part: {
            "rss_mb_before": round(seen[0].rss_bytes / 1e6, 1),
            "rss_mb_max": round(max(use.rss_bytes for use in seen) / 1e6, 1),
            "rss_mb_end": round(seen[-1].rss_bytes / 1e6, 1),
            "cores": round((seen[-1].cpu_s - seen[0].cpu_s) / watched.seconds, 2),
        }
        for part, seen in watched.uses.items()
    }
    return {
        "seconds": round(watched.seconds, 1),
        "uses": uses,
        "health_s": spread(watched.health_s),
        "unhealthy_answers": watched.num_unhealthy,
    }


def jain(values: Sequence[float]) -> float:
    """1: all have the same; 1/n: one has everything."""
    squares = len(values) * sum(value * value for value in values)
    return sum(values) ** 2 / squares if squares else 0.0


def conclude(figures: dict[str, object], report: Report) -> None:
    shed, cold = figures["shed_s"], figures["cold_wait_s"]
    seen = {
        "goodput": figures["goodput"],
        "jain": figures["jain"],
        "shed_p99_s": shed["p99"] if isinstance(shed, dict) else None,
        "cold_wait_max_s": cold["max"] if isinstance(cold, dict) else None,
        "recovery_s": figures["recovery_s"],
    }
    passed = {name: _is_good(name, value) for name, value in seen.items()}
    report.emit(benchmark="overload", **seen, targets=TARGETS, **{"pass": passed})
    rows = [(name, value, TARGETS[name], passed[name]) for name, value in seen.items()]
    print_table(("", "measured", "target", "pass"), rows)


def _is_good(name: str, value: object) -> bool:
    if not isinstance(value, float | int):
        return False
    return value >= TARGETS[name] if name in ("goodput", "jain") else value <= TARGETS[name]


def measure_spread(bench: Bench, report: Report) -> None:
    """50 adapters alike; then one of them gets five times what all others get together."""
    args, models = bench.args, [bench.served.model(i) for i in range(SPREAD_ADAPTERS)]
    capacity = args.replicas * args.rows * args.pace / args.tokens  # requests a second
    seconds = min(30.0, args.seconds)
    others = 0.8 * capacity / (HOT_FACTOR + 1)
    flows = [Flow("all", model, others / len(models)) for model in models]
    hot = bench.load(seconds, Flow("all", models[0], HOT_FACTOR * others), seed=7, delay_s=IDLE_S)
    clients = Clients([bench.load(seconds + IDLE_S, *flows, seed=6), hot])
    outcomes = [one for one in clients.outcomes() if one.model == models[0] and one.is_served]
    began_s = clients.start_s + IDLE_S
    firsts: dict[str, float] = {}
    for one in outcomes:
        if one.sent_s >= began_s and one.replica:
            firsts.setdefault(one.replica, one.first_s - began_s)
    arrivals = sorted(firsts.values())
    report.emit(
        part="spread",
        adapters=len(models),
        replicas=args.replicas,
        served_by=len(firsts),
        seconds_until=[round(value, 2) for value in arrivals],
        requests=Counter(one.replica[-4:] for one in outcomes if one.sent_s >= began_s),
        ttft_s=spread([one.ttft_s for one in outcomes]),
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="file that gets every line, too")
    parser.add_argument("--outcomes", type=Path, help="file for what became of every request")
    parser.add_argument("--home", type=Path, help="kept; made where it is not there")
    parser.add_argument("--seconds", type=float, default=60.0, help="of the overload")
    parser.add_argument("--paced", action="store_true", help="engines that cost nothing")
    parser.add_argument("--haproxy", action="store_true", help="in front, as `loraplex serve` can")
    parser.add_argument("--keys", action="store_true", help="a key for each tenant")
    parser.add_argument("--spread", action="store_true", help="the hot adapter of three replicas")
    parser.add_argument("--replicas", type=int, help="default: 2 paced ones, 1 that computes")
    parser.add_argument("--rows", type=int, default=8, help="of each replica")
    parser.add_argument("--pace", type=int, default=50, help="tokens a second of a paced row")
    parser.add_argument("--tokens", type=int, help="of an answer; default: 64, or 16 unpaced")
    parser.add_argument("--letters", type=int, default=64, help="of a prompt")
    parser.add_argument("--max-queue-s", type=float, help="default: 2, or 2.5 unpaced")
    parser.add_argument("--clients", type=int, default=2, help="processes that flood")
    return parser.parse_args()


def run(args: argparse.Namespace, home: Path) -> None:
    report = Report(args.out)
    report.emit_machine("overload", arguments=sys.argv[1:])
    if args.spread:
        args.paced, args.replicas = True, 3
    # An engine that computes leaves a core to the clients, and ends an answer in a second or two:
    # what was let in before the end is not to outlast the recovery. Every tenant needs places for
    # a request or two.
    replicas, tokens, max_queue_s = (2, 64, 2.0) if args.paced else (1, 16, 2.5)
    args.replicas = args.replicas or replicas
    args.tokens = args.tokens or tokens
    args.max_queue_s = args.max_queue_s or max_queue_s
    num_adapters = SPREAD_ADAPTERS if args.spread else 2
    setting = Setting(
        *(args.paced, args.replicas, args.rows, args.pace, args.max_queue_s, num_adapters),
        has_keys=args.keys,
    )
    served = prepare(home, setting)
    port = free_port()
    config = write_config(home, served, setting, port)
    with server(home, config, port, haproxy=args.haproxy) as child:
        bench = Bench(args, served, port)
        if args.keys:
            names = "idle", "warm", "all", "cold", *(f"tenant-{n}" for n in range(TENANTS))
            give_keys(f"http://127.0.0.1:{port}", names, scopes=["infer", "admin:read"])
        if args.spread:
            measure_spread(bench, report)
        else:
            measure(bench, child, report)


def main() -> None:
    args = parse_args()
    with open_home(args.home, "overload-") as home:
        run(args, home)


if __name__ == "__main__":
    main()

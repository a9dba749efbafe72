"""The time that the ingress spends on a request's place: the fair queue and the router.

The queue holds 256 requests while one leaves it and another comes, of one or many tenants and
adapters; the router ranks the replicas of a base by `expected_ttft`, which know 1,000 adapters.
Microseconds a request, the median of several rounds.

    python -m tests.benchmarks.dispatch_cost [--out FILE]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

from serve_app.admission.fair_queue import FairQueue, QueuedRequest
from serve_app.messages import RoutingRequest
from serve_app.routing.expected_ttft import ExpectedTtft
from tests.benchmarks.report import Report
from tests.routing_factory import make_ask, make_view

WAITING = 256
QUEUES = {
    "1 tenant": (1, 1),
    "16 tenants": (16, 1),
    "256 tenants": (256, 1),
    "256 adapters": (1, 256),
}
REPLICAS = (3, 16, 1000)
ADAPTERS = 1000
ROUNDS, REPEATS = 9, 2000


def median_us(step: Callable[[], object]) -> float:
    """Returns the median over the rounds of a step's microseconds; the first round is left out."""
    rounds = []
    for _ in range(ROUNDS + 1):
        began_s = time.perf_counter()
        for _ in range(REPEATS):
            step()
        rounds.append(1e6 * (time.perf_counter() - began_s) / REPEATS)
    return round(statistics.median(rounds[1:]), 1)


def queue_step(num_tenants: int, num_adapters: int) -> Callable[[], None]:
    """Returns a step in which a newcomer waits and the next request goes and ends."""
    queue, numbers = FairQueue({}, 5.0), count()

    def add() -> None:
        number = next(numbers)
        request = RoutingRequest(
            str(number),
            100,
            adapter_name=f"adapter-{number % num_adapters}",
            tenant=f"tenant-{number % num_tenants}",
        )
        queue.cost_ahead(request, 100.0)
        queue.add_request(QueuedRequest(request, 100.0, 0.001 * number), 0.001 * number)

    for _ in range(WAITING):
        add()

    def step() -> None:
        add()
        queued = queue.pop_request(0.0)
        assert queued is not None
        queue.close(queued)

    return step


def router_step(num_replicas: int) -> Callable[[], None]:
    policy, numbers = ExpectedTtft(seed=0), count()
    views = [make_view(f"replica-{number}") for number in range(num_replicas)]

    def step() -> None:
        number = next(numbers)
        policy.rank(make_ask(adapter=f"adapter-{number % ADAPTERS}"), views, 0.001 * number)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    report = Report(parser.parse_args().out)
    report.emit_machine("dispatch_cost")
    report.emit(
        part="fair_queue",
        waiting=WAITING,
        us={name: median_us(queue_step(*counts)) for name, counts in QUEUES.items()},
    )
    report.emit(
        part="router", us={str(number): median_us(router_step(number)) for number in REPLICAS}
    )


if __name__ == "__main__":
    main()

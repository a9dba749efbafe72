"""The router's expected time to a first token against the time that comes of it, request by
request: the real engine over a virtual device, the real view and the real score.

One engine behind one ingress; prompts of three lengths for more adapters than its device holds, as
`tests.benchmarks.explain` sends them. Between the choice and the engine, and back, a constant way.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from engine.config import EngineConfig
from engine.core import Engine
from engine.types import Request, SamplingParams
from serve_app.messages import RoutingRequest
from serve_app.routing.score import Terms, expected_ttft
from serve_app.routing.view import ReplicaView
from serve_app.stream.wire import LoadSeconds
from tests.benchmarks.report import Report, percentile, print_table
from tests.benchmarks.simulator.gaps import VirtualClock, VirtualRunner
from tests.benchmarks.simulator.setting import Setting
from tests.timed_engine import TimedPool, Times

WAY_S = 0.004  # to the engine; `serve` measured 5 to 8 ms for both ways and HTTP at idle
LENGTHS = ((128, 0.5), (512, 0.3), (1024, 0.2))
NUM_OUTPUT, NUM_ADAPTERS, NUM_ON_DEVICE, NUM_ROWS = 64, 16, 12, 64
_WARM = 0.2  # of the requests, until they count
_COPY_S = 0.002


@dataclass(slots=True)
class Sent:
    """A request between the router's choice and its first token."""

    request: Request
    routing: RoutingRequest
    at_s: float
    expected: Terms
    waited_for_adapter: bool = False
    first_s: float = 0.0

    @property
    def actual_s(self) -> float:
        return self.first_s - self.at_s

    @property
    def error(self) -> float:
        """The share of the actual time by which the expectation is wrong."""
        return abs(self.expected.total_s - self.actual_s) / self.actual_s


@dataclass(frozen=True, slots=True)
class Plan:
    rate: float
    count: int
    seed: int = 1
    num_adapters: int = NUM_ADAPTERS
    runs_ahead: bool = True

    def requests(self) -> Iterator[tuple[float, Request]]:
        """Yields the times of arrival and the requests; the base is as popular as an adapter."""
        draw, now_s = random.Random(self.seed), 0.0
        lengths, weights = zip(*LENGTHS, strict=True)
        params = SamplingParams(max_tokens=NUM_OUTPUT, ignore_eos=True)
        for number in range(self.count):
            now_s += draw.expovariate(self.rate)
            length = draw.choices(lengths, weights)[0]
            prompt = tuple(draw.randrange(256) for _ in range(length))
            adapter = draw.randrange(self.num_adapters + 1)
            digest = f"adapter-{adapter}" if adapter < self.num_adapters else None
            yield now_s, Request(str(number), prompt, params, digest)


@dataclass(slots=True)
class Service:
    """An engine and the view that an ingress has of it."""

    plan: Plan
    clock: VirtualClock = field(default_factory=VirtualClock)
    on_its_way: list[Sent] = field(default_factory=list)
    open: dict[str, Sent] = field(default_factory=dict)
    done: list[Sent] = field(default_factory=list)
    engine: Engine = field(init=False)
    view: ReplicaView = field(init=False)

    def __post_init__(self) -> None:
        runner = VirtualRunner(self.clock, self.plan.seed)
        runner.runs_ahead = self.plan.runs_ahead
        on_device = NUM_ON_DEVICE
        times = Times(0.0, 0.0, 0.0, _COPY_S, 0.0, on_device, 10 * self.plan.num_adapters + 1, 1)
        runner.adapters = TimedPool(times, self.clock, self.clock.sleep)
        for number in range(self.plan.num_adapters):
            runner.adapters.insert(f"adapter-{number}")
        config = EngineConfig("", "base", max_num_batched_tokens=2048, max_num_seqs=NUM_ROWS)
        self.engine = Engine(config, runner, self.clock)
        self.view = ReplicaView("engine", self.engine.limits)
        self.view.observe(self.engine.load(), 0.0)
        self.view.observe_load_s(LoadSeconds(host=_COPY_S))

    def choose(self, now_s: float, request: Request) -> None:
        routing = RoutingRequest(
            request.request_id, len(request.prompt_token_ids), adapter=request.adapter
        )
        terms = expected_ttft(routing, self.view, now_s)
        self.view.place(routing, now_s)
        self.on_its_way.append(Sent(request, routing, now_s, terms))

    def submit_due(self) -> None:
        now_s = self.clock.now_s
        while self.on_its_way and self.on_its_way[0].at_s + WAY_S <= now_s:
            sent = self.on_its_way.pop(0)
            self.open[sent.request.request_id] = sent
            self.engine.add_request(sent.request)

    def step(self, new: Callable[[float], None]) -> None:
        """Runs a step; `new` is called with its end, before the view has the step's frame."""
        accepted = list(self.open)
        step = self.engine.step()
        now_s = self.clock.now_s
        new(now_s)
        self.view.observe(step.load, now_s)
        for name in accepted:
            self.view.unplace(name)
        for output in step.outputs:
            if output.offset == 0:
                sent = self.open.pop(output.request_id)
                sent.first_s = now_s
                self.done.append(sent)
                self.view.estimates.learn_overhead(sent.actual_s - sent.expected.there_s)
            if output.finish_reason is not None:
                self.view.record_length(output.offset + len(output.token_ids))


def run_plan(plan: Plan) -> list[Sent]:
    service, arrivals = Service(plan), list(plan.requests())
    number = 0

    def new(until_s: float) -> None:
        nonlocal number
        while number < len(arrivals) and arrivals[number][0] <= until_s:
            service.choose(*arrivals[number])
            number += 1

    while number < len(arrivals) or service.on_its_way or service.engine.has_work:
        if not service.engine.has_work:
            soonest = [sent.at_s + WAY_S for sent in service.on_its_way[:1]]
            soonest += [at_s for at_s, _ in arrivals[number : number + 1]]
            service.clock.now_s = max(service.clock.now_s, min(soonest))
            new(service.clock.now_s)
        service.submit_due()
        if service.engine.has_work:
            service.step(new)
    return service.done


def expectation(setting: Setting, report: Report, picture: Path | None) -> None:
    rows = []
    full = 75.0  # requests a second of this engine in a closed loop of 64
    for num_adapters in (0, NUM_ON_DEVICE, NUM_ADAPTERS):
        for load in (0.2, 0.5, 0.8):
            plan = Plan(load * full, setting.count(int(load * full * 60)), 1, num_adapters)
            found = run_plan(plan)
            sent = found[int(_WARM * len(found)) :]
            errors = [one.error for one in sent]
            line = {
                "adapters": num_adapters,
                "on_device": NUM_ON_DEVICE,
                "load": load,
                "requests": len(sent),
                "actual_ms": round(1000 * statistics.median(s.actual_s for s in sent), 2),
                "actual_p99_ms": round(1000 * percentile([s.actual_s for s in sent], 99), 2),
                "expected_ms": round(1000 * statistics.median(s.expected.total_s for s in sent), 2),
                "queue_ms": round(1000 * statistics.median(s.expected.queue_s for s in sent), 2),
                "way_ms": round(1000 * statistics.median(s.expected.way_s for s in sent), 2),
                "error": round(statistics.median(errors), 3),
                "error_p90": round(percentile(errors, 90), 3),
            }
            report.emit(part="run", **line)
            rows.append(tuple(line.values()))
    print_table(tuple(line), rows)

"""The real scaling rule over simulated replicas: they take a while to start, and those that go
hand their requests on.

Reports are a second old, as Serve collects them; the rule is asked twice a second.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

from engine.types import EngineLoad
from serve_app.autoscaling.policy import (
    BaseSample,
    ReplicaSample,
    ScalingArgs,
    ScalingState,
    wanted_replicas,
)
from serve_app.messages import Backlog
from tests.benchmarks.simulator.calls import Call
from tests.benchmarks.simulator.cluster import Cluster
from tests.benchmarks.simulator.engine import Engine

_EVERY_S = 0.5
_OVER_S = 5.0  # as ScalingStats: the mean of what arrives


@dataclass(slots=True)
class _Arrivals:
    """Prompt tokens that no cache had, a second: what `scaling_stats.ScalingStats` reckons."""

    at_s: float
    num_new: int = 0
    tokens_per_s: float = 0.0

    def look(self, engine: Engine, now_s: float) -> float:
        passed_s = now_s - self.at_s
        if passed_s > 0:
            num_new = max(self.num_new, engine.num_prompt_tokens - engine.num_found_tokens)
            rate = (num_new - self.num_new) / passed_s
            self.tokens_per_s += (rate - self.tokens_per_s) * (1 - exp(-passed_s / _OVER_S))
            self.num_new, self.at_s = num_new, now_s
        return self.tokens_per_s


class Scaler:
    """`curve`: (seconds, running, ordered) at every decision."""

    def __init__(self, cluster: Cluster, args: ScalingArgs, start_s: float, until_s: float) -> None:
        self.curve: list[tuple[float, int, int]] = []
        self.num_migrated = 0
        self._cluster = cluster
        self._args = args
        self._start_s = start_s
        self._until_s = until_s
        self._state = ScalingState()
        self._running = list(cluster.names)
        self._num_starting = 0
        self._num_cancelled = 0
        self._arrivals: dict[str, _Arrivals] = {}
        cluster.loop.at(0.0, self._decide)

    def _decide(self, _: object) -> None:
        cluster, now_s = self._cluster, self._cluster.loop.now_s
        gates = [ingress.gate for ingress in cluster.ingresses if ingress.gate is not None]
        backlogs = [gate.controller.backlog(now_s) for gate in gates]
        told = Backlog(
            sum(ingress.num_held for ingress in cluster.ingresses),
            sum(ingress.held_tokens for ingress in cluster.ingresses),
            sum(backlog.sent_per_s for backlog in backlogs),
            sum(backlog.refused_per_s for backlog in backlogs),
        )
        samples = tuple(self._sample(name, now_s, told) for name in self._running)
        current = len(self._running) + self._num_starting - self._num_cancelled
        num_calls = sum(cluster.engines[name].num_calls for name in self._running)
        base = BaseSample(samples, len(self._running), num_calls, 0.0)
        wanted = wanted_replicas(base, current, self._args, self._state, now_s)
        for _ in range(wanted - current):
            self._order()
        for _ in range(current - wanted):
            self._give_up()
        self.curve.append((now_s, len(self._running), wanted))
        if now_s < self._until_s:
            cluster.loop.at(now_s + _EVERY_S, self._decide)

    def _order(self) -> None:
        if self._num_cancelled:
            self._num_cancelled -= 1
            return
        self._num_starting += 1
        loop = self._cluster.loop
        loop.at(loop.now_s + self._start_s, self._started)

    def _started(self, _: object) -> None:
        self._num_starting -= 1
        if self._num_cancelled:
            self._num_cancelled -= 1
            return
        self._running.append(self._cluster.add_engine())
        self._cluster.tell_replicas(self._running)

    def _give_up(self) -> None:
        """Gives up replicas that still start, then the youngest; its requests go elsewhere."""
        if self._num_starting > self._num_cancelled:
            self._num_cancelled += 1
            return
        name = self._running.pop()
        self._cluster.tell_replicas(self._running)
        calls: list[Call] = self._cluster.engines[name].abandon()
        self.num_migrated += len(calls)
        for call in calls:
            self._cluster.resume(call)

    def _sample(self, name: str, now_s: float, told: Backlog) -> ReplicaSample:
        engine, limits = self._cluster.engines[name], self._cluster.args.calibration.limits
        load: EngineLoad = engine.load()
        arrivals = self._arrivals.setdefault(name, _Arrivals(now_s))
        return ReplicaSample(
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            queued_tokens=load.queued_tokens,
            arriving_tokens_per_s=arrivals.look(engine, now_s),
            kv_usage=load.kv_usage,
            step_fixed_s=load.step_fixed_s,
            step_token_s=load.step_token_s,
            step_sequence_s=load.step_sequence_s,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_kv_tokens=limits.max_kv_tokens,
            backlog_requests=told.num_requests,
            backlog_tokens=told.num_tokens,
            sent_per_s=told.sent_per_s,
            refused_per_s=told.refused_per_s,
        )

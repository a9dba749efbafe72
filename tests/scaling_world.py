"""A base under load in numbers: replicas with a start-up time, a queue, sequences in rows.

For tests of the scaling decision. A fluid, not events: prompts are tokens a second, and a sequence
holds its row for `row_s`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from serve_app.autoscaling.policy import (
    BaseSample,
    ReplicaSample,
    ScalingArgs,
    ScalingState,
    wanted_replicas,
)

TICK_S = 0.5
TOKEN_S = 0.0001  # a replica prefills 10,000 tokens per second and decodes none in that time
PROMPT = 1000  # tokens
MAX_NUM_SEQS = 64


@dataclass(slots=True)
class World:
    """`step` is called per tick. `history`: (seconds, ordered, running, seconds of queued work)."""

    args: ScalingArgs
    start_s: float = 10.0
    row_s: float = 2.0
    engine_queue_s: float | None = None  # the rest of the queue waits in the ingresses
    replicas: int = 1
    history: list[tuple[float, int, int, float]] = field(default_factory=list)
    _starting: list[float] = field(default_factory=list)  # when each replica will run
    _queue: float = 0.0  # tokens
    _arrivals: list[float] = field(default_factory=list)
    _state: ScalingState = field(default_factory=ScalingState)

    @property
    def ordered(self) -> int:
        return self.replicas + len(self._starting)

    @property
    def orders(self) -> list[int]:
        """The numbers that were ordered, in turn."""
        found: list[int] = []
        for _, ordered, _, _ in self.history:
            if not found or found[-1] != ordered:
                found.append(ordered)
        return found

    @property
    def num_turns(self) -> int:
        """The changes of direction: from more to fewer or from fewer to more."""
        orders = self.orders
        signs = [after > before for before, after in pairwise(orders)]
        return sum(a != b for a, b in pairwise(signs))

    def run(self, seconds: float, load: Callable[[float], float]) -> None:
        """`load` returns the prompt tokens per second at a moment of this run."""
        for tick in range(round(seconds / TICK_S)):
            self._step(load(tick * TICK_S))

    def _step(self, tokens_per_s: float) -> None:
        now_s = (self.history[-1][0] if self.history else 0.0) + TICK_S
        self.replicas += sum(at_s <= now_s for at_s in self._starting)
        self._starting = [at_s for at_s in self._starting if at_s > now_s]
        self._queue += tokens_per_s * TICK_S
        done = min(self._queue, self.replicas * TICK_S / TOKEN_S)
        self._queue -= done
        self._arrivals = [*self._arrivals, tokens_per_s][-10:]
        queue_s = self._queue * TOKEN_S / self.replicas
        sample = self._sample(done / TICK_S)
        wanted = wanted_replicas(sample, self.ordered, self.args, self._state, now_s)
        self._order(wanted, now_s)
        self.history.append((now_s, self.ordered, self.replicas, queue_s))

    def _order(self, wanted: int, now_s: float) -> None:
        while self.ordered > wanted and self._starting:
            self._starting.pop()
        self.replicas = min(self.replicas, wanted)
        self._starting += [now_s + self.start_s] * (wanted - self.ordered)

    def _sample(self, done_per_s: float) -> BaseSample:
        count = self.replicas
        at_engines, arriving = self._queue, sum(self._arrivals) / len(self._arrivals)
        if self.engine_queue_s is not None:
            at_engines = min(self._queue, self.engine_queue_s * count / TOKEN_S)
            arriving = done_per_s
        backlog = self._queue - at_engines
        rows = done_per_s / PROMPT * self.row_s
        one = ReplicaSample(
            num_running=min(MAX_NUM_SEQS, rows / count),
            num_waiting=at_engines / PROMPT / count,
            queued_tokens=at_engines / count,
            arriving_tokens_per_s=arriving / count,
            step_token_s=TOKEN_S,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=8192,
            max_kv_tokens=1e6,
            backlog_requests=backlog / PROMPT,
            backlog_tokens=backlog,
        )
        return BaseSample((one,) * count, count)

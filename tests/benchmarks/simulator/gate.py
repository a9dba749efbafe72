"""Where requests wait before the engines: the real fair queue, the real rule of when one may go.

`serve_app.routing.admission` without its coroutines: who finds no place or would wait too long is
refused, the rest goes in the queue's order as soon as an engine has room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from serve_app.routing.cost import price
from serve_app.routing.fair_queue import Entry, FairQueue
from serve_app.routing.pace import Pace
from serve_app.routing.room import has_room
from serve_app.routing.view import ReplicaViews
from tests.benchmarks.simulator.calls import Call

_OUTPUT_WEIGHT = 1 / 32  # as AdmissionQueue
_USUAL_OUTPUT_TOKENS = 128.0


@dataclass(frozen=True, slots=True)
class GateArgs:
    """`config.FairnessArgs`."""

    weights: tuple[tuple[str, float], ...] = ()
    max_wait_s: float = 10.0
    max_engine_queue_s: float = 0.5
    max_queue_s: float = 30.0
    max_waiting: int = 256  # ModelArgs.max_queued_requests


class Gate:
    """Of one ingress. `send`: to an engine, as soon as Serve lets it."""

    def __init__(self, args: GateArgs, views: ReplicaViews, send: Callable[[Call], None]) -> None:
        self._args = args
        self._views = views
        self._send = send
        self._queue = FairQueue(dict(args.weights), args.max_wait_s)
        self._pace = Pace()
        self._calls: dict[Entry, Call] = {}
        # By the call's number: tokens of output that it was charged, and when it went.
        self._open: dict[int, tuple[Entry, int, float]] = {}
        self._running_cost = 0.0
        self._mean_output = _USUAL_OUTPUT_TOKENS
        self.refused: Counter[str] = Counter()  # by tenant

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def waiting_tokens(self) -> int:
        return sum(call.num_prompt for call in self._calls.values())

    def enter(self, call: Call, now_s: float) -> None:
        rank = call.rank if call.adapter is not None else 0
        output = round(self._mean_output)
        cost = price(rank).of(call.num_prompt, output)
        is_free = not len(self._queue) and self._has_room()
        if not is_free and not self._finds_place(call, cost, now_s):
            self.refused[call.tenant] += 1
            return
        if not len(self._queue):
            self._pace.begin(now_s)
        entry = self._queue.add(call.tenant, call.adapter or "", 0, cost, now_s)
        self._calls[entry] = call
        self._open[call.index] = entry, output, now_s
        if is_free:
            self._pop(now_s)

    def look(self, now_s: float) -> None:
        """There may be room: a frame came, or an answer ended."""
        while len(self._queue) and self._has_room():
            self._pace.departed(self._pop(now_s), now_s)

    def left(self, call: Call, now_s: float) -> None:
        """Its answer ended: what it was charged is set right."""
        entry, charged, went_s = self._open.pop(call.index)
        rank = call.rank if call.adapter is not None else 0
        self._running_cost -= entry.cost
        self._queue.charge(entry, price(rank).of(0, call.num_output - charged))
        self._mean_output += _OUTPUT_WEIGHT * (call.num_output - self._mean_output)
        self._pace.ended(now_s - went_s)
        self._queue.close(entry)

    def expire(self, now_s: float) -> None:
        """Who waited twice as long as anybody should is told so. Called now and then."""
        limit_s = 2 * self._args.max_queue_s
        for entry in [e for e in self._calls if now_s - e.enqueued_s > limit_s]:
            self._expel(entry)

    def _has_room(self) -> bool:
        return has_room(self._views.replicas, (), self._args.max_engine_queue_s)

    def _pop(self, now_s: float) -> float:
        entry = self._queue.pop(now_s)
        assert entry is not None
        call = self._calls.pop(entry)
        self._open[call.index] = entry, self._open[call.index][1], now_s
        self._running_cost += entry.cost
        self._send(call)
        return entry.cost

    def _finds_place(self, call: Call, cost: float, now_s: float) -> bool:
        if len(self._queue):
            ahead = self._queue.cost_ahead(call.tenant, call.adapter or "", 0, cost)
            if (
                self._pace.wait_s(ahead, self._running_cost, now_s) or 0.0
            ) > self._args.max_queue_s:
                return False
        if len(self._queue) < self._args.max_waiting:
            return True
        rival = self._queue.rival(call.tenant, call.adapter or "", 0)
        if rival is None:
            return False
        self._expel(rival)
        return True

    def _expel(self, entry: Entry) -> None:
        call = self._calls.pop(entry)
        del self._open[call.index]
        self.refused[call.tenant] += 1
        self._queue.close(entry)

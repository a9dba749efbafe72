"""The queue of a simulated ingress: the real admission control and the real rule of capacity.
`Gate` replaces the coroutines and timers of `serve_app.admission.queue`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from serve_app.admission.capacity import has_capacity
from serve_app.admission.controller import AdmissionController, Reason, Refused
from serve_app.admission.fair_queue import QueuedRequest
from serve_app.messages import RoutingRequest
from serve_app.routing.view import ReplicaViews
from tests.benchmarks.simulator.calls import Call

_TRIM_S = 0.5  # as AdmissionQueue
_MAX_TOKENS = 1 << 20  # requested by clients; responses are shorter


@dataclass(frozen=True, slots=True)
class GateArgs:
    """`config.FairnessArgs`."""

    weights: tuple[tuple[str, float], ...] = ()
    max_wait_s: float = 10.0
    max_engine_queue_s: float = 0.5
    max_queue_s: float = 30.0
    max_waiting: int = 256  # ModelArgs.max_queued_requests


class Gate:
    """The queue of one ingress. `send` passes a call on to Serve."""

    def __init__(self, args: GateArgs, views: ReplicaViews, send: Callable[[Call], None]) -> None:
        self.controller = AdmissionController(
            dict(args.weights), args.max_wait_s, args.max_queue_s, args.max_waiting
        )
        self.refused: Counter[str] = Counter()  # by tenant
        self._args = args
        self._views = views
        self._send = send
        self._calls: dict[QueuedRequest, Call] = {}  # of the requests that wait
        self._open: dict[int, QueuedRequest] = {}  # by the call's number
        self._trimmed_s = 0.0

    def __len__(self) -> int:
        return len(self.controller)

    @property
    def waiting_tokens(self) -> int:
        return self.controller.num_waiting_tokens

    def enter(self, call: Call, now_s: float) -> None:
        request = RoutingRequest(
            call.call_id,
            call.num_prompt,
            adapter_name=call.adapter or "",
            adapter_rank=call.rank if call.adapter else 0,
            tenant=call.tenant,
        )
        try:
            queued, victim = self.controller.add_request(
                request, _MAX_TOKENS, now_s, has_capacity=self._has_capacity()
            )
        except Refused:
            self.refused[call.tenant] += 1
            return
        self._open[call.index] = queued
        if victim is not None:
            self._refuse(victim, "full", now_s)
        if queued.is_waiting:
            self._calls[queued] = call
        else:
            self._send(call)

    def look(self, now_s: float) -> None:
        """Sends calls while engines have capacity, after a frame or the end of a response."""
        while len(self.controller) and self._has_capacity():
            queued = self.controller.pop_request(now_s)
            assert queued is not None
            self._send(self._calls.pop(queued))

    def left(self, call: Call, now_s: float) -> None:
        """The response of this call has ended."""
        queued = self._open.pop(call.index)
        self.controller.set_generated(queued, call.num_output)
        self.controller.close(queued, now_s)

    def expire(self, now_s: float) -> None:
        """Refuses the calls that waited until the timeout or will wait longer. Called
        periodically."""
        limit_s = self.controller.timeout_s
        for queued in [one for one in self._calls if now_s - one.enqueued_s > limit_s]:
            self._refuse(queued, "waited", now_s)
        if now_s - self._trimmed_s >= _TRIM_S:
            self._trimmed_s = now_s
            while (queued := self.controller.unserviceable(now_s)) is not None:
                self._refuse(queued, "waited", now_s)

    def _has_capacity(self) -> bool:
        return has_capacity(self._views.replicas, (), self._args.max_engine_queue_s)

    def _refuse(self, queued: QueuedRequest, reason: Reason, now_s: float) -> None:
        self.controller.refuse(queued, reason, now_s)
        call = self._calls.pop(queued)
        del self._open[call.index]
        self.refused[call.tenant] += 1

"""The queues of an ingress replica, one for each running base: `AdmissionController` with
coroutines and timers.

A request goes to an engine as soon as a replica has capacity for it, waits for its turn, or is
refused. A request whose client leaves is removed. Each ingress replica orders its own requests;
the requests of other ingresses show in the frames of the engines.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from math import ceil

from starlette.types import Receive

from serve_app.admission.capacity import has_capacity
from serve_app.admission.controller import AdmissionController, Reason, Refused
from serve_app.admission.fair_queue import QueuedRequest
from serve_app.admission.tenants import Tenants
from serve_app.config import FairnessArgs
from serve_app.disconnects import RequestScope
from serve_app.errors import ClientGoneError, OverloadedError
from serve_app.messages import Backlog, RoutingRequest
from serve_app.metrics.ingress import QueueStats
from serve_app.routing.state import routing_state
from serve_app.routing.view import ReplicaViews

_POLL_S = 0.1  # without a frame
_TRIM_INTERVAL_S = 0.5
_MAX_RETRY_AFTER_S = 60  # OpenAI's client library does not wait longer


class AdmissionQueue:
    """All methods but `placed` run in the same event loop."""

    def __init__(
        self,
        settings: FairnessArgs,
        max_waiting: int,
        views: ReplicaViews,
        stats: QueueStats,
        base: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_engine_queue_s = settings.max_engine_queue_s
        self._views = views
        self._stats, self._base_stats = stats, stats.of_base(base)
        self._clock = clock
        self._controller = AdmissionController(
            settings.weights, settings.max_wait_s, settings.max_queue_s, max_waiting
        )
        self._turns: dict[QueuedRequest, asyncio.Future[None]] = {}  # of the requests that wait
        self._under_way: dict[str, RoutingRequest] = {}  # by call id, until a view counts it
        self._trimmed_s = 0.0
        self._soon: asyncio.Handle | None = None
        self._later: asyncio.TimerHandle | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._controller)

    @property
    def backlog(self) -> Backlog:
        return self._controller.backlog(self._clock())

    @property
    def is_idle(self) -> bool:
        """No request waits, and none is still to be charged for its output."""
        return not self._controller.num_open

    def expected_output(self, num_sequences: int, max_tokens: int) -> int:
        return self._controller.expected_output(num_sequences, max_tokens)

    def check(self, request: RoutingRequest) -> None:
        """Refuses a request early, before its prompt is tokenized. `request`: with sizes of 0.
        Raises OverloadedError."""
        try:
            self._controller.check(request, self._clock())
        except Refused as refused:
            raise self._overloaded(refused) from None

    async def add_request(
        self, request: RoutingRequest, max_tokens: int, receive: Receive
    ) -> QueuedRequest:
        """Returns when the request may be sent to an engine; `close` it when its response has
        ended. `max_tokens`: of all choices; `receive`: the client's, to notice that it leaves; the
        body must have been read. Raises OverloadedError, ClientGoneError."""
        may_go = not len(self._controller) and self._has_capacity()
        try:
            queued, victim = self._controller.add_request(
                request, max_tokens, self._clock(), has_capacity=may_go
            )
        except Refused as refused:
            raise self._overloaded(refused) from None
        if victim is not None:
            self._refuse(victim, "full")
        if queued.is_waiting:
            await self._wait(queued, receive)
        else:
            self._record_sent(queued)
        return queued

    def set_generated(self, queued: QueuedRequest, num_tokens: int) -> None:
        """Charges the tenant as the response grows. `num_tokens`: so far, of all choices."""
        if num_tokens > queued.num_generated and not queued.is_closed:
            self._stats.count_tokens(queued.request.tenant, num_tokens - queued.num_generated)
            self._controller.set_generated(queued, num_tokens)

    def close(self, queued: QueuedRequest) -> None:
        """Ends the request: its response is complete, or its client is gone. Idempotent."""
        if not queued.is_closed:
            self._forget(queued)
            self._controller.close(queued, self._clock())
            self.wake()

    def placed(self, call_id: str) -> None:
        """A replica's view counts this call from now on. From any thread."""
        self._under_way.pop(call_id, None)

    def wake(self) -> None:
        """Checks soon if engines have capacity: a frame arrived, or a response ended."""
        if self._soon is None and len(self._controller):
            self._soon = asyncio.get_running_loop().call_soon(self._send_waiting)

    async def _wait(self, queued: QueuedRequest, receive: Receive) -> None:
        loop = asyncio.get_running_loop()
        turn = self._turns[queued] = loop.create_future()
        self._base_stats.num_waiting += 1
        self._poll_later()

        def leave() -> None:
            self.close(queued)
            if not turn.done():
                turn.set_exception(ClientGoneError())

        with RequestScope() as scope:
            timer = loop.call_later(self._controller.timeout_s, self._refuse, queued, "waited")
            scope.callback(timer.cancel)
            scope.watch_client(receive, leave)
            try:
                await turn
            except BaseException:
                self.close(queued)
                raise

    def _send_waiting(self) -> None:
        """Ends the wait of as many requests as the engines have capacity for."""
        self._soon = None
        while len(self._controller) and self._has_capacity():
            queued = self._controller.pop_request(self._clock())
            assert queued is not None
            turn = self._turns.pop(queued)
            self._base_stats.num_waiting -= 1
            self._record_sent(queued)
            if not turn.done():
                turn.set_result(None)
        if len(self._controller) and self._clock() - self._trimmed_s >= _TRIM_INTERVAL_S:
            self._trim()
        self._poll_later()

    def _trim(self) -> None:
        """Refuses the requests that cannot be served in time, without waiting for their timeout."""
        self._trimmed_s = self._clock()
        while (queued := self._controller.unserviceable(self._clock())) is not None:
            self._refuse(queued, "waited")

    def _poll_later(self) -> None:
        if self._later is not None:
            self._later.cancel()
            self._later = None
        if len(self._controller):
            loop = asyncio.get_running_loop()
            self._later = loop.call_later(_POLL_S, self._send_waiting)

    def _has_capacity(self) -> bool:
        under_way = tuple(self._under_way.values())  # one bytecode: safe while `placed` runs
        return has_capacity(self._views.replicas, under_way, self._max_engine_queue_s)

    def _record_sent(self, queued: QueuedRequest) -> None:
        request = queued.request
        self._under_way[request.call_id] = request
        self._base_stats.waits.observe(queued.waited_s)
        self._stats.count_tokens(request.tenant, request.num_tokens)

    def _refuse(self, queued: QueuedRequest, reason: Reason) -> None:
        if queued.is_waiting:
            turn = self._forget(queued)
            error = self._overloaded(self._controller.refuse(queued, reason, self._clock()))
            if turn is not None and not turn.done():
                turn.set_exception(error)

    def _overloaded(self, refused: Refused) -> OverloadedError:
        self._base_stats.sheds[refused.reason] += 1
        wait_s = min(refused.wait_s, _MAX_RETRY_AFTER_S)
        return OverloadedError("Too many requests wait for this model.", max(1, ceil(wait_s)))

    def _forget(self, queued: QueuedRequest) -> asyncio.Future[None] | None:
        """Returns the future of its wait; None if it does not wait."""
        self._under_way.pop(queued.request.call_id, None)
        turn = self._turns.pop(queued, None)
        if turn is not None:
            self._base_stats.num_waiting -= 1
        return turn


class AdmissionQueues:
    def __init__(
        self,
        settings: FairnessArgs,
        ingress_id: str,
        *,
        is_proven: bool,
        has_keys: bool,
    ) -> None:
        """`is_proven`, `has_keys`: see `Tenants`."""
        self.stats = QueueStats(ingress_id, settings.weights)
        self.tenants = Tenants(settings, is_proven=is_proven, has_keys=has_keys)
        self._settings = settings
        self.app_names: Collection[str] = ()  # applications that can be called now
        self._queues: dict[str, AdmissionQueue] = {}  # by application

    def of(self, app_name: str, base: str, max_waiting: int) -> AdmissionQueue:
        """Returns the queue of an application of `base`, which the first request creates. Then the
        idle queues of applications that can no longer be called are forgotten."""
        queue = self._queues.get(app_name)
        if queue is None:
            running = self.app_names
            for name in [n for n, q in self._queues.items() if n not in running and q.is_idle]:
                del self._queues[name]
            views = routing_state(app_name).views
            queue = AdmissionQueue(self._settings, max_waiting, views, self.stats, base)
            self._queues[app_name] = queue
        return queue

    def backlog(self, app_name: str) -> Backlog:
        """Returns the requests that wait here for the engines of an application, or are refused."""
        queue = self._queues.get(app_name)
        return Backlog() if queue is None else queue.backlog

    def wake(self) -> None:
        """Checks the capacity of all bases soon: a frame arrived from some engine."""
        for queue in self._queues.values():
            queue.wake()

    def placed(self, app_name: str, call_id: str) -> None:
        """A replica's view counts this call from now on. From any thread."""
        if (queue := self._queues.get(app_name)) is not None:
            queue.placed(call_id)

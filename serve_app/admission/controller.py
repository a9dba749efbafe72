"""Admission control for the engines of a base: decides which requests wait, which go next, and
which are refused. Pure: the time is a parameter, so that the ingress, the simulator and tests share
this code.

A request is refused before it waits if its tenant already holds its share of a full queue, or if
it would have to wait longer than `max_queue_s`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from serve_app.admission.cost import token_cost
from serve_app.admission.fair_queue import FairQueue, QueuedRequest
from serve_app.admission.rates import DrainRate, Rate
from serve_app.messages import Backlog, RoutingRequest

Reason = Literal["full", "expected_wait", "waited"]

_INITIAL_OUTPUT_TOKENS = 128.0  # per sequence, until some have ended
_OUTPUT_WEIGHT = 1 / 32  # of a newly ended sequence in the mean


class Refused(Exception):
    """`wait_s`: the expected wait, as far as it is known."""

    def __init__(self, reason: Reason, wait_s: float) -> None:
        super().__init__(reason, wait_s)
        self.reason = reason
        self.wait_s = wait_s


class AdmissionController:
    def __init__(
        self,
        weights: Mapping[str, float],
        max_wait_s: float,
        max_queue_s: float,
        max_waiting: int,
    ) -> None:
        """`weights` and `max_wait_s`: see `FairQueue`."""
        self._sent, self._refused = Rate(), Rate()
        self.num_waiting_tokens = 0  # of the prompts that wait
        self.num_open = 0  # requests that wait, and requests whose response has not ended
        self._max_queue_s = max_queue_s
        self._max_waiting = max_waiting
        self._queue = FairQueue(weights, max_wait_s)
        self._drain_rate = DrainRate()
        self._mean_output = _INITIAL_OUTPUT_TOKENS
        self._running_cost = 0.0

    def __len__(self) -> int:
        """The number of requests that wait."""
        return len(self._queue)

    @property
    def timeout_s(self) -> float:
        """The longest wait: twice the expected wait that is accepted. A request reaches it if
        engines stand still, or if other tenants came after it."""
        return 2 * self._max_queue_s

    def backlog(self, now_s: float) -> Backlog:
        sent_per_s, refused_per_s = self._sent.now(now_s), self._refused.now(now_s)
        return Backlog(len(self), self.num_waiting_tokens, sent_per_s, refused_per_s)

    def check(self, request: RoutingRequest, now_s: float) -> None:
        """Raises Refused if the request would be refused even with an empty prompt."""
        if len(self._queue):
            cost = token_cost(request.adapter_rank, 0, self._mean_output)
            self._find_victim(request, cost, now_s)

    def add_request(
        self, request: RoutingRequest, max_tokens: int, now_s: float, *, has_capacity: bool
    ) -> tuple[QueuedRequest, QueuedRequest | None]:
        """Returns the queued request, and the request to `refuse` if the queue was full. It does
        not wait if the queue is empty and an engine `has_capacity`. `max_tokens`: of all choices.
        Raises Refused."""
        num_output = self.expected_output(request.num_sequences, max_tokens)
        cost = token_cost(
            request.adapter_rank, request.num_tokens, num_output, request.num_base_tokens
        )
        is_empty = not len(self._queue)
        goes_at_once = has_capacity and is_empty
        victim = None if goes_at_once else self._find_victim(request, cost, now_s)
        if is_empty:
            self._drain_rate.start(now_s)
        queued = QueuedRequest(request, cost, now_s, num_output)
        self._queue.add_request(queued, now_s)
        self.num_waiting_tokens += request.num_tokens
        self.num_open += 1
        if goes_at_once:
            self._pop(now_s)
        return queued, victim

    def expected_output(self, num_sequences: int, max_tokens: int) -> int:
        """Returns the tokens that so many sequences will probably generate."""
        return min(max_tokens, round(self._mean_output * num_sequences))

    def pop_request(self, now_s: float) -> QueuedRequest | None:
        """Returns the next request, for an engine with capacity; None if the queue is empty."""
        if not len(self._queue):
            return None
        queued = self._pop(now_s)
        self._drain_rate.record_departure(queued.cost, now_s)
        return queued

    def unserviceable(self, now_s: float) -> QueuedRequest | None:
        """Returns a request that will not be served within `timeout_s`, the newest of the tenant
        that holds most: it filled the queue alone, and has shared it since. Returns None if the
        expected waits are short enough."""
        queued = self._queue.newest_of_largest()
        if queued is None or self._wait_s(queued.request, 0.0, now_s) <= self.timeout_s:
            return None
        return queued

    def refuse(self, queued: QueuedRequest, reason: Reason, now_s: float) -> Refused:
        """Removes a waiting request and returns the exception for its client."""
        wait_s = self._wait_s(queued.request, queued.cost, now_s)
        self.close(queued, now_s)
        return self._make_refusal(reason, wait_s, now_s)

    def set_generated(self, queued: QueuedRequest, num_tokens: int) -> None:
        """Charges output beyond the expected. `num_tokens`: so far, of all choices."""
        queued.num_generated = num_tokens
        if num_tokens > queued.num_charged:
            self._charge_output(queued, num_tokens - queued.num_charged)
            queued.num_charged = num_tokens

    def close(self, queued: QueuedRequest, now_s: float) -> None:
        """Ends a request, once: its response has ended, or it does not wait any more."""
        request = queued.request
        if queued.is_waiting:
            self.num_waiting_tokens -= request.num_tokens
        else:
            self._running_cost -= queued.cost
            self._charge_output(queued, queued.num_generated - queued.num_charged)
            if queued.num_generated:
                of_one = queued.num_generated / request.num_sequences
                self._mean_output += _OUTPUT_WEIGHT * (of_one - self._mean_output)
                self._drain_rate.record_service(now_s - queued.enqueued_s - queued.waited_s)
        self._queue.close(queued)
        self.num_open -= 1
        if self.num_open == len(self._queue):
            self._running_cost = 0.0  # no request runs; rounding left a rest

    def _pop(self, now_s: float) -> QueuedRequest:
        queued = self._queue.pop_request(now_s)
        assert queued is not None
        queued.waited_s = now_s - queued.enqueued_s
        self.num_waiting_tokens -= queued.request.num_tokens
        self._running_cost += queued.cost
        self._sent.record(now_s)
        return queued

    def _charge_output(self, queued: QueuedRequest, num_tokens: int) -> None:
        self._queue.charge(queued, token_cost(queued.request.adapter_rank, 0, num_tokens))

    def _find_victim(
        self, request: RoutingRequest, cost: float, now_s: float
    ) -> QueuedRequest | None:
        """Returns the request that a newcomer evicts, None if the queue is not full. Raises
        Refused if the newcomer itself has to go."""
        wait_s = self._wait_s(request, cost, now_s)
        if wait_s > self._max_queue_s:
            raise self._make_refusal("expected_wait", wait_s, now_s)
        if len(self._queue) < self._max_waiting:
            return None
        victim = self._queue.eviction_victim(request)
        if victim is None:
            raise self._make_refusal("full", wait_s, now_s)
        return victim

    def _wait_s(self, request: RoutingRequest, cost: float, now_s: float) -> float:
        """The expected wait; 0 if not known."""
        if not len(self._queue):
            return 0.0
        ahead = self._queue.cost_ahead(request, cost)
        return self._drain_rate.wait_s(ahead, self._running_cost, now_s) or 0.0

    def _make_refusal(self, reason: Reason, wait_s: float, now_s: float) -> Refused:
        self._refused.record(now_s)
        return Refused(reason, wait_s)

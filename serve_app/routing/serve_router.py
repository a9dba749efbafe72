"""Ray Serve's request router with the product's policies: Serve keeps its queue, its limit of
ongoing requests and its health checks; the policy decides the order of the replicas.

Runs in Serve's router thread of every process that has a handle, and shares a `RoutingState` with
the ingress. No method may raise: a request whose router raised waits for ever. Calls without a
`RoutingRequest` go to any replica.

Serve fulfils the pending request that has the decision's internal id, and all calls made inside an
HTTP request share an id: all of them but the first would hang. Here a decision fulfils exactly the
request that it was made for.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from ray.serve._private.common import ReplicaID, RequestMetadata
from ray.serve._private.replica_result import ReplicaResult
from ray.serve._private.request_router.common import PendingRequest
from ray.serve._private.request_router.replica_wrapper import RunningReplica
from ray.serve.request_router import RequestRouter

from serve_app.messages import RoutingRequest, SubmitCall
from serve_app.routing.policy import Ranked, unfitness
from serve_app.routing.state import RoutingState, routing_state

logger = logging.getLogger(__name__)

_MAX_OTHERS = 16  # replicas that the policy left out, tried after its own


@dataclass(slots=True)
class _Waiting:
    pending: PendingRequest
    request: RoutingRequest | None
    ranked: Sequence[Ranked] = ()


class LoraplexRouter(RequestRouter):
    def initialize_state(self, **kwargs: object) -> None:
        """`kwargs`: `policy` and `options`, plain values."""
        self._state: RoutingState = routing_state(self._deployment_id.app_name)
        self._by_id: dict[str, RunningReplica] = {}  # by unique id
        self._by_metadata: dict[int, _Waiting] = {}  # by the identity of a request's metadata
        self._watched: set[str] = set()  # ids of calls whose routing task has a done-callback
        options = cast(dict[str, bool | int | float | str], kwargs.get("options") or {})
        self._state.set_policy(str(kwargs.get("policy")), options)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [candidate_replicas]
        # Otherwise Serve retries in a busy loop while all replicas are full.
        pending_request.routing_context.should_backoff = True
        waiting = self._by_metadata.get(id(pending_request.metadata))
        if waiting is None or waiting.request is None:
            return [_sample(candidate_replicas)]
        try:
            waiting.ranked = self._state.rank(waiting.request)
            return self._ranks(waiting.request, waiting.ranked, candidate_replicas)
        except Exception:
            logger.exception("the policy %s failed", self._state.policy_name)
            waiting.ranked = ()
            return [_sample(candidate_replicas)]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        self._by_id = {replica.replica_id.unique_id: replica for replica in replicas}
        self._state.set_replicas(self._by_id)
        super().update_replicas(replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._by_id.pop(replica_id.unique_id, None)
        self._state.set_replicas(self._by_id)

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult
    ) -> None:
        """Is called when the replica accepted the call. If its engine never reports that, the end
        of the call ends the count."""
        request = _routing_request(pending_request)
        if request is not None:
            result.add_done_callback(lambda _: self._state.unplace(request.call_id))

    def _ranks(
        self,
        request: RoutingRequest,
        ranked: Sequence[Ranked],
        candidates: Sequence[RunningReplica],
    ) -> list[list[RunningReplica]]:
        """Returns groups of replicas to try in turn: the policy's order; some replicas that it left
        out; the replicas that are probably full, as a group, because Serve probes each of them;
        last the replicas that the request should avoid."""
        by_id, seen = self._by_id, {line.replica.replica_id for line in ranked}
        free: list[list[RunningReplica]] = []
        full: list[RunningReplica] = []
        resorts: list[list[RunningReplica]] = []
        for line in ranked:
            replica = by_id.get(line.replica.replica_id)
            if replica is None:
                continue
            if unfitness(request, line.replica):
                resorts.append([replica])
            elif self._is_full(replica):
                full.append(replica)
            else:
                free.append([replica])
        avoided = [by_id[name] for name in request.avoid - seen if name in by_id]
        seen |= request.avoid
        others = [r for r in _sample(candidates) if r.replica_id.unique_id not in seen]
        return [rank for rank in (*free, others, full, *resorts, avoided) if rank]

    def _is_full(self, replica: RunningReplica) -> bool:
        num_ongoing = self.replica_queue_len_cache.get(replica.replica_id)
        return num_ongoing is not None and num_ongoing >= replica.max_ongoing_requests

    # Overrides of Serve's private hooks.

    def _add_pending_request_to_indices(self, pending_request: PendingRequest) -> None:
        """Is called in the task that routes the call: when the call begins to wait, and again each
        time that a chosen replica rejected it."""
        super()._add_pending_request_to_indices(pending_request)
        request = _routing_request(pending_request)
        self._by_metadata[id(pending_request.metadata)] = _Waiting(pending_request, request)
        if request is not None:
            self._state.unplace(request.call_id)
            self._watch(request)

    def _remove_pending_request_from_indices(self, pending_request: PendingRequest) -> None:
        super()._remove_pending_request_from_indices(pending_request)
        self._by_metadata.pop(id(pending_request.metadata), None)

    def _fulfill_next_pending_request(
        self, replica: RunningReplica, request_metadata: RequestMetadata | None = None
    ) -> None:
        waiting = self._by_metadata.get(id(request_metadata))
        if waiting is None or waiting.pending.future.done():
            return
        pending = waiting.pending
        self._cancel_routing_task_for_pending_request(pending)
        self._record_queue_wait_time(pending)
        pending.future.set_result(replica)
        self._remove_pending_request_from_indices(pending)
        if waiting.request is not None:
            self._record_choice(waiting, waiting.request, replica.replica_id.unique_id)

    def _watch(self, request: RoutingRequest) -> None:
        """Ends the count of a call that is cancelled, or fails, between the choice of its replica
        and the replica's answer: it never reaches `on_request_routed`, and no engine accepts it."""
        task, call_id = asyncio.current_task(), request.call_id
        if task is None or call_id in self._watched:
            return
        self._watched.add(call_id)

        def routed(task: asyncio.Task[object]) -> None:
            self._watched.discard(call_id)
            if task.cancelled() or task.exception() is not None:
                self._state.unplace(call_id)

        task.add_done_callback(routed)

    def _record_choice(self, waiting: _Waiting, request: RoutingRequest, replica_id: str) -> None:
        """Counts the call at the replica at once, so that the next decisions consider it."""
        try:
            self._state.decisions.add(
                request,
                replica_id,
                waiting.ranked,
                self._state.policy_name,
                waiting.pending.created_at,
                time.time(),
            )
            self._state.place(request, replica_id)
        except Exception:  # the call is on its way already
            logger.exception("a routing decision could not be recorded")


def _routing_request(pending: PendingRequest) -> RoutingRequest | None:
    for argument in (*pending.args, *pending.kwargs.values()):
        if isinstance(argument, SubmitCall):
            return argument.routing
        if isinstance(argument, RoutingRequest):
            return argument
    return None


def _sample(replicas: Sequence[RunningReplica]) -> list[RunningReplica]:
    """Returns at most 16 replicas: Serve probes each replica whose queue length is not cached."""
    many = len(replicas) > _MAX_OTHERS
    return random.sample(replicas, _MAX_OTHERS) if many else list(replicas)

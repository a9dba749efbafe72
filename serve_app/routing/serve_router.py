"""Ray Serve's request router, with our policies in it: Serve keeps its queue, its limit of ongoing
requests and its health checks, the order of the replicas is ours.

Runs in Serve's router thread of every process that has a handle; meets the ingress in
`routing_state`. Whatever happens here must not raise: a request whose router raised waits for
ever. Calls without an `RoutingRequest` go anywhere.

Serve hands a decision to the pending request with the same internal id, which all calls made inside
one HTTP request share: all but one of them would hang. Here a decision goes to the very request
that it was made for.
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
from serve_app.routing.state import RoutingState, meet

logger = logging.getLogger(__name__)

_MAX_OTHERS = 16  # of those that the policy left out, tried after its own


@dataclass(frozen=True, slots=True)
class _Settings:
    """`config.RouterArgs` as Serve hands it on."""

    policy: str
    options: dict[str, bool | int | float | str]


@dataclass(slots=True)
class _Waiting:
    pending: PendingRequest
    ask: RoutingRequest | None
    ranked: Sequence[Ranked] = ()


class LoraplexRouter(RequestRouter):
    def initialize_state(self, **kwargs: object) -> None:
        """As JSON: `policy` and `options`."""
        self._meeting: RoutingState = meet(self._deployment_id.app_name)
        self._by_id: dict[str, RunningReplica] = {}  # by unique id
        self._by_metadata: dict[int, _Waiting] = {}  # by the identity of a request's metadata
        options = cast(dict[str, bool | int | float | str], kwargs.get("options") or {})
        self._meeting.set_policy(_Settings(str(kwargs.get("policy")), options))

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [candidate_replicas]
        # Else Serve asks again at once, for ever, while all replicas are full.
        pending_request.routing_context.should_backoff = True
        waiting = self._by_metadata.get(id(pending_request.metadata))
        if waiting is None or waiting.ask is None:
            return [_some(candidate_replicas)]
        try:
            waiting.ranked = self._meeting.rank(waiting.ask)
            return self._ranks(waiting.ask, waiting.ranked, candidate_replicas)
        except Exception:
            logger.exception("the policy %s failed", self._meeting.policy_name)
            waiting.ranked = ()
            return [_some(candidate_replicas)]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        self._by_id = {one.replica_id.unique_id: one for one in replicas}
        self._meeting.keep(self._by_id)
        super().update_replicas(replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._by_id.pop(replica_id.unique_id, None)
        self._meeting.keep(self._by_id)

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult
    ) -> None:
        """The replica took it. Should the engine never say so, the end of the call does."""
        ask = _ask_of(pending_request)
        if ask is not None:
            result.add_done_callback(lambda _: self._meeting.unplace(ask.call_id))

    def _ranks(
        self, ask: RoutingRequest, ranked: Sequence[Ranked], candidates: Sequence[RunningReplica]
    ) -> list[list[RunningReplica]]:
        """The policy's order; then some that it left out; then those that are full as far as we
        know, together, for each of them is asked; last those that the request should not meet."""
        by_id, seen = self._by_id, {one.replica.replica_id for one in ranked}
        free: list[list[RunningReplica]] = []
        full: list[RunningReplica] = []
        resorts: list[list[RunningReplica]] = []
        for one in ranked:
            replica = by_id.get(one.replica.replica_id)
            if replica is None:
                continue
            if unfitness(ask, one.replica):
                resorts.append([replica])
            elif self._is_full(replica):
                full.append(replica)
            else:
                free.append([replica])
        avoided = [by_id[one] for one in ask.avoid - seen if one in by_id]
        seen |= ask.avoid
        others = [r for r in _some(candidates) if r.replica_id.unique_id not in seen]
        return [rank for rank in (*free, others, full, *resorts, avoided) if rank]

    def _is_full(self, replica: RunningReplica) -> bool:
        num_ongoing = self.replica_queue_len_cache.get(replica.replica_id)
        return num_ongoing is not None and num_ongoing >= replica.max_ongoing_requests

    # Serve's private hooks.

    def _add_pending_request_to_indices(self, pending_request: PendingRequest) -> None:
        """It waits; for the second time if the replica that was chosen turned it away. Serve calls
        this in the task that routes the call."""
        super()._add_pending_request_to_indices(pending_request)
        ask = _ask_of(pending_request)
        self._by_metadata[id(pending_request.metadata)] = _Waiting(pending_request, ask)
        if ask is not None:
            self._meeting.unplace(ask.call_id)
            if (task := asyncio.current_task()) is not None:
                task.add_done_callback(lambda ended: self._unplace_unless_routed(ask, ended))

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
        if waiting.ask is not None:
            self._chose(waiting, waiting.ask, replica.replica_id.unique_id)

    def _unplace_unless_routed(self, ask: RoutingRequest, routing: asyncio.Task[object]) -> None:
        """A call that is cancelled, or fails, between the choice of its replica and the replica's
        answer never reaches `on_request_routed`, and no engine accepts it."""
        if routing.cancelled() or routing.exception() is not None:
            self._meeting.unplace(ask.call_id)

    def _chose(self, waiting: _Waiting, ask: RoutingRequest, replica_id: str) -> None:
        """It counts there at once, so that the next decisions reckon with it."""
        try:
            self._meeting.decisions.add(
                ask,
                replica_id,
                waiting.ranked,
                self._meeting.policy_name,
                waiting.pending.created_at,
                time.time(),
            )
            self._meeting.place(ask, replica_id)
        except Exception:  # the request is on its way already
            logger.exception("a decision was not noted")


def _ask_of(pending: PendingRequest) -> RoutingRequest | None:
    for argument in (*pending.args, *pending.kwargs.values()):
        if isinstance(argument, SubmitCall):
            return argument.routing
        if isinstance(argument, RoutingRequest):
            return argument
    return None


def _some(replicas: Sequence[RunningReplica]) -> list[RunningReplica]:
    """Not all of a thousand: each whose queue is not known is asked over the network."""
    many = len(replicas) > _MAX_OTHERS
    return random.sample(replicas, _MAX_OTHERS) if many else list(replicas)

"""The policy `expected_ttft`: routes to the replica with the smallest expected time to the first
token.

Replicas that are nearly equal count as equal. Among these the order is: a replica that has the
adapter, or its home; the replica of the session; a random draw, so that several ingresses with the
same view do not all choose the same replica. An adapter is loaded away from its home only if the
replica is faster even with the whole load time: while a request queues there the load costs it
no time, but it evicts another adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.types import key_digests
from serve_app.messages import RoutingRequest
from serve_app.routing.placement import Placement
from serve_app.routing.policy import BasePolicy, Ranked, unfitness
from serve_app.routing.score import Terms, adapter_load_s, expected_ttft, work_s
from serve_app.routing.view import ReplicaView


@dataclass(frozen=True, slots=True)
class _Scored:
    cost_s: float
    terms: Terms
    is_place: bool  # it has the adapter, or it is a home and no candidate has the adapter
    replica: ReplicaView


class ExpectedTtft(BasePolicy):
    def __init__(
        self,
        seed: int | None = None,
        num_random: int = 6,
        tie_share: float = 0.05,
        tie_s: float = 0.003,
        target_usage: float = 0.5,
    ) -> None:
        """Replicas within `tie_share` or `tie_s` of the best count as equal. `target_usage`: the
        share of a replica's time that an adapter may use before it gets another home."""
        super().__init__(seed, num_random)
        for name, value in (("tie_share", tie_share), ("tie_s", tie_s)):
            if value < 0:
                raise ValueError(f"{name} is {value}, but must be 0 or more")
        if not 0 < target_usage <= 1:
            raise ValueError(f"target_usage is {target_usage}, but must be above 0, at most 1")
        self.placement = Placement(target_usage)
        self._tie_share, self._tie_s = tie_share, tie_s

    def changed(self, replica_ids: Sequence[str]) -> None:
        self.placement.change(replica_ids)

    def warm_ups(self, now_s: float) -> list[tuple[str, str]]:
        """Returns (adapter, replica) pairs: for each adapter with several homes the best home that
        does not have it."""
        wanted = []
        for adapter, homes in self.placement.wide(now_s).items():
            for replica_id in homes:
                replica = self._sampler.get(replica_id)
                if replica is not None and not replica.has_adapter(adapter):
                    wanted.append((adapter, replica_id))
                    break
        return wanted

    def _order(self, request: RoutingRequest, now_s: float) -> list[Ranked]:
        # Several adapters are at home where the first of them is.
        first = next(iter(key_digests(request.adapter)), None)
        homes = () if first is None else self.placement.homes(first, now_s)
        candidates = self._sampler.candidates(request, homes)
        # A home without the adapter is being warmed up, and does not count as a place until then.
        is_somewhere = any(replica.has_adapter(request.adapter) for replica in candidates)
        places = () if is_somewhere else homes
        scored = [self._score(request, replica, places, now_s) for replica in candidates]
        fit = [line.cost_s for line in scored if not unfitness(request, line.replica)]
        best_s = min(fit or [line.cost_s for line in scored])
        near_s = best_s + max(self._tie_s, self._tie_share * best_s)
        is_tie = sum(line.cost_s <= near_s for line in scored) > 1
        session = self._sampler.session_place(request.session)

        def key(line: _Scored) -> tuple[float, bool, bool, bool, float]:
            late_s = line.cost_s if line.cost_s > near_s else 0.0
            is_session = line.replica.replica_id == session
            is_home = line.replica.replica_id in homes
            return late_s, not line.is_place, not is_session, not is_home, self._draw.random()

        scored.sort(key=key)
        ranked = []
        for line in scored:
            reason = "soonest"
            if is_tie and line.cost_s <= near_s:
                replica_id = line.replica.replica_id
                is_home = line.is_place and replica_id in homes
                reason = "session" if replica_id == session else "home" if is_home else "tie"
            ranked.append(Ranked(line.replica, line.terms, reason))
        return ranked

    def _score(
        self, request: RoutingRequest, replica: ReplicaView, places: Sequence[str], now_s: float
    ) -> _Scored:
        terms = expected_ttft(request, replica, now_s)
        if replica.replica_id in places or replica.has_adapter(request.adapter):
            return _Scored(terms.there_s, terms, True, replica)
        whole_load_s = terms.there_s - terms.adapter_s + adapter_load_s(request.adapter, replica)
        return _Scored(whole_load_s, terms, False, replica)

    def _record(self, request: RoutingRequest, replica: ReplicaView, now_s: float) -> None:
        super()._record(request, replica, now_s)
        for digest in key_digests(request.adapter)[:1]:
            self.placement.observe(digest, work_s(request, replica), now_s)

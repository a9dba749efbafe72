"""`expected_ttft`: to where the first token is expected soonest.

What is nearly as soon counts as the same: then one that has the adapter goes first, or its home;
then where the session was; then the draw, so that several ingresses with the same view do not all
choose the same one. An adapter is loaded where it does not live only if even the whole load is
worth it: beside a queue it costs this request nothing, but it takes another adapter's room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from serve_app.messages import RoutingRequest
from serve_app.routing.placement import Placement
from serve_app.routing.policy import BasePolicy, Ranked, unfitness
from serve_app.routing.score import Terms, adapter_load_s, expected_ttft, work_s
from serve_app.routing.view import ReplicaView


@dataclass(frozen=True, slots=True)
class _Scored:
    cost_s: float
    terms: Terms
    is_place: bool  # the adapter is there, or it is nowhere and at home there
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
        """Within `tie_share` or `tie_s` of the soonest is the same; `target_usage`: of a replica by
        one adapter, before the adapter gets another home."""
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
        """(adapter, replica): homes that lack their adapter, the best one of each adapter."""
        wanted = []
        for adapter, homes in self.placement.wide(now_s).items():
            for replica_id in homes:
                replica = self._lookout.get(replica_id)
                if replica is not None and not replica.has_adapter(adapter):
                    wanted.append((adapter, replica_id))
                    break
        return wanted

    def _order(self, ask: RoutingRequest, now_s: float) -> list[Ranked]:
        homes = () if ask.adapter is None else self.placement.homes(ask.adapter, now_s)
        few = self._lookout.look(ask, homes)
        # A home that does not have it yet is told to load it, and is not a place before that.
        is_somewhere = any(one.has_adapter(ask.adapter) for one in few)
        places = () if is_somewhere else homes
        scored = [self._score(ask, one, places) for one in few]
        fit = [one.cost_s for one in scored if not unfitness(ask, one.replica)]
        best_s = min(fit or [one.cost_s for one in scored])
        near_s = best_s + max(self._tie_s, self._tie_share * best_s)
        is_tie = sum(one.cost_s <= near_s for one in scored) > 1
        session = self._lookout.session_place(ask.session)

        def key(one: _Scored) -> tuple[float, bool, bool, bool, float]:
            late_s = one.cost_s if one.cost_s > near_s else 0.0
            is_session = one.replica.replica_id == session
            is_home = one.replica.replica_id in homes
            return late_s, not one.is_place, not is_session, not is_home, self._draw.random()

        scored.sort(key=key)
        ranked = []
        for one in scored:
            reason = "soonest"
            if is_tie and one.cost_s <= near_s:
                replica_id = one.replica.replica_id
                is_home = one.is_place and replica_id in homes
                reason = "session" if replica_id == session else "home" if is_home else "tie"
            ranked.append(Ranked(one.replica, one.terms, reason))
        return ranked

    def _score(self, ask: RoutingRequest, replica: ReplicaView, places: Sequence[str]) -> _Scored:
        terms = expected_ttft(ask, replica)
        if replica.replica_id in places or replica.has_adapter(ask.adapter):
            return _Scored(terms.there_s, terms, True, replica)
        whole_load_s = terms.there_s - terms.adapter_s + adapter_load_s(ask.adapter, replica)
        return _Scored(whole_load_s, terms, False, replica)

    def _went(self, ask: RoutingRequest, replica: ReplicaView, now_s: float) -> None:
        super()._went(ask, replica, now_s)
        if ask.adapter is not None:
            self.placement.observe(ask.adapter, work_s(ask, replica), now_s)

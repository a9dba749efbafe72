"""What a routing policy is. Serve's router, the dry run and the simulator call the same objects."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from serve_app.messages import RoutingRequest
from serve_app.routing.candidates import CandidateSampler
from serve_app.routing.score import Terms, expected_ttft
from serve_app.routing.view import ReplicaView


@dataclass(frozen=True, slots=True)
class Ranked:
    replica: ReplicaView
    terms: Terms  # of the score, also where the policy does not use it
    reason: str = ""  # in words, where something else decided


class Policy(Protocol):
    """One object for each base and ingress; made with `models[].router`'s options. Called for every
    request with all replicas that may take it (never empty); cheap at 1,000 of them: look at a few,
    not at all. Must not raise."""

    def rank(
        self, ask: RoutingRequest, replicas: Sequence[ReplicaView], now_s: float
    ) -> list[Ranked]:
        """Best first; those left out are tried after them, in any order."""
        ...

    def changed(self, replica_ids: Sequence[str]) -> None:
        """Another set of replicas."""
        ...


class BasePolicy:
    """What the policies here share: `_order` is theirs."""

    def __init__(self, seed: int | None = None, num_random: int = 6) -> None:
        """`num_random`: drawn at random, where there are too many replicas to look at all."""
        if num_random < 1:
            raise ValueError(f"num_random is {num_random}, but must be 1 or more")
        self._draw = random.Random(seed)
        self._lookout = CandidateSampler(self._draw, num_random)

    def rank(
        self, ask: RoutingRequest, replicas: Sequence[ReplicaView], now_s: float
    ) -> list[Ranked]:
        if self._lookout.take(replicas):
            self.changed(self._lookout.replica_ids)
        if ask.only is not None and (wanted := self._lookout.get(ask.only)) is not None:
            return [Ranked(wanted, expected_ttft(ask, wanted), "only")]
        ranked = self._order(ask, now_s)
        if any(unfitness(ask, one.replica) for one in ranked):
            if all(unfitness(ask, one.replica) for one in ranked):
                fittest = self._fittest(ask)
                ranked = [fittest, *(o for o in ranked if o.replica is not fittest.replica)]
            ranked.sort(key=lambda one: unfitness(ask, one.replica))
        if not ask.dry_run:
            self._went(ask, ranked[0].replica, now_s)
        return ranked

    def changed(self, replica_ids: Sequence[str]) -> None:
        pass

    def _order(self, ask: RoutingRequest, now_s: float) -> list[Ranked]:
        raise NotImplementedError

    def _went(self, ask: RoutingRequest, replica: ReplicaView, now_s: float) -> None:
        self._lookout.went(ask, replica.replica_id)

    def _fittest(self, ask: RoutingRequest) -> Ranked:
        """Of all, where nobody who was looked at is fit."""
        found, worst = self._lookout.every[0], 99
        for one in self._lookout.every:
            if (its := unfitness(ask, one)) < worst:
                found, worst = one, its
                if not its:
                    break
        return Ranked(found, expected_ttft(ask, found), "resort")


def unfitness(ask: RoutingRequest, replica: ReplicaView) -> int:
    """0 is fit; the higher, the later a resort."""
    if replica.replica_id in ask.avoid:
        return 3
    if replica.is_draining:
        return 2
    return 0 if replica.is_connected or replica.updated_s == 0.0 else 1

"""The interface and the common base of routing policies. Serve's router, the dry run and the
simulator call the same objects."""

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
    terms: Terms  # of the score, even if the policy does not use it
    reason: str = ""  # a word for why the policy placed it here


class Policy(Protocol):
    """There is an object per base and ingress, made with the options of `models[].router`. It is
    called for every request with all replicas of the base (never empty), and must be cheap with
    1,000 of them: it should look at a few, not at all. It must not raise."""

    def rank(
        self, request: RoutingRequest, replicas: Sequence[ReplicaView], now_s: float
    ) -> list[Ranked]:
        """Returns replicas, the best first. The replicas left out are tried after them, in any
        order. The arguments are positional."""
        ...

    def changed(self, replica_ids: Sequence[str]) -> None:
        """Is called with the new set of replicas when it changed."""
        ...


class BasePolicy:
    """The common part of the product's policies, each of which implements `_order`."""

    def __init__(self, seed: int | None = None, num_random: int = 6) -> None:
        """`num_random`: candidates drawn at random if there are too many replicas to look at."""
        if num_random < 1:
            raise ValueError(f"num_random is {num_random}, but must be 1 or more")
        self._draw = random.Random(seed)
        self._sampler = CandidateSampler(self._draw, num_random)

    def rank(
        self, request: RoutingRequest, replicas: Sequence[ReplicaView], now_s: float
    ) -> list[Ranked]:
        if self._sampler.set_replicas(replicas):
            self.changed([replica.replica_id for replica in replicas])
        if request.only is not None and (wanted := self._sampler.get(request.only)) is not None:
            return [Ranked(wanted, expected_ttft(request, wanted, now_s), "only")]
        ranked = self._order(request, now_s)
        if any(unfitness(request, line.replica) for line in ranked):
            if all(unfitness(request, line.replica) for line in ranked):
                fittest = self._fittest(request, now_s)
                others = (line for line in ranked if line.replica is not fittest.replica)
                ranked = [fittest, *others]
            ranked.sort(key=lambda line: unfitness(request, line.replica))
        if not request.dry_run:
            self._record(request, ranked[0].replica, now_s)
        return ranked

    def changed(self, replica_ids: Sequence[str]) -> None:
        pass

    def _order(self, request: RoutingRequest, now_s: float) -> list[Ranked]:
        """Returns candidates in the policy's order, fit or not."""
        raise NotImplementedError

    def _record(self, request: RoutingRequest, replica: ReplicaView, now_s: float) -> None:
        """Is called with the replica that was ranked first."""
        self._sampler.record(request, replica.replica_id)

    def _fittest(self, request: RoutingRequest, now_s: float) -> Ranked:
        """Returns the first of the fittest replicas, for when all candidates are unfit."""
        found, lowest = self._sampler.all[0], 99
        for replica in self._sampler.all:
            if (its := unfitness(request, replica)) < lowest:
                found, lowest = replica, its
                if not its:
                    break
        return Ranked(found, expected_ttft(request, found, now_s), "resort")


def unfitness(request: RoutingRequest, replica: ReplicaView) -> int:
    """Returns 0 for a fit replica; a higher number is a later resort."""
    if replica.replica_id in request.avoid:
        return 2
    return 0 if replica.is_connected or replica.updated_s == 0.0 else 1

"""What a routing policy is. Serve's router, the dry run and the simulator call the same objects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from serve_app.routing.score import Terms
from serve_app.routing.view import Ask, ReplicaView


@dataclass(frozen=True, slots=True)
class Ranked:
    replica: ReplicaView
    terms: Terms  # of the score, also where the policy does not use it
    reason: str = ""  # in words, where something else decided


class Policy(Protocol):
    """One object for each base and ingress; made with `models[].router`'s options. Called for every
    request with all replicas that may take it (never empty); cheap at 1,000 of them: look at a few,
    not at all. Must not raise."""

    def rank(self, ask: Ask, replicas: Sequence[ReplicaView], now_s: float) -> list[Ranked]:
        """Best first; those left out are tried after them, in any order."""
        ...

    def changed(self, replica_ids: Sequence[str]) -> None:
        """Another set of replicas."""
        ...

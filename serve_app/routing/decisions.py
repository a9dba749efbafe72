"""What was decided of late and what came of it: who was chosen and why, what was expected, what was
measured. For headers, the admin routes and the metrics; bounded.

Ignorant of Ray and HTTP. All times are `time.time()`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from serve_app.messages import RoutingRequest
from serve_app.routing.policy import Ranked
from serve_app.routing.score import Terms

_MAX_DECISIONS = 1024

FALLBACK = "fallback"  # the policy failed: Serve's own order
OTHER = "other"  # one that the policy had left out: those that it wanted were full


@dataclass(slots=True)
class Decision:
    """One submit call. The times are 0 until they are known."""

    call_id: str
    replica_id: str
    policy: str
    reason: str
    expected: Terms | None  # None: the policy had not looked at it, or failed
    num_tokens: int
    adapter: str | None
    asked_s: float  # the call reached Serve's router
    chosen_s: float
    adapter_wait_s: float = 0.0
    adapter_tier: str = ""  # that it was found in
    is_accepted: bool = False
    engine_queue_s: float = 0.0
    first_token_s: float = 0.0  # it arrived here
    rejections: int = 0  # replicas that turned out to be full

    @property
    def answer_s(self) -> float:
        """From the choice to the first token."""
        return self.first_token_s - self.chosen_s


class Decisions:
    """Written by the router's thread and by the event loop."""

    def __init__(self) -> None:
        self.reasons: Counter[str] = Counter()
        self.affinity_hits = 0  # the adapter was in memory where the request went
        self._newest: dict[str, Decision] = {}
        self._lock = threading.Lock()

    @property
    def newest(self) -> tuple[Decision, ...]:
        """The latest last."""
        with self._lock:
            return tuple(self._newest.values())

    def get(self, call_id: str) -> Decision | None:
        return self._newest.get(call_id)

    def add(
        self,
        ask: RoutingRequest,
        replica_id: str,
        ranked: Sequence[Ranked],
        policy: str,
        asked_s: float,
        now_s: float,
    ) -> None:
        """`ranked`: by the policy; empty: it failed."""
        line = next((one for one in ranked if one.replica.replica_id == replica_id), None)
        reason = line.reason if line else OTHER if ranked else FALLBACK
        with self._lock:
            before = self._newest.pop(ask.call_id, None)
            decision = self._newest[ask.call_id] = Decision(
                ask.call_id,
                replica_id,
                policy,
                reason,
                None if line is None else line.terms,
                ask.num_tokens,
                ask.adapter,
                asked_s,
                now_s,
            )
            if before is not None:
                decision.rejections = before.rejections + 1
            if len(self._newest) > _MAX_DECISIONS:
                del self._newest[next(iter(self._newest))]
            self.reasons[reason] += 1
            if ask.adapter is not None and line and line.replica.has_adapter(ask.adapter):
                self.affinity_hits += 1

    def accepted(self, call_id: str, adapter_s: float, found_in: str) -> None:
        decision = self._newest.get(call_id)
        if decision is not None and not decision.is_accepted:
            decision.is_accepted = True
            decision.adapter_wait_s, decision.adapter_tier = adapter_s, found_in

    def first_token(self, call_id: str, queued_s: float, now_s: float) -> Decision | None:
        """None: not known, or not its first."""
        decision = self._newest.get(call_id)
        if decision is None or decision.first_token_s:
            return None
        decision.engine_queue_s, decision.first_token_s = queued_s, now_s
        return decision

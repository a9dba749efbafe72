"""The recent routing decisions and their results: the replica and the reason, the expected and the
measured times. Bounded; read by the response headers, the admin routes and the metrics.

Ignorant of Ray and HTTP. All times are `time.time()`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from serve_app.messages import RoutingRequest
from serve_app.metrics.exposition import as_text, counter, histogram
from serve_app.metrics.histograms import RATIOS, Histogram
from serve_app.routing.policy import Ranked
from serve_app.routing.score import Terms

_MAX_DECISIONS = 1024

FALLBACK = "fallback"  # the policy failed: Serve's own order
OTHER = "other"  # a replica that the policy left out, because its choices were full


@dataclass(slots=True)
class Decision:
    """The decision about a submit call. A time is 0 until it is known."""

    call_id: str
    replica_id: str
    policy: str
    reason: str
    expected: Terms | None  # None: the policy did not score this replica, or failed
    num_tokens: int
    adapter: str | None
    asked_s: float  # when the call reached Serve's router
    chosen_s: float
    adapter_wait_s: float = 0.0
    adapter_tier: str = ""  # where the engine found the adapter
    is_accepted: bool = False
    engine_queue_s: float = 0.0
    first_token_s: float = 0.0  # when it arrived at this ingress
    rejections: int = 0  # by replicas that turned out to be full

    @property
    def answer_s(self) -> float:
        """The seconds from the choice of the replica to the first token."""
        return self.first_token_s - self.chosen_s


class Decisions:
    """The newest decisions about a base. Written by the router's thread and the event loop."""

    def __init__(self) -> None:
        self.reasons: Counter[str] = Counter()
        self.affinity_hits = 0  # requests whose adapter was in memory where they went
        # The expected over the measured time to the first token, of each request
        self.expected_ratio = Histogram(RATIOS)
        self._newest: dict[str, Decision] = {}  # by call id
        self._lock = threading.Lock()

    @property
    def newest(self) -> tuple[Decision, ...]:
        """The remembered decisions, the latest last."""
        with self._lock:
            return tuple(self._newest.values())

    def get(self, call_id: str) -> Decision | None:
        return self._newest.get(call_id)

    def add(
        self,
        request: RoutingRequest,
        replica_id: str,
        ranked: Sequence[Ranked],
        policy: str,
        asked_s: float,
        now_s: float,
    ) -> None:
        """`ranked`: the policy's ranking, empty if it failed."""
        chosen = next((line for line in ranked if line.replica.replica_id == replica_id), None)
        reason = chosen.reason if chosen else OTHER if ranked else FALLBACK
        with self._lock:
            before = self._newest.pop(request.call_id, None)
            decision = self._newest[request.call_id] = Decision(
                request.call_id,
                replica_id,
                policy,
                reason,
                None if chosen is None else chosen.terms,
                request.num_tokens,
                request.adapter,
                asked_s,
                now_s,
            )
            if before is not None:
                decision.rejections = before.rejections + 1
            if len(self._newest) > _MAX_DECISIONS:
                del self._newest[next(iter(self._newest))]
            self.reasons[reason] += 1
            adapter = request.adapter
            if adapter is not None and chosen and chosen.replica.has_adapter(adapter):
                self.affinity_hits += 1

    def accepted(self, call_id: str, adapter_s: float, found_in: str) -> None:
        """Records that the engine accepted the call, how long it waited for its adapter, and the
        tier where that was."""
        decision = self._newest.get(call_id)
        if decision is not None and not decision.is_accepted:
            decision.is_accepted = True
            decision.adapter_wait_s, decision.adapter_tier = adapter_s, found_in

    def first_token(self, call_id: str, queued_s: float, now_s: float) -> Decision | None:
        """Records the call's first token. Returns None if the call is not remembered, or had a
        token before."""
        decision = self._newest.get(call_id)
        if decision is None or decision.first_token_s:
            return None
        decision.engine_queue_s, decision.first_token_s = queued_s, now_s
        if decision.expected is not None and decision.answer_s > 0:
            self.expected_ratio.observe(decision.expected.total_s / decision.answer_s)
        return decision


def decisions_text(decisions: Iterable[tuple[str, Decisions]], ingress: str) -> bytes:
    """`decisions`: with the name of their base, which two versions of it have."""
    reasons: Counter[tuple[str, str]] = Counter()
    hits: Counter[str] = Counter()
    ratios: dict[str, Histogram] = {}
    for name, one in decisions:
        for reason, count in one.reasons.items():
            reasons[name, reason] += count
        hits[name] += one.affinity_hits
        ratios.setdefault(name, Histogram(RATIOS)).include(one.expected_ratio)
    own, model = {"ingress": ingress}, "model_name"
    return as_text(
        counter("loraplex_router_decisions", reasons, own, model, "reason"),
        counter("loraplex_router_affinity_hits", hits, own, model),
        histogram("loraplex_router_expected_ttft_ratio", ratios, own, model),
    )

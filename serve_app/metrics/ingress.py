"""The counts of an ingress replica: HTTP responses, streams and routing decisions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from serve_app.metrics.exposition import as_text, counter, gauge, histogram
from serve_app.metrics.histograms import RATIOS, Histogram

_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))


@dataclass(frozen=True, slots=True)
class RoutingCounts:
    """The routing decisions for a base."""

    model_name: str
    reasons: Mapping[str, int]
    affinity_hits: int
    expected_ratio: Histogram = field(default_factory=lambda: Histogram(RATIOS))


class IngressMetrics:
    """Counts HTTP responses by route and status, and clients that left."""

    def __init__(self, ingress: str) -> None:
        self.ingress = ingress
        self._answers: Counter[tuple[str, str, str]] = Counter()
        self._num_disconnects = 0

    def answered(self, route: str, status: int, method: str = "GET") -> None:
        """`route` is the route's pattern, never the client's path. A method that no route has
        counts as `other`."""
        self._answers[route, str(status), method if method in _METHODS else "other"] += 1

    def disconnected(self) -> None:
        self._num_disconnects += 1

    def text(self, num_open: int, routed: Iterable[RoutingCounts] = ()) -> bytes:
        """`num_open`: engine requests that this ingress reads."""
        own, bases = {"ingress": self.ingress}, tuple(routed)
        answers: Counter[tuple[str, str]] = Counter()
        requests: Counter[tuple[str, str, str]] = Counter()
        for (route, status, method), count in self._answers.items():
            answers[route, status] += count
            requests[route, method, f"{status[0]}xx"] += count
        decisions = {
            (base.model_name, reason): count
            for base in bases
            for reason, count in base.reasons.items()
        }
        hits = {base.model_name: base.affinity_hits for base in bases}
        ratios = {base.model_name: base.expected_ratio for base in bases}
        return as_text(
            counter("loraplex_http_answers", answers, own, "route", "status"),
            counter("http_requests", requests, own, "handler", "method", "status"),
            counter("loraplex_client_disconnects", self._num_disconnects, own),
            gauge("loraplex_open_engine_requests", num_open, own),
            counter("loraplex_router_decisions", decisions, own, "model_name", "reason"),
            counter("loraplex_router_affinity_hits", hits, own, "model_name"),
            histogram("loraplex_router_expected_ttft_ratio", ratios, own, "model_name"),
        )

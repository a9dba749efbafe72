"""The counts of an ingress replica: HTTP responses, streams and routing decisions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from serve_app.metrics.exposition import as_text, counter, gauge


@dataclass(frozen=True, slots=True)
class RoutingCounts:
    """The routing decisions for a base."""

    model_name: str
    reasons: Mapping[str, int]
    affinity_hits: int


class IngressMetrics:
    """Counts HTTP responses by route and status, and clients that left."""

    def __init__(self, ingress: str) -> None:
        self.ingress = ingress
        self._answers: Counter[tuple[str, int]] = Counter()
        self._num_disconnects = 0

    def answered(self, route: str, status: int) -> None:
        """`route` is the route's pattern, never the client's path."""
        self._answers[route, status] += 1

    def disconnected(self) -> None:
        self._num_disconnects += 1

    def text(self, num_open: int, routed: Iterable[RoutingCounts] = ()) -> bytes:
        """`num_open`: engine requests that this ingress reads."""
        ingress, bases = self.ingress, tuple(routed)
        return as_text(
            counter(
                "loraplex_http_answers",
                "HTTP answers",
                ("ingress", "route", "status"),
                [
                    ((ingress, route, str(status)), count)
                    for (route, status), count in sorted(self._answers.items())
                ],
            ),
            counter(
                "loraplex_client_disconnects",
                "Clients gone before the end",
                ("ingress",),
                [((ingress,), self._num_disconnects)],
            ),
            gauge(
                "loraplex_open_engine_requests",
                "Engine requests being read",
                ("ingress",),
                [((ingress,), num_open)],
            ),
            counter(
                "loraplex_router_decisions",
                "Requests sent to an engine replica, by what decided which",
                ("ingress", "model_name", "reason"),
                [
                    ((ingress, base.model_name, reason), count)
                    for base in bases
                    for reason, count in sorted(base.reasons.items())
                ],
            ),
            counter(
                "loraplex_router_affinity_hits",
                "Of them, those sent to where their adapter was in memory",
                ("ingress", "model_name"),
                [((ingress, base.model_name), base.affinity_hits) for base in bases],
            ),
        )

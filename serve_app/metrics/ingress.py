"""The counts of an ingress replica: HTTP responses, queues in front of the engines, and requests
whose engine left them.

Labels hold registered names, and only the tenants that the configuration names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

from serve_app.metrics.exposition import as_text, counter, gauge, histogram
from serve_app.metrics.histograms import GAP_SECONDS, SECONDS, Histogram

Reason = Literal["death", "drain", "silence", "memory", "wait"]  # of a migration

OTHER_TENANTS = "other"
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))


class IngressMetrics:
    """Counts HTTP responses by route and status, and clients that left."""

    def __init__(self, ingress: str) -> None:
        self.ingress = ingress
        self._answers: Counter[tuple[str, str, str]] = Counter()
        self.num_disconnects = 0

    def answered(self, route: str, status: int, method: str = "GET") -> None:
        """`route` is the route's pattern, never the client's path. A method that no route has
        counts as `other`."""
        self._answers[route, str(status), method if method in _METHODS else "other"] += 1

    def text(self, num_open: int) -> bytes:
        """`num_open`: engine requests that this ingress reads."""
        own = {"ingress": self.ingress}
        answers: Counter[tuple[str, str]] = Counter()
        requests: Counter[tuple[str, str, str]] = Counter()
        for (route, status, method), count in self._answers.items():
            answers[route, status] += count
            requests[route, method, f"{status[0]}xx"] += count
        return as_text(
            counter("loraplex_http_answers", answers, own, "route", "status"),
            counter("http_requests", requests, own, "handler", "method", "status"),
            counter("loraplex_client_disconnects", self.num_disconnects, own),
            gauge("loraplex_open_engine_requests", num_open, own),
        )


@dataclass(slots=True)
class BaseQueueStats:
    num_waiting: int = 0
    waits: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    sheds: Counter[str] = field(default_factory=Counter)  # by reason


class QueueStats:
    """`named_tenants`: the tenants that have a label of their own."""

    def __init__(self, ingress: str, named_tenants: Collection[str]) -> None:
        # Requests refused because too many were open, before their model or tenant was read.
        self.num_turned_away = 0
        self._own = {"ingress": ingress}
        self._named_tenants = frozenset(named_tenants)
        self._bases: dict[str, BaseQueueStats] = {}  # by name
        self._tokens: Counter[str] = Counter()

    def of_base(self, name: str) -> BaseQueueStats:
        return self._bases.setdefault(name, BaseQueueStats())

    def count_tokens(self, tenant: str, count: int) -> None:
        self._tokens[tenant if tenant in self._named_tenants else OTHER_TENANTS] += count

    def text(self) -> bytes:
        own, model, bases = self._own, "model_name", self._bases
        sheds = {
            (name, reason): count
            for name, stats in bases.items()
            for reason, count in stats.sheds.items()
        }
        sheds["", "open"] = self.num_turned_away
        waiting = {name: stats.num_waiting for name, stats in bases.items()}
        waits = {name: stats.waits for name, stats in bases.items()}
        return as_text(
            gauge("loraplex_queue_waiting", waiting, own, model),
            histogram("loraplex_queue_wait_seconds", waits, own, model),
            counter("loraplex_shed", sheds, own, model, "reason"),
            counter("loraplex_tenant_tokens", self._tokens, own, "tenant"),
        )


class MigrationMetrics:
    """`model`: the base's registered name."""

    def __init__(self, ingress: str) -> None:
        self._own = {"ingress": ingress}
        self.moves: Counter[tuple[str, str, str]] = Counter()  # model, reason, result
        self.lost: Counter[str] = Counter()  # requests that failed because their engine is gone
        self.quarantined: Counter[str] = Counter()
        self._gaps: dict[str, Histogram] = {}

    def gap(self, model: str, seconds: float) -> None:
        """Observes the time of a choice that had output: from its last token on an engine to its
        first on the next."""
        self._gaps.setdefault(model, Histogram(GAP_SECONDS)).observe(seconds)

    def text(self) -> bytes:
        own, model = self._own, "model_name"
        return as_text(
            counter("loraplex_requests_migrated", self.moves, own, model, "reason", "result"),
            counter("loraplex_requests_lost", self.lost, own, model),
            counter("loraplex_requests_quarantined", self.quarantined, own, model),
            histogram("loraplex_migration_gap_seconds", self._gaps, own, model),
        )

"""What one ingress replica counts itself: HTTP answers, streams and routing decisions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from serve_app.metrics.exposition import rendered


@dataclass(frozen=True, slots=True)
class RoutingCounts:
    """Of one base."""

    model_name: str
    reasons: Mapping[str, int]
    affinity_hits: int


class IngressMetrics(Collector):
    """Of one ingress replica: HTTP answers by route and status, streams, the registry's state."""

    def __init__(self, ingress: str) -> None:
        self.ingress = ingress
        self._answers: Counter[tuple[str, int]] = Counter()
        self._num_disconnects = 0
        self._num_open = 0
        self._routed: tuple[RoutingCounts, ...] = ()

    def answered(self, route: str, status: int) -> None:
        """`route` is the route's pattern, never the client's path."""
        self._answers[route, status] += 1

    def disconnected(self) -> None:
        self._num_disconnects += 1

    def text(self, num_open: int, routed: Iterable[RoutingCounts] = ()) -> bytes:
        self._num_open, self._routed = num_open, tuple(routed)
        return rendered(self)

    def collect(self) -> Iterator[Metric]:
        answers = CounterMetricFamily(
            "loraplex_http_answers", "HTTP answers", labels=["ingress", "route", "status"]
        )
        for (route, status), count in sorted(self._answers.items()):
            answers.add_metric([self.ingress, route, str(status)], count)
        yield answers
        disconnects = CounterMetricFamily(
            "loraplex_client_disconnects", "Clients gone before the end", labels=["ingress"]
        )
        disconnects.add_metric([self.ingress], self._num_disconnects)
        yield disconnects
        streams = GaugeMetricFamily(
            "loraplex_open_engine_requests", "Engine requests being read", labels=["ingress"]
        )
        streams.add_metric([self.ingress], self._num_open)
        yield streams
        yield from self._routing()

    def _routing(self) -> Iterator[Metric]:
        decisions = CounterMetricFamily(
            "loraplex_router_decisions",
            "Requests sent to an engine replica, by what decided which",
            labels=["ingress", "model_name", "reason"],
        )
        hits = CounterMetricFamily(
            "loraplex_router_affinity_hits",
            "Of them, those sent to where their adapter was in memory",
            labels=["ingress", "model_name"],
        )
        for one in self._routed:
            for reason, count in sorted(one.reasons.items()):
                decisions.add_metric([self.ingress, one.model_name, reason], count)
            hits.add_metric([self.ingress, one.model_name], one.affinity_hits)
        yield from (decisions, hits)

"""The queues in front of the engines in Prometheus' text format.

Labels hold registered names, and of tenants only those that the configuration names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from serve_app.metrics.exposition import rendered
from serve_app.metrics.histograms import SECONDS, Histogram

OTHER_TENANTS = "other"


@dataclass(slots=True)
class BaseQueueStats:
    """Of the queues of one base model."""

    num_waiting: int = 0
    waits: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    sheds: Counter[str] = field(default_factory=Counter)  # by reason


class QueueStats(Collector):
    """Of one ingress replica. `named_tenants`: those that get a label of their own."""

    def __init__(self, ingress: str, named_tenants: Collection[str]) -> None:
        self.num_turned_away = 0  # too many were open: before anything was known of them
        self._ingress = ingress
        self._named_tenants = frozenset(named_tenants)
        self._bases: dict[str, BaseQueueStats] = {}  # by name
        self._tokens: Counter[str] = Counter()

    def of_base(self, name: str) -> BaseQueueStats:
        return self._bases.setdefault(name, BaseQueueStats())

    def count_tokens(self, tenant: str, count: int) -> None:
        self._tokens[tenant if tenant in self._named_tenants else OTHER_TENANTS] += count

    def text(self) -> bytes:
        return rendered(self)

    def collect(self) -> Iterator[Metric]:
        labels = ["ingress", "model_name"]
        waiting = GaugeMetricFamily(
            "loraplex_queue_waiting", "Requests that wait in front of the engines", labels=labels
        )
        waits = HistogramMetricFamily(
            "loraplex_queue_wait_seconds", "What they waited until they went", labels=labels
        )
        sheds = CounterMetricFamily(
            "loraplex_shed", "Refused with Retry-After", labels=[*labels, "reason"]
        )
        for name, stats in self._bases.items():
            waiting.add_metric([self._ingress, name], stats.num_waiting)
            waits.add_metric([self._ingress, name], stats.waits.cumulative(), stats.waits.total)
            for reason, count in stats.sheds.items():
                sheds.add_metric([self._ingress, name, reason], count)
        sheds.add_metric([self._ingress, "", "open"], self.num_turned_away)
        yield from (waiting, waits, sheds)
        tokens = CounterMetricFamily(
            "loraplex_tenant_tokens",
            "Prompt and output tokens of the tenants that have weights",
            labels=["ingress", "tenant"],
        )
        for tenant, count in self._tokens.items():
            tokens.add_metric([self._ingress, tenant], count)
        yield tokens

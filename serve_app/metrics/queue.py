"""The counts of an ingress replica's queues in front of the engines.

Labels hold registered names, and only the tenants that the configuration names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from serve_app.metrics.exposition import as_text, counter, gauge, histogram
from serve_app.metrics.histograms import SECONDS, Histogram

OTHER_TENANTS = "other"


@dataclass(slots=True)
class BaseQueueStats:
    """The counts of a base's queue."""

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

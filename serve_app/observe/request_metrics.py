"""An ingress replica's counts of finished requests, by adapter and by tenant.

The busiest adapters and tenants have series of their own, all others share `other`. Labels hold
registered names, and only the tenants that the configuration or the keys name: there may be
thousands. Series follow the traffic: a name that is busy for long takes the place of a name that no
longer is. Its requests before that stay counted under `other`, so that no counter falls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from serve_app.metrics.exposition import as_text, counter, histogram
from serve_app.metrics.histograms import REQUEST_SECONDS, SECONDS, Histogram
from serve_app.observe.record import RequestRecord

BASE_ALONE = "(base)"  # the label `adapter` of requests without one; no adapter has this name
OTHER = "other"
_HALF_LIFE_S = 600.0  # of a request's weight
_REVIEW_S = 10.0
_STAY = 2.0  # another name must be this many times as busy to take a place
_FORGOTTEN = 0.01  # requests

K = TypeVar("K", bound=Hashable)
L = TypeVar("L", bound=str | tuple[str, ...])


@dataclass(slots=True)
class RequestCounts:
    # Failures begin at 0: Prometheus sees no increase in a series that appears with its first one.
    outcomes: Counter[str] = field(default_factory=lambda: Counter(error=0, non_finite=0))
    prompt_tokens: int = 0
    output_tokens: int = 0
    first_token: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    latency: Histogram = field(default_factory=lambda: Histogram(REQUEST_SECONDS))


class Busiest(Generic[K]):
    """The choice of the busiest of many names. The time is an argument."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._weights: dict[K, float] = {}  # recent requests, by name
        self._chosen: set[K] = set()
        self._reviewed_s: float | None = None

    def count(self, name: K) -> bool:
        """Counts a request. Returns True if the name has series of its own."""
        self._weights[name] = self._weights.get(name, 0.0) + 1.0
        if name not in self._chosen:
            if len(self._chosen) >= self._limit:
                return False
            self._chosen.add(name)
        return True

    def review(self, now_s: float) -> set[K]:
        """Chooses again, at most every ten seconds. Returns the names that lost their series."""
        if self._reviewed_s is None:
            self._reviewed_s = now_s
        age_s = now_s - self._reviewed_s
        if age_s < _REVIEW_S:
            return set()
        self._reviewed_s = now_s
        left = 0.5 ** (age_s / _HALF_LIFE_S)
        self._weights = {
            name: weight * left
            for name, weight in self._weights.items()
            if weight * left >= _FORGOTTEN or name in self._chosen
        }
        ranked = sorted(self._weights, key=self._standing, reverse=True)
        before, self._chosen = self._chosen, set(ranked[: self._limit])
        return before - self._chosen

    def _standing(self, name: K) -> float:
        return self._weights[name] * (_STAY if name in self._chosen else 1.0)


class RequestMetrics:
    """All methods belong to the ingress's event loop."""

    def __init__(
        self, ingress: str, max_adapters: int, max_tenants: int, named_tenants: Collection[str]
    ) -> None:
        """`named_tenants`: of the configuration. They always have series of their own."""
        self._own = {"ingress": ingress}
        self._named_tenants = frozenset(named_tenants)
        self._busy_adapters = Busiest[tuple[str, str]](max_adapters)
        self._busy_tenants = Busiest[str](max_tenants)
        self._adapters: dict[tuple[str, str], RequestCounts] = {}  # by base's and adapter's name
        self._tenants: dict[str, RequestCounts] = {}
        self.bases: dict[str, RequestCounts] = {}  # by name, for the console's charts

    def observe(self, record: RequestRecord) -> None:
        if (resolution := record.resolution) is not None:
            base, name = resolution.base.name, resolution.adapter and resolution.adapter.name
            _add(self.bases.setdefault(base, RequestCounts()), record)
            adapter = (base, name or BASE_ALONE)
            if name == OTHER or (name and not self._busy_adapters.count(adapter)):
                adapter = (base, OTHER)
            _add(self._adapters.setdefault(adapter, RequestCounts()), record)
        tenant, is_known = record.tenant, bool(record.key_id)  # a key names it, not the client
        if tenant not in self._named_tenants and not (
            is_known and tenant not in ("", OTHER) and self._busy_tenants.count(tenant)
        ):
            tenant = OTHER
        _add(self._tenants.setdefault(tenant, RequestCounts()), record)

    def text(self, now_s: float) -> bytes:
        for adapter in self._busy_adapters.review(now_s):
            self._adapters.pop(adapter, None)
        for tenant in self._busy_tenants.review(now_s):
            self._tenants.pop(tenant, None)
        adapters = _families("adapter", self._adapters, self._own, "model_name", "adapter")
        return as_text(*adapters, *_families("tenant", self._tenants, self._own, "tenant"))


def _add(counts: RequestCounts, record: RequestRecord) -> None:
    counts.outcomes[record.outcome] += 1
    counts.prompt_tokens += record.prompt_tokens
    counts.output_tokens += record.output_tokens
    if record.first_token_s:
        counts.first_token.observe(record.first_token_s - record.arrival_s)
    if record.outcome in ("ok", "empty"):
        counts.latency.observe(record.end_s - record.arrival_s)


def _families(
    kind: str, counts: Mapping[L, RequestCounts], own: Mapping[str, str], *labels: str
) -> tuple[str, ...]:
    outcomes = {
        (*((key,) if isinstance(key, str) else key), outcome): count
        for key, one in counts.items()
        for outcome, count in one.outcomes.items()
    }
    first = {key: one.first_token for key, one in counts.items()}
    latency = {key: one.latency for key, one in counts.items()}
    prompt = {key: one.prompt_tokens for key, one in counts.items()}
    output = {key: one.output_tokens for key, one in counts.items()}
    return (
        counter(f"loraplex_{kind}_requests", outcomes, own, *labels, "outcome"),
        counter(f"loraplex_{kind}_prompt_tokens", prompt, own, *labels),
        counter(f"loraplex_{kind}_output_tokens", output, own, *labels),
        histogram(f"loraplex_{kind}_time_to_first_token_seconds", first, own, *labels),
        histogram(f"loraplex_{kind}_request_latency_seconds", latency, own, *labels),
    )

"""An ingress replica's counts of finished requests, by adapter and by tenant.

The busiest adapters and tenants have series of their own, all others share `other`. Labels hold
registered names, and only the tenants that the configuration or the keys name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from serve_app.metrics.busiest import OTHER, Busiest
from serve_app.metrics.exposition import as_text, counter, histogram
from serve_app.metrics.histograms import REQUEST_SECONDS, SECONDS, Histogram

BASE_ALONE = "(base)"  # the label `adapter` of requests without one; no adapter has this name


@dataclass(slots=True)
class RequestCounts:
    """The counts of finished requests."""

    outcomes: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    output_tokens: int = 0
    first_token: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    latency: Histogram = field(default_factory=lambda: Histogram(REQUEST_SECONDS))


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """The part of a finished request that is counted."""

    model_name: str  # registered name of the base; "": none was resolved
    adapter: str  # registered name; "": the base alone
    tenant: str
    outcome: str
    prompt_tokens: int = 0
    output_tokens: int = 0
    first_token_s: float | None = None  # since its arrival
    latency_s: float | None = None  # of a request that ended well


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

    def observe(self, request: FinishedRequest, *, is_known_tenant: bool = False) -> None:
        """`is_known_tenant`: a key names the tenant, not the client."""
        if request.model_name:
            _add(self.bases.setdefault(request.model_name, RequestCounts()), request)
            adapter = (request.model_name, request.adapter or BASE_ALONE)
            if request.adapter == OTHER or (
                request.adapter and not self._busy_adapters.count(adapter)
            ):
                adapter = (request.model_name, OTHER)
            _add(self._adapters.setdefault(adapter, RequestCounts()), request)
        tenant = request.tenant
        if tenant not in self._named_tenants and not (
            is_known_tenant and tenant != OTHER and self._busy_tenants.count(tenant)
        ):
            tenant = OTHER
        _add(self._tenants.setdefault(tenant, RequestCounts()), request)

    def text(self, now_s: float) -> bytes:
        for adapter in self._busy_adapters.review(now_s):
            self._adapters.pop(adapter, None)
        for tenant in self._busy_tenants.review(now_s):
            self._tenants.pop(tenant, None)
        adapters = _families("adapter", self._adapters, self._own, "model_name", "adapter")
        return as_text(*adapters, *_families("tenant", self._tenants, self._own, "tenant"))


def _add(counts: RequestCounts, request: FinishedRequest) -> None:
    counts.outcomes[request.outcome] += 1
    counts.prompt_tokens += request.prompt_tokens
    counts.output_tokens += request.output_tokens
    if request.first_token_s is not None:
        counts.first_token.observe(request.first_token_s)
    if request.latency_s is not None:
        counts.latency.observe(request.latency_s)


K = TypeVar("K", bound=str | tuple[str, ...])


def _families(
    kind: str, counts: Mapping[K, RequestCounts], own: Mapping[str, str], *labels: str
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

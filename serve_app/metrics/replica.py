"""The metrics of an engine replica around its engine: the local cache, and the loads of adapters.

The cache's bytes and quarantined fetches are the node's: they are equal for all replicas that share
its folder, so a dashboard uses their maximum. The counters are the replica's own. The engine's own
process counts in which tier requests find their adapters, and how much each tier of memory holds
(`metrics.engine`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from engine.types import Resident
from registry.cache import CacheStats
from registry.entities import AdapterVersion
from serve_app.metrics.exposition import as_text, counter, gauge, histogram
from serve_app.metrics.histograms import SECONDS, Histogram

_NEWEST = 0.2  # weight of the newest load in the mean
_MAX_RESIDENTS = 1000  # series of adapters in memory, per engine


class LoadTimes:
    """Times from the request for an adapter to its last byte in host memory, by the tier of its
    files."""

    def __init__(self) -> None:
        self._histograms = {tier: Histogram(SECONDS) for tier in ("disk", "registry")}
        self._recent_s: dict[str, float] = {}

    def observe(self, tier: str, seconds: float) -> None:
        self._histograms[tier].observe(seconds)
        mean_s = self._recent_s.setdefault(tier, seconds)
        self._recent_s[tier] = mean_s + _NEWEST * (seconds - mean_s)

    def recent_s(self, tier: str) -> float:
        """Returns a moving mean of the recent loads; 0 before the first."""
        return self._recent_s.get(tier, 0.0)

    def text(self, own: Mapping[str, str]) -> bytes:
        loads = Histogram(SECONDS)
        for tier in self._histograms.values():
            loads.include(tier)
        return as_text(
            histogram("loraplex_adapter_load_seconds", self._histograms, own, "tier"),
            histogram("vllm:lora_adapter_load_seconds", {"load": loads}, own, "transition"),
        )


def residents_text(
    residents: Iterable[Resident], versions: Mapping[str, AdapterVersion], own: Mapping[str, str]
) -> bytes:
    """`residents`: least recently used first; of many, the device's and then the newest are listed.
    `versions`: by digest; an adapter that is not among them is left out."""
    known = [(one, versions[one.digest]) for one in residents if one.digest in versions]
    known.reverse()
    known.sort(key=lambda pair: not pair[0].is_on_device)
    loaded = {
        (
            version.name,
            "gpu" if one.is_on_device else "cpu",
            "true" if one.is_pinned else "false",
            str(version.rank),
        ): 1.0
        for one, version in known[:_MAX_RESIDENTS]
    }
    labels = ("adapter_name", "level", "pinned", "rank")
    return as_text(gauge("vllm:lora_adapter_loaded", loaded, own, *labels))


def cache_text(stats: CacheStats, num_refused: int, own: Mapping[str, str]) -> bytes:
    """`num_refused`: versions that this replica's engine refused to load."""
    limit = stats.max_bytes
    bad = {"fetch": stats.num_quarantined, "load": num_refused}
    return as_text(
        gauge("loraplex_cache_bytes", stats.own_bytes, own),
        gauge("loraplex_cache_downloads_in_flight", stats.fetches_in_flight, own),
        "" if limit is None else gauge("loraplex_cache_limit_bytes", limit, own),
        counter("loraplex_cache_hits", stats.hits, own),
        counter("loraplex_cache_misses", stats.misses, own),
        counter("loraplex_cache_evictions", stats.evictions, own),
        gauge("loraplex_quarantined_versions", bad, own, "stage"),
    )

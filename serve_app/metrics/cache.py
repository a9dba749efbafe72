"""The local cache's numbers as seen by an engine replica, in Prometheus' text format.

Bytes and quarantined fetches are the node's: they are equal for all replicas that share its folder,
so a dashboard uses their maximum. The counters are the replica's own.
"""

from __future__ import annotations

from collections.abc import Mapping

from registry.cache import CacheStats
from serve_app.metrics.exposition import as_text, counter, gauge


def cache_text(stats: CacheStats, num_refused: int, labels: Mapping[str, str]) -> bytes:
    """`num_refused`: versions that this replica's engine refused to load."""
    names, values = tuple(labels), tuple(labels.values())
    gauges = [
        ("loraplex_cache_bytes", "Of local copies, as the limit counts", stats.own_bytes),
        ("loraplex_cache_downloads_in_flight", "Now", stats.fetches_in_flight),
    ]
    if stats.max_bytes is not None:
        gauges.append(("loraplex_cache_limit_bytes", "registry.cache_bytes", stats.max_bytes))
    counters = (
        ("loraplex_cache_hits", "Folders found in the cache", stats.hits),
        ("loraplex_cache_misses", "Folders that had to be fetched", stats.misses),
        ("loraplex_cache_evictions", "Folders that made room", stats.evictions),
    )
    return as_text(
        *(gauge(name, words, names, [(values, value)]) for name, words, value in gauges),
        *(counter(name, words, names, [(values, value)]) for name, words, value in counters),
        gauge(
            "loraplex_quarantined_versions",
            "Bad files, not tried again for a while; by what failed",
            (*names, "stage"),
            [((*values, "fetch"), stats.num_quarantined), ((*values, "load"), num_refused)],
        ),
    )

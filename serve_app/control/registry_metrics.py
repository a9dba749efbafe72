"""The manager's metrics of the registry, and the log lines of its changes. There is a single
manager, so no label names a process: every ingress returns the same numbers.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence

from registry.events import KINDS, Change
from serve_app.control.watcher import Watcher
from serve_app.metrics.exposition import as_text, counter, gauge

logger = logging.getLogger(__name__)

_SHOWN_CHANGES = 20  # logged of one snapshot


class RegistryMetrics:
    def __init__(
        self, watcher: Watcher, reconcile_age_s: Callable[[], float] = lambda: 0.0
    ) -> None:
        self._watcher = watcher
        self._reconcile_age_s = reconcile_age_s
        self._changes: Counter[str] = Counter()
        watcher.subscribe(self._count)

    def text(self) -> bytes:
        watcher = self._watcher
        is_up = watcher.error is None and watcher.catalog is not None
        gauges = (
            ("registry_up", "1: the last read of the registry succeeded", float(is_up)),
            (
                "registry_last_success_timestamp_seconds",
                "When a read last succeeded, Unix time; 0: never",
                watcher.last_success_s,
            ),
            (
                "registry_snapshot_seconds",
                "Duration of the last good read; near 0 where SQLite reports no change",
                watcher.read_duration_s,
            ),
            (
                "reconcile_age_seconds",
                "Since the manager last compared the served bases with the wanted ones",
                self._reconcile_age_s(),
            ),
        )
        return as_text(
            *(gauge(f"loraplex_{name}", words, (), [((), value)]) for name, words, value in gauges),
            counter(
                "loraplex_registry_changes",
                "Changes seen in the registry",
                ("kind",),
                [((kind,), self._changes[kind]) for kind in KINDS],
            ),
        )

    def _count(self, changes: Sequence[Change]) -> None:
        self._changes.update(change.kind for change in changes)


def log_changes(changes: Sequence[Change]) -> None:
    for change in changes[:_SHOWN_CHANGES]:
        logger.info("registry: %s", change)
    if len(changes) > _SHOWN_CHANGES:
        logger.info("registry: and %d more changes", len(changes) - _SHOWN_CHANGES)

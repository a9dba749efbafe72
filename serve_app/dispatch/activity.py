"""The open requests of each base at this ingress, and the ingress's counts for the manager."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from serve_app.messages import Backlog, BaseActivity, IngressCounts


@dataclass(slots=True)
class _Count:
    num_open: int = 0
    last_s: float = 0.0  # when the last request ended


class Activity:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts: dict[str, _Count] = {}  # by base digest

    def enter(self, digest: str) -> Visit:
        """Counts a request of this base as open until its `Visit` is left."""
        self._counts.setdefault(digest, _Count()).num_open += 1
        return Visit(self, digest)

    def report(
        self, backlog_of: Callable[[str], Backlog] = lambda _: Backlog()
    ) -> tuple[BaseActivity, ...]:
        """`backlog_of` returns the backlog of a base, by digest."""
        now_s = self._clock()
        return tuple(
            BaseActivity(
                digest,
                count.num_open,
                0.0 if count.num_open else now_s - count.last_s,
                backlog_of(digest),
            )
            for digest, count in self._counts.items()
        )

    def _leave(self, digest: str) -> None:
        count = self._counts[digest]
        count.num_open -= 1
        count.last_s = self._clock()


@dataclass(slots=True)
class Visit:
    """An open request. Its end is counted once, however often `leave` is called."""

    _activity: Activity
    _digest: str
    _is_open: bool = field(default=True)

    def leave(self) -> None:
        if self._is_open:
            self._is_open = False
            self._activity._leave(self._digest)


class CountsReporter:
    """Numbers the counts that an ingress sends to the manager."""

    def __init__(self, ingress_id: str, render: Callable[[], bytes]) -> None:
        """`render` returns the counts in Prometheus' text format."""
        self.ingress_id = ingress_id
        self.was_taken = False  # a manager has received some of the counts
        self._render = render
        self._serial = 0

    def next(self) -> IngressCounts:
        self._serial += 1
        return IngressCounts(self._serial, self._render(), self.was_taken)

"""The open requests of each base at this ingress, and the ingress's counts for the manager."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from serve_app.messages import Backlog, BaseActivity, BaseFigures, IngressCounts


class Activity:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # By base digest.
        self._num_open: dict[str, int] = {}
        self._last_s: dict[str, float] = {}  # when the last request ended

    def enter(self, digest: str) -> Callable[[], None]:
        """Counts a request of this base as open. Returns a function for its end, to call once."""
        self._num_open[digest] = self._num_open.get(digest, 0) + 1
        return partial(self._leave, digest)

    def report(self, backlog_of: Callable[[str], Backlog]) -> tuple[BaseActivity, ...]:
        """`backlog_of` returns the backlog of a base, by digest."""
        now_s = self._clock()
        return tuple(
            BaseActivity(
                digest, num, 0.0 if num else now_s - self._last_s[digest], backlog_of(digest)
            )
            for digest, num in self._num_open.items()
        )

    def _leave(self, digest: str) -> None:
        self._num_open[digest] -= 1
        self._last_s[digest] = self._clock()


class CountsReporter:
    """Numbers the counts that an ingress sends to the manager."""

    def __init__(
        self,
        ingress_id: str,
        render: Callable[[], bytes],
        figures: Callable[[], tuple[BaseFigures, ...]] = tuple,
    ) -> None:
        """`render` returns the counts in Prometheus' text format; `figures` the figures by base."""
        self.ingress_id = ingress_id
        self.was_taken = False  # a manager has received some of the counts
        self.figures = figures
        self._render = render
        self._serial = 0

    def next(self) -> IngressCounts:
        self._serial += 1
        return IngressCounts(self._serial, self._render(), self.was_taken)

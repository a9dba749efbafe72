"""Which bases this ingress has open requests for, and since when it has none."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from serve_app.messages import Backlog, BaseActivity, IngressCounts


@dataclass(slots=True)
class _Count:
    num_open: int = 0
    last_s: float = 0.0


class Activity:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts: dict[str, _Count] = {}  # by base digest
        # Of a base, by digest. Set by whoever lets requests wait here.
        self.backlog: Callable[[str], Backlog] = _none

    def enter(self, digest: str) -> Visit:
        self._counts.setdefault(digest, _Count()).num_open += 1
        return Visit(self, digest)

    def report(self) -> tuple[BaseActivity, ...]:
        now_s = self._clock()
        return tuple(
            BaseActivity(
                digest,
                count.num_open,
                0.0 if count.num_open else now_s - count.last_s,
                self.backlog(digest),
            )
            for digest, count in self._counts.items()
        )

    def _leave(self, digest: str) -> None:
        count = self._counts[digest]
        count.num_open -= 1
        count.last_s = self._clock()


@dataclass(slots=True)
class Visit:
    """One request that is open; `leave` it once or more often."""

    _activity: Activity
    _digest: str
    _is_open: bool = field(default=True)

    def leave(self) -> None:
        if self._is_open:
            self._is_open = False
            self._activity._leave(self._digest)


def _none(_: str) -> Backlog:
    return Backlog()


class CountsReporter:
    """Makes the counts of one ingress."""

    def __init__(self, ingress_id: str) -> None:
        self.ingress_id = ingress_id
        self.render: Callable[[], bytes] = bytes  # in Prometheus' text format
        self.was_taken = False
        self._serial = 0

    def next(self) -> IngressCounts:
        self._serial += 1
        return IngressCounts(self._serial, self.render(), self.was_taken)

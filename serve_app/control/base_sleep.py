"""When a base goes to sleep and when it wakes. Pure: time, reports and wishes come in.

awake --idle for long, or told to--> drowsy --every ingress let go of it--> asleep --wake--> waking
  ^------------ a request came ---------'                                                      |
  ^---------------------------------------- it runs -------------------------------------------'

Drowsy: views already call it asleep, so that no ingress sends it anything more, but its engines
still stand; a request in this time gets them back at once. Only when every ingress said that it let
go, and has nothing open, are they stopped: no request can meet an engine that goes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from serve_app.messages import Backlog, IngressReport, ReportAnswer, total

logger = logging.getLogger(__name__)

Phase = Literal["awake", "drowsy", "asleep", "waking"]

REPORT_MAX_AGE_S = 5.0  # then the ingress is gone, and its requests with it
_DROWSY_MAX_S = 15.0  # an ingress that says nothing of it: sleep is called off


@dataclass(frozen=True, slots=True)
class HeardReport:
    report: IngressReport
    at_s: float


@dataclass(slots=True)
class _Sleeper:
    phase: Phase
    since_s: float
    running_since_s: float | None = None
    rest_id: float = 0.0  # of its last falling asleep


class ScaleToZero:
    """By base digest. A base that it never heard of is awake."""

    def __init__(self) -> None:
        self._sleepers: dict[str, _Sleeper] = {}
        self._heard: dict[str, HeardReport] = {}  # by ingress
        # By base: the end of its last request, whichever ingress had it and may be gone by now.
        self._last_used_s: dict[str, float] = {}

    def hear(self, report: IngressReport, now_s: float) -> None:
        self._heard[report.ingress_id] = HeardReport(report, now_s)
        for base in report.bases:
            used_s = now_s if base.num_open else now_s - base.idle_s
            if used_s > self._last_used_s.get(base.digest, float("-inf")):
                self._last_used_s[base.digest] = used_s
        for ingress, heard in tuple(self._heard.items()):
            if now_s - heard.at_s > REPORT_MAX_AGE_S:
                del self._heard[ingress]

    @property
    def has_heard(self) -> bool:
        return bool(self._heard)

    def adopt(self, now_s: float) -> None:
        """A new manager learns from the ingresses what slept under the one before."""
        for heard in self._fresh(now_s):
            for digest, _ in heard.report.asleep:
                self._sleepers.setdefault(digest, _Sleeper("asleep", now_s))

    def has_let_go(self, application: str, since_s: float, now_s: float) -> bool:
        """Whether every ingress said, later than `since_s`, that it sends it nothing."""
        fresh = self._fresh(now_s)
        return bool(fresh) and all(
            heard.at_s > since_s and application not in heard.report.fronts for heard in fresh
        )

    def phase(self, digest: str) -> Phase:
        sleeper = self._sleepers.get(digest)
        return "awake" if sleeper is None else sleeper.phase

    def rest_id(self, digest: str) -> float:
        """Goes out with the view and comes back in reports: an ingress let go this time, not at
        an earlier one."""
        sleeper = self._sleepers.get(digest)
        return 0.0 if sleeper is None else sleeper.rest_id

    def wake(self, digest: str, now_s: float) -> None:
        sleeper = self._sleepers.get(digest)
        if sleeper is None:
            return
        if sleeper.phase == "asleep":
            logger.info("base %s wakes", digest[:12])
            sleeper.phase, sleeper.since_s = "waking", now_s
        elif sleeper.phase == "drowsy":
            self._call_off(sleeper, now_s)

    def rest(self, digest: str, now_s: float) -> None:
        """An operator's wish; a request in the next moments still calls it off."""
        sleeper = self._sleepers.get(digest)
        if sleeper is not None and sleeper.phase == "awake" and sleeper.running_since_s is not None:
            self._lie_down(sleeper, now_s)

    def forget(self, wanted: set[str]) -> None:
        for digest in self._sleepers.keys() - wanted:
            del self._sleepers[digest]
        for digest in self._last_used_s.keys() - wanted:
            del self._last_used_s[digest]

    def answer(self, ingress_id: str, now_s: float) -> ReportAnswer:
        """What the others told."""
        fresh = self._fresh(now_s)
        others = [h.report for h in fresh if h.report.ingress_id != ingress_id]
        return ReportAnswer(len(fresh), tuple(held for one in others for held in one.quarantined))

    def num_open(self, digest: str, now_s: float) -> int:
        return sum(
            base.num_open
            for heard in self._fresh(now_s)
            for base in heard.report.bases
            if base.digest == digest
        )

    def num_open_when_draining(self, now_s: float) -> int | None:
        """Requests that are still open; None: some ingress has not said yet that it takes no new
        ones."""
        fresh = self._fresh(now_s)
        if not fresh or not all(heard.report.is_draining for heard in fresh):
            return None
        return sum(base.num_open for heard in fresh for base in heard.report.bases)

    def backlog(self, digest: str, now_s: float) -> Backlog:
        """Of all ingresses."""
        found = [
            base.backlog
            for heard in self._fresh(now_s)
            for base in heard.report.bases
            if base.digest == digest
        ]
        return total(found)

    def idle_s(self, digest: str, now_s: float) -> float | None:
        """Since its last request, or since it runs; None while it does not run."""
        sleeper = self._sleepers.get(digest)
        if sleeper is None or sleeper.running_since_s is None:
            return None
        if self.num_open(digest, now_s):
            return 0.0
        used_s = self._last_used_s.get(digest, sleeper.running_since_s)
        return now_s - max(sleeper.running_since_s, used_s)

    def step(
        self, digest: str, is_running: bool, idle_timeout_s: float | None, now_s: float
    ) -> Phase:
        """Called once a round for each base that is to be served."""
        sleeper = self._sleepers.setdefault(digest, _Sleeper("awake", now_s))
        if not is_running:
            sleeper.running_since_s = None
            if sleeper.phase == "drowsy":
                sleeper.phase = "awake"
            return sleeper.phase
        if sleeper.running_since_s is None:
            sleeper.running_since_s = now_s
        if sleeper.phase == "waking":
            sleeper.phase = "awake"
        elif sleeper.phase == "awake":
            idle_s = self.idle_s(digest, now_s)
            if (
                idle_timeout_s is not None
                and idle_s is not None
                and idle_s >= idle_timeout_s
                and self._fresh(now_s)  # an ingress that nobody hears may hold requests
            ):
                logger.info("base %s goes to sleep, idle for %.0f s", digest[:12], idle_s)
                self._lie_down(sleeper, now_s)
        elif sleeper.phase == "drowsy":
            self._step_drowsy(digest, sleeper, now_s)
        return sleeper.phase

    def _step_drowsy(self, digest: str, sleeper: _Sleeper, now_s: float) -> None:
        fresh = self._fresh(now_s)
        if self.num_open(digest, now_s) or now_s - sleeper.since_s > _DROWSY_MAX_S:
            self._call_off(sleeper, now_s)
        elif fresh and all((digest, sleeper.rest_id) in h.report.asleep for h in fresh):
            sleeper.phase, sleeper.since_s = "asleep", now_s
            sleeper.running_since_s = None

    def _lie_down(self, sleeper: _Sleeper, now_s: float) -> None:
        sleeper.phase = "drowsy"
        sleeper.since_s = sleeper.rest_id = now_s

    def _call_off(self, sleeper: _Sleeper, now_s: float) -> None:
        sleeper.phase = "awake"
        sleeper.since_s = sleeper.running_since_s = now_s

    def _fresh(self, now_s: float) -> Sequence[HeardReport]:
        return [h for h in self._heard.values() if now_s - h.at_s <= REPORT_MAX_AGE_S]

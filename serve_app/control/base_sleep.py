"""Scale to zero: when a base goes to sleep and when it wakes. Pure: time, reports and orders come
in.

awake --idle for long, or ordered--> draining --every ingress released it--> asleep --wake--> waking
  ^------------- a request came --------'                                                       |
  ^---------------------------------------- it runs --------------------------------------------'

Draining: views already call the base asleep, so that ingresses send it no more requests, but its
engines still run, and a request in this time gets them back at once. They are stopped only when
every ingress has reported that it released the base and has no open request: no request can reach
an engine that is being stopped.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

from serve_app.messages import Backlog, BaseActivity, IngressReport, ReportAnswer, total

logger = logging.getLogger(__name__)

Phase = Literal["awake", "draining", "asleep", "waking"]

REPORT_MAX_AGE_S = 5.0  # then the ingress is gone, and its requests with it
_DRAINING_MAX_S = 15.0  # then sleep is cancelled: an ingress did not report a release


@dataclass(slots=True)
class _BaseSleep:
    phase: Phase
    since_s: float
    running_since_s: float | None = None
    sleep_epoch: float = 0.0  # when it last began to drain


class ScaleToZero:
    """The phases of all bases, by digest, and the latest report of each ingress. A base that was
    never seen is awake."""

    def __init__(self) -> None:
        self._bases: dict[str, _BaseSleep] = {}
        self._reports: dict[str, tuple[IngressReport, float]] = {}  # by ingress; when it came
        # By base: the end of its last request, at any ingress, which may be gone by now.
        self._last_used_s: dict[str, float] = {}

    def add_report(self, report: IngressReport, now_s: float) -> None:
        self._reports[report.ingress_id] = report, now_s
        for base in report.bases:
            used_s = now_s if base.num_open else now_s - base.idle_s
            if used_s > self._last_used_s.get(base.digest, float("-inf")):
                self._last_used_s[base.digest] = used_s
        for ingress_id in self._reports.keys() - {one.ingress_id for one in self._fresh(now_s)}:
            del self._reports[ingress_id]

    @property
    def has_reports(self) -> bool:
        return bool(self._reports)

    def restore(self, now_s: float) -> None:
        """Marks the bases asleep that ingresses report as asleep: they slept under the previous
        manager."""
        for report in self._fresh(now_s):
            for digest, _ in report.asleep:
                self._bases.setdefault(digest, _BaseSleep("asleep", now_s))

    def is_released(self, application: str, since_s: float, now_s: float) -> bool:
        """True if every ingress reported after `since_s` that it does not use the application."""
        fresh = self._fresh(now_s)
        return bool(fresh) and all(
            self._reports[one.ingress_id][1] > since_s and application not in one.applications
            for one in fresh
        )

    def phase(self, digest: str) -> Phase:
        base = self._bases.get(digest)
        return "awake" if base is None else base.phase

    def sleep_epoch(self, digest: str) -> float:
        """Goes out with the view and comes back in reports: an ingress released the base this
        time, not an earlier time."""
        base = self._bases.get(digest)
        return 0.0 if base is None else base.sleep_epoch

    def wake(self, digest: str, now_s: float) -> None:
        base = self._bases.get(digest)
        if base is None:
            return
        if base.phase == "asleep":
            logger.info("base %s wakes", digest[:12])
            base.phase, base.since_s = "waking", now_s
        elif base.phase == "draining":
            self._cancel_sleep(base, now_s)

    def request_sleep(self, digest: str, now_s: float) -> None:
        """An operator's order; a request within the next moments still cancels it."""
        base = self._bases.get(digest)
        if base is not None and base.phase == "awake" and base.running_since_s is not None:
            self._begin_sleep(base, now_s)

    def retain(self, wanted: set[str]) -> None:
        """Forgets all bases but these."""
        for digest in self._bases.keys() - wanted:
            del self._bases[digest]
        for digest in self._last_used_s.keys() - wanted:
            del self._last_used_s[digest]

    def answer(self, ingress_id: str, now_s: float) -> ReportAnswer:
        """The answer to a report of this ingress: the reports of the others."""
        fresh = self._fresh(now_s)
        others = (one.quarantined for one in fresh if one.ingress_id != ingress_id)
        return ReportAnswer(len(fresh), tuple(entry for entries in others for entry in entries))

    def num_open(self, digest: str, now_s: float) -> int:
        return sum(base.num_open for base in self._activities(digest, now_s))

    def num_open_when_draining(self, now_s: float) -> int | None:
        """The requests that are still open. Returns None until every ingress has reported that it
        accepts no new requests."""
        fresh = self._fresh(now_s)
        if not fresh or not all(report.is_draining for report in fresh):
            return None
        return sum(base.num_open for report in fresh for base in report.bases)

    def backlog(self, digest: str, now_s: float) -> Backlog:
        """The sum over all ingresses."""
        return total([base.backlog for base in self._activities(digest, now_s)])

    def idle_s(self, digest: str, now_s: float) -> float | None:
        """Seconds since the last request, or since the start if there was none. Returns None while
        the base does not run."""
        base = self._bases.get(digest)
        if base is None or base.running_since_s is None:
            return None
        if self.num_open(digest, now_s):
            return 0.0
        used_s = self._last_used_s.get(digest, base.running_since_s)
        return now_s - max(base.running_since_s, used_s)

    def step(
        self, digest: str, is_running: bool, idle_timeout_s: float | None, now_s: float
    ) -> Phase:
        """Called once per round for each base that is to be served; returns its new phase."""
        base = self._bases.setdefault(digest, _BaseSleep("awake", now_s))
        if not is_running:
            base.running_since_s = None
            if base.phase == "draining":
                base.phase = "awake"
            return base.phase
        if base.running_since_s is None:
            base.running_since_s = now_s
        if base.phase == "waking":
            base.phase = "awake"
        elif base.phase == "awake":
            idle_s = self.idle_s(digest, now_s)
            if (
                idle_timeout_s is not None
                and idle_s is not None
                and idle_s >= idle_timeout_s
                and self._fresh(now_s)  # an ingress whose reports are lost may hold requests
            ):
                logger.info("base %s goes to sleep, idle for %.0f s", digest[:12], idle_s)
                self._begin_sleep(base, now_s)
        elif base.phase == "draining":
            self._step_draining(digest, base, now_s)
        return base.phase

    def _step_draining(self, digest: str, base: _BaseSleep, now_s: float) -> None:
        fresh = self._fresh(now_s)
        if self.num_open(digest, now_s) or now_s - base.since_s > _DRAINING_MAX_S:
            self._cancel_sleep(base, now_s)
        elif fresh and all((digest, base.sleep_epoch) in report.asleep for report in fresh):
            base.phase, base.since_s = "asleep", now_s
            base.running_since_s = None

    def _begin_sleep(self, base: _BaseSleep, now_s: float) -> None:
        base.phase = "draining"
        base.since_s = base.sleep_epoch = now_s

    def _cancel_sleep(self, base: _BaseSleep, now_s: float) -> None:
        base.phase = "awake"
        base.since_s = base.running_since_s = now_s

    def _activities(self, digest: str, now_s: float) -> list[BaseActivity]:
        """The base's activity at each ingress."""
        bases = (base for report in self._fresh(now_s) for base in report.bases)
        return [base for base in bases if base.digest == digest]

    def _fresh(self, now_s: float) -> list[IngressReport]:
        reports = self._reports.values()
        return [report for report, at_s in reports if now_s - at_s <= REPORT_MAX_AGE_S]

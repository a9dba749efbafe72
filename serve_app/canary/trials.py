"""The trial of each split adapter: the counts of its arms since it began, summed over ingresses.

A trial is a set of versions with a share of the traffic: an alias that moves begins a new trial.
Reads no registry and does not act on verdicts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from serve_app.canary.split import DesiredArm, Split
from serve_app.canary.verdict import SPANS_PER_WINDOW, Verdict, judge, mostly_fails, non_finite
from serve_app.config import CanaryArgs
from serve_app.messages import IngressReport
from serve_app.tally import Arm, ArmCounts, ArmKey

_FORGET_S = 600.0  # an ingress that does not report for this long is gone

Versions = tuple[str, str | None, str | None]  # digests: stable, canary, shadow


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    """The counts of both arms at a moment of a trial."""

    at_s: float
    stable: ArmCounts
    canary: ArmCounts


@dataclass(slots=True, eq=False)
class Trial:
    name: str
    versions: Versions
    begun_s: float
    is_running: bool = True
    is_all_canary: bool = False  # the stable version gets no requests
    counts_by_arm: dict[Arm, ArmCounts] = field(default_factory=dict)
    _checkpoints: list[_Checkpoint] = field(init=False)  # the oldest first

    def __post_init__(self) -> None:
        self._checkpoints = [_Checkpoint(self.begun_s, ArmCounts(), ArmCounts())]

    def counts(self, arm: Arm) -> ArmCounts:
        return self.counts_by_arm.get(arm, ArmCounts())

    def add(self, key: ArmKey, new: ArmCounts) -> None:
        arms: tuple[Arm, ...] = ("stable", "canary", "shadow")
        if dict(zip(arms, self.versions, strict=True))[key.arm] == key.digest:
            self.counts_by_arm[key.arm] = self.counts(key.arm) + new

    def verdict(self, rule: CanaryArgs, now_s: float) -> Verdict:
        """Judges the whole trial, and also each span from a later checkpoint until now, so that a
        good past does not hide a bad present."""
        now = _Checkpoint(now_s, self.counts("stable"), self.counts("canary"))
        self._thin(rule, now_s)
        whole = judge(*self._span(self._checkpoints[0], now), rule)
        reason = non_finite(now.canary - self._window_start(rule, now).canary, rule)
        reason = reason or whole.reason or mostly_fails(now.stable, now.canary, rule)
        for then in self._checkpoints[1:]:
            has_enough = now.canary.num_seen - then.canary.num_seen >= rule.min_requests
            if reason is None and has_enough:
                reason = judge(*self._span(then, now), rule).reason
        last = self._checkpoints[-1]
        is_due = now_s - last.at_s >= rule.window_s / SPANS_PER_WINDOW
        if is_due and now.canary.num_seen > last.canary.num_seen:
            self._checkpoints.append(now)
        return Verdict(reason, whole.has_enough)

    def _span(self, then: _Checkpoint, now: _Checkpoint) -> tuple[ArmCounts, ArmCounts]:
        """Returns the counts of stable and canary to compare. If stable has no judged request in
        the span, a canary with all the traffic is compared with stable's earlier counts, or with
        rates of 0 if there are none; any other canary is not compared (but see `mostly_fails`)."""
        stable, canary = now.stable - then.stable, now.canary - then.canary
        if stable.num_judged:
            return stable, canary
        return now.stable, canary if self.is_all_canary else ArmCounts()

    def _window_start(self, rule: CanaryArgs, now: _Checkpoint) -> _Checkpoint:
        """Returns the last checkpoint before the window, or an older checkpoint if the window has
        fewer than `min_requests`."""
        for point in reversed(self._checkpoints):
            num = now.canary.num_judged - point.canary.num_judged
            if point.at_s <= now.at_s - rule.window_s and num >= rule.min_requests:
                return point
        return self._checkpoints[0]

    def _thin(self, rule: CanaryArgs, now_s: float) -> None:
        """Drops checkpoints, so that beyond two windows their age at least doubles with every
        second checkpoint and a month needs about thirty."""
        index = 1
        while index < len(self._checkpoints) - 1:
            older_s, newer_s = (now_s - self._checkpoints[index + step].at_s for step in (-1, 1))
            if newer_s > 2 * rule.window_s and older_s < 2 * newer_s:
                del self._checkpoints[index]
            else:
                index += 1


class Trials:
    def __init__(self, rule: CanaryArgs) -> None:
        self.by_name: dict[str, Trial] = {}  # the latest trial of each adapter, ended or not
        self._rule = rule
        # By ingress: the time and the counts of its last report.
        self._seen: dict[str, tuple[float, dict[ArmKey, ArmCounts]]] = {}

    def add_report(self, report: IngressReport, now_s: float) -> None:
        """Adds the increase since this ingress's last report. Its first report is only the starting
        point: earlier counts belong to another manager, or to a trial long over."""
        arms = dict(report.arms)
        _, known = self._seen.get(report.ingress_id, (now_s, arms))
        self._seen[report.ingress_id] = (now_s, arms)
        for key, counts in arms.items():
            trial = self.by_name.get(key.adapter)
            before = known.get(key, ArmCounts())
            if sum(counts.outcomes) < sum(before.outcomes):  # dropped there, and begun again at 0
                before = ArmCounts()
            if trial is not None and trial.is_running and counts != before:
                trial.add(key, counts - before)
        for ingress_id in [i for i, (at_s, _) in self._seen.items() if at_s < now_s - _FORGET_S]:
            del self._seen[ingress_id]

    def follow(self, splits: Mapping[str, Split], now_s: float) -> None:
        """Begins and ends trials so that they match the present splits."""
        for name, trial in tuple(self.by_name.items()):
            split = splits.get(name)
            if split is None:
                del self.by_name[name]
            elif not split.is_active or _versions(split) != trial.versions:
                trial.is_running = False
        for name, split in splits.items():
            known = self.by_name.get(name)
            if split.is_active and (known is None or not known.is_running):
                known = self.by_name[name] = Trial(name, _versions(split), now_s)
            if known is not None:
                known.is_all_canary = split.canary.share >= 1

    def verdicts(self, now_s: float) -> dict[str, Verdict]:
        return {
            name: trial.verdict(self._rule, now_s)
            for name, trial in self.by_name.items()
            if trial.is_running
        }


def _versions(split: Split) -> Versions:
    return split.stable.digest, _in_use(split.canary), _in_use(split.shadow)


def _in_use(arm: DesiredArm) -> str | None:
    return arm.version.digest if arm.version is not None and arm.share > 0 else None

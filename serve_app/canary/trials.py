"""What the arms of each split adapter did since its trial began, added up over the ingresses.

A trial is one set of versions with a share of the traffic: an alias that moves begins a new one.
Ignorant of the registry and of what a verdict leads to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from serve_app.canary.split import Split, Wish
from serve_app.canary.verdict import SPANS_A_WINDOW, Verdict, judge, mostly_fails, non_finite
from serve_app.config import CanaryArgs
from serve_app.messages import IngressReport
from serve_app.tally import Arm, ArmCounts, ArmKey

_FORGET_S = 600.0  # an ingress that is silent for so long does not come back

Versions = tuple[str, str | None, str | None]  # digests: stable, canary, shadow


@dataclass(frozen=True, slots=True)
class _Point:
    """Both arms' counts at one moment of a trial."""

    at_s: float
    stable: ArmCounts
    canary: ArmCounts


@dataclass(slots=True, eq=False)
class Trial:
    name: str
    versions: Versions
    begun_s: float
    is_running: bool = True
    is_all_canary: bool = False  # no request goes to the stable version
    tallies: dict[Arm, ArmCounts] = field(default_factory=dict)
    _points: list[_Point] = field(init=False)  # the oldest first

    def __post_init__(self) -> None:
        self._points = [_Point(self.begun_s, ArmCounts(), ArmCounts())]

    def tally(self, arm: Arm) -> ArmCounts:
        return self.tallies.get(arm, ArmCounts())

    def add(self, key: ArmKey, new: ArmCounts) -> None:
        arms: tuple[Arm, ...] = ("stable", "canary", "shadow")
        if dict(zip(arms, self.versions, strict=True))[key.arm] == key.digest:
            self.tallies[key.arm] = self.tally(key.arm) + new

    def verdict(self, rule: CanaryArgs, now_s: float) -> Verdict:
        """Judges all that was since the begin, and apart from it what was since several later
        moments, so that an old good time does not hide a bad present."""
        now = _Point(now_s, self.tally("stable"), self.tally("canary"))
        self._thin(rule, now_s)
        whole = judge(*self._span(self._points[0], now), rule)
        reason = non_finite(now.canary - self._window_start(rule, now).canary, rule)
        reason = reason or whole.reason or mostly_fails(now.stable, now.canary, rule)
        for then in self._points[1:]:
            has_enough = now.canary.num_seen - then.canary.num_seen >= rule.min_requests
            if reason is None and has_enough:
                reason = judge(*self._span(then, now), rule).reason
        last = self._points[-1]
        is_due = now_s - last.at_s >= rule.window_s / SPANS_A_WINDOW
        if is_due and now.canary.num_seen > last.canary.num_seen:
            self._points.append(now)
        return Verdict(reason, whole.has_enough)

    def _span(self, then: _Point, now: _Point) -> tuple[ArmCounts, ArmCounts]:
        """Of stable and canary. A canary that has all the traffic is compared with what stable did
        earlier, or else with rates of 0; one beside which stable only had no request yet, not at
        all (but see `mostly_fails`)."""
        stable, canary = now.stable - then.stable, now.canary - then.canary
        if stable.num_judged:
            return stable, canary
        return now.stable, canary if self.is_all_canary else ArmCounts()

    def _window_start(self, rule: CanaryArgs, now: _Point) -> _Point:
        """The last point before the window, or an older one for the sake of `min_requests`."""
        for point in reversed(self._points):
            num = now.canary.num_judged - point.canary.num_judged
            if point.at_s <= now.at_s - rule.window_s and num >= rule.min_requests:
                return point
        return self._points[0]

    def _thin(self, rule: CanaryArgs, now_s: float) -> None:
        """Beyond two windows each second point is at least twice as old as the one after the next,
        so that a month needs about thirty."""
        index = 1
        while index < len(self._points) - 1:
            older_s, newer_s = (now_s - self._points[index + step].at_s for step in (-1, 1))
            if newer_s > 2 * rule.window_s and older_s < 2 * newer_s:
                del self._points[index]
            else:
                index += 1


class Trials:
    def __init__(self, rule: CanaryArgs) -> None:
        self.by_name: dict[str, Trial] = {}  # the last one of each adapter, ended or not
        self._rule = rule
        self._seen: dict[
            str, tuple[float, dict[ArmKey, ArmCounts]]
        ] = {}  # by ingress: when and what

    def take(self, report: IngressReport, now_s: float) -> None:
        """Adds what is new since this ingress's last report. Its first one only says where it
        stands: what it counted before was under another manager, or in a trial long over."""
        arms = dict(report.arms)
        _, known = self._seen.get(report.ingress_id, (now_s, arms))
        self._seen[report.ingress_id] = (now_s, arms)
        for key, tally in arms.items():
            trial = self.by_name.get(key.adapter)
            before = known.get(key, ArmCounts())
            if sum(tally.outcomes) < sum(before.outcomes):  # forgotten there, and new again
                before = ArmCounts()
            if trial is not None and trial.is_running and tally != before:
                trial.add(key, tally - before)
        for ingress_id in [i for i, (at_s, _) in self._seen.items() if at_s < now_s - _FORGET_S]:
            del self._seen[ingress_id]

    def follow(self, splits: Mapping[str, Split], now_s: float) -> None:
        """Begins and ends trials as the traffic is split now."""
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


def _in_use(wish: Wish) -> str | None:
    return wish.version.digest if wish.version is not None and wish.share > 0 else None

"""One truth about all ingresses: the sums of what they count, kept by the manager.

An ingress sends its exposition with each report and with each scrape that it answers, so every
count that was shown has passed here and sums never fall. Counters and histograms of an ingress that
ended stay in them; gauges are sums over those that live. The label `ingress` is gone. After a
restart of the manager every sum begins at zero, as a counter of any process that restarts: an
ingress that reported to an earlier manager counts from its first report on. Pure: time comes in.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from serve_app.messages import IngressCounts

MAX_AGE_S = 8.0  # of an ingress's counts, which come every 3 s: then it does not live
MAX_GONE = 32  # ingresses remembered one by one, as they may come back after a pause

_LABEL = re.compile(rb',ingress="[^"]*"|(?<=\{)ingress="[^"]*",|\{ingress="[^"]*"\}')
_SUMMED = (b"counter", b"histogram")

Key = tuple[bytes, bytes]  # family, sample with its labels
Values = dict[Key, float]


@dataclass(slots=True)
class _Ingress:
    counts: IngressCounts
    heard_s: float
    counters: Values = field(default_factory=dict)
    before: Values = field(default_factory=dict)  # counted for an earlier manager
    gauges: Values = field(default_factory=dict)
    common: Values = field(default_factory=dict)  # not an ingress's own: all show the same
    is_read: bool = False


class IngressTotals:
    """All methods belong to the manager's event loop."""

    def __init__(self) -> None:
        self._ingresses: dict[str, _Ingress] = {}
        # Of ingresses and of series that ended.
        self._past: defaultdict[Key, float] = defaultdict(float)
        self._ended: set[Key] = set()  # series that an ingress does not show any more
        self._heads: dict[bytes, list[bytes]] = {}  # by family

    def take(self, ingress_id: str, counts: IngressCounts, now_s: float) -> None:
        known = self._ingresses.get(ingress_id)
        if known is None:
            new = self._ingresses[ingress_id] = _Ingress(counts, now_s)
            if counts.was_taken:
                self._read(new)
                new.before = dict(new.counters)
            self._forget(now_s)
        elif counts.serial > known.counts.serial:  # two calls may overtake each other
            known.counts, known.heard_s, known.is_read = counts, now_s, False

    def text(self, now_s: float) -> bytes:
        """In Prometheus' text format."""
        for one in self._ingresses.values():
            self._read(one)
        living = [one for one in self._ingresses.values() if now_s - one.heard_s <= MAX_AGE_S]
        self._drop_ended(living)
        sums: defaultdict[Key, float] = defaultdict(float)
        for one in self._ingresses.values():
            for key, value in one.counters.items():
                sums[key] += value - one.before.get(key, 0.0)
        for key, value in self._past.items():
            sums[key] += value
        for one in living:
            for key, value in one.gauges.items():
                sums[key] += value
            for key, value in one.common.items():
                sums[key] = max(sums[key], value)
        families = {name: list(head) for name, head in self._heads.items()}
        for (family, sample), value in sums.items():
            families[family].append(b"%s %s" % (sample, repr(float(value)).encode()))
        return b"".join(line + b"\n" for lines in families.values() for line in lines)

    def _read(self, one: _Ingress) -> None:
        """What an ingress sent last. A series of its own that fell began anew, and one that is not
        shown any more ended: both stay in the sums as they were."""
        if one.is_read:
            return
        one.is_read = True
        old, one.counters, one.gauges, one.common = one.counters, {}, {}, {}
        for key, kind, is_own, value in self._samples(one.counts.text):
            if not is_own:
                one.common[key] = value
            elif kind in _SUMMED:
                one.counters[key] = value
            else:
                one.gauges[key] = value
        for key, value in old.items():
            new = one.counters.get(key)
            if new is None or new < value:
                self._past[key] += value - one.before.pop(key, 0.0)
                if new is None:
                    self._ended.add(key)

    def _samples(self, text: bytes) -> Iterator[tuple[Key, bytes, bool, float]]:
        """Key, type, whether it is labelled as an ingress's own, value."""
        family, kind = b"", b""
        for line in text.splitlines():
            if line.startswith(b"# "):
                _, word, family, rest = line.split(b" ", 3)
                if word == b"TYPE":
                    kind = rest
                head = self._heads.setdefault(family, [])
                if line not in head:
                    head.append(line)
            elif line:
                name, _, value = line.rpartition(b" ")
                sample = _LABEL.sub(b"", name, count=1)
                yield (family, sample), kind, sample != name, float(value)

    def _drop_ended(self, living: list[_Ingress]) -> None:
        """Series that somebody ended and nobody shows leave the sums: their label is unregistered.
        Without that, versions that came and went would pile up."""
        for key in [key for key in self._ended if not any(key in one.counters for one in living)]:
            self._ended.remove(key)
            self._past.pop(key, None)
            for one in self._ingresses.values():
                one.counters.pop(key, None)
                one.before.pop(key, None)

    def _forget(self, now_s: float) -> None:
        """The oldest of many that ended become one sum. Should one come back after all, its report
        says that it was heard before, so that nothing is counted twice."""
        gone = [name for name, one in self._ingresses.items() if now_s - one.heard_s > MAX_AGE_S]
        gone.sort(key=lambda name: self._ingresses[name].heard_s)
        for name in gone[: max(0, len(gone) - MAX_GONE)]:
            one = self._ingresses.pop(name)
            self._read(one)
            for key, value in one.counters.items():
                self._past[key] += value - one.before.get(key, 0.0)

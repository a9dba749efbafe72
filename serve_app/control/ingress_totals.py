"""The sums of the metrics of all ingresses, kept by the manager.

An ingress sends its exposition with some of its reports and with each scrape that it answers, so
that the sums include every count that was exposed and never fall. Counters and histograms of an
ingress that ended stay in them; gauges are summed over live ingresses. The label `ingress` is
removed. After a restart of the manager every sum begins at zero, as a counter of any process that
restarts: an ingress that reported to an earlier manager counts from its first report on. Pure: time
comes in.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from serve_app.messages import IngressCounts

MAX_AGE_S = 8.0  # counts come every 3 s; an ingress with older counts is not live
MAX_GONE = 32  # ended ingresses remembered singly: they may come back after a pause

_LABEL = re.compile(rb',ingress="[^"]*"|(?<=\{)ingress="[^"]*",|\{ingress="[^"]*"\}')
_SUMMED = (b"counter", b"histogram")

Key = tuple[bytes, bytes]  # family, sample with its labels
Values = dict[Key, float]


@dataclass(slots=True)
class _Ingress:
    counts: IngressCounts
    received_s: float
    counters: Values = field(default_factory=dict)
    before: Values = field(default_factory=dict)  # reported to an earlier manager
    gauges: Values = field(default_factory=dict)
    common: Values = field(default_factory=dict)  # without an ingress label: equal at all
    is_read: bool = False


class IngressTotals:
    """All methods belong to the manager's event loop."""

    def __init__(self) -> None:
        self._ingresses: dict[str, _Ingress] = {}
        # Counts of ingresses and of series that ended.
        self._past: defaultdict[Key, float] = defaultdict(float)
        self._ended: set[Key] = set()  # series that an ingress no longer exposes
        self._heads: dict[bytes, list[bytes]] = {}  # by family

    def add(self, ingress_id: str, counts: IngressCounts, now_s: float) -> None:
        known = self._ingresses.get(ingress_id)
        if known is None:
            new = self._ingresses[ingress_id] = _Ingress(counts, now_s)
            if counts.was_taken:
                self._read(new)
                new.before = dict(new.counters)
            self._forget(now_s)
        elif counts.serial > known.counts.serial:  # calls may arrive out of order
            known.counts, known.received_s, known.is_read = counts, now_s, False

    def text(self, now_s: float) -> bytes:
        """Returns the sums in Prometheus' text format."""
        for ingress in self._ingresses.values():
            self._read(ingress)
        live = [i for i in self._ingresses.values() if now_s - i.received_s <= MAX_AGE_S]
        self._drop_ended(live)
        sums: defaultdict[Key, float] = defaultdict(float)
        for ingress in self._ingresses.values():
            for key, value in ingress.counters.items():
                sums[key] += value - ingress.before.get(key, 0.0)
        for key, value in self._past.items():
            sums[key] += value
        for ingress in live:
            for key, value in ingress.gauges.items():
                sums[key] += value
            for key, value in ingress.common.items():
                sums[key] = max(sums[key], value)
        families = {name: list(head) for name, head in self._heads.items()}
        for (family, sample), value in sums.items():
            families[family].append(b"%s %s" % (sample, repr(float(value)).encode()))
        return b"".join(line + b"\n" for lines in families.values() for line in lines)

    def _read(self, ingress: _Ingress) -> None:
        """Parses the last counts of an ingress. A series of its own that fell has restarted, and a
        series that is no longer exposed has ended: the old values stay in the sums."""
        if ingress.is_read:
            return
        ingress.is_read = True
        old, ingress.counters, ingress.gauges, ingress.common = ingress.counters, {}, {}, {}
        for key, kind, is_own, value in self._samples(ingress.counts.text):
            if not is_own:
                ingress.common[key] = value
            elif kind in _SUMMED:
                ingress.counters[key] = value
            else:
                ingress.gauges[key] = value
        for key, value in old.items():
            new = ingress.counters.get(key)
            if new is None or new < value:
                self._past[key] += value - ingress.before.pop(key, 0.0)
                if new is None:
                    self._ended.add(key)

    def _samples(self, text: bytes) -> Iterator[tuple[Key, bytes, bool, float]]:
        """Yields (key, type, whether it has an ingress label, value)."""
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

    def _drop_ended(self, live: list[_Ingress]) -> None:
        """Removes series from the sums that an ingress ended and no live ingress exposes: the
        version in their labels is unregistered. Otherwise they would accumulate."""
        for key in [key for key in self._ended if not any(key in i.counters for i in live)]:
            self._ended.remove(key)
            self._past.pop(key, None)
            for ingress in self._ingresses.values():
                ingress.counters.pop(key, None)
                ingress.before.pop(key, None)

    def _forget(self, now_s: float) -> None:
        """Merges the oldest ended ingresses into one sum. If such an ingress comes back, its report
        has `was_taken` set, so that nothing is counted twice."""
        gone = [n for n, one in self._ingresses.items() if now_s - one.received_s > MAX_AGE_S]
        gone.sort(key=lambda name: self._ingresses[name].received_s)
        for name in gone[: max(0, len(gone) - MAX_GONE)]:
            ingress = self._ingresses.pop(name)
            self._read(ingress)
            for key, value in ingress.counters.items():
                self._past[key] += value - ingress.before.get(key, 0.0)

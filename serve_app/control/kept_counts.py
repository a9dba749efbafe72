"""The counts that the manager keeps: the sums over all ingresses, and the last counters of engines
whose base sleeps. Pure: the time is an argument.

An ingress sends its exposition with each report and with each scrape that it answers, so every
exported count has passed through here and sums never fall. The sums of counters and histograms have
every increase, also those of ingresses that ended; gauges are sums over the live ingresses. The
label `ingress` is removed. After a restart of the manager every sum begins at zero, like a counter
of any restarted process: an ingress that reported to an earlier manager counts from its first
report on.

An engine that sleeps is a process that ended. Its counters stay in the exposition until the base
runs again, under the same labels, so that sums over engines do not fall and no rate sees a gap. Its
gauges go, except for the state of sleep. After a restart of the manager there are no counters of
bases that slept before.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from serve_app.messages import IngressCounts
from serve_app.metrics.exposition import join_texts

MAX_AGE_S = 8.0  # of the counts of a live ingress, which come every 3 s
MAX_GONE = 32  # ended ingresses that are kept separately, as they may come back after a pause

_LABEL = re.compile(rb',ingress="[^"]*"|(?<=\{)ingress="[^"]*",|\{ingress="[^"]*"\}')
_SUMMED = (b"counter", b"histogram")

_STATE = b"vllm:engine_sleep_state"
_ASLEEP = b'sleep_state="discard_all"'

EngineTexts = Mapping[str, Sequence[bytes]]  # expositions of the engine replicas, by base digest
Key = tuple[bytes, bytes]  # family, sample with its labels
Values = dict[Key, float]


@dataclass(slots=True)
class _Ingress:
    counts: IngressCounts
    reported_s: float
    counters: Values = field(default_factory=dict)  # as of the last counts that were read
    gauges: Values = field(default_factory=dict)
    common: Values = field(default_factory=dict)  # without the label: equal at all ingresses
    is_read: bool = False


class IngressTotals:
    """All methods belong to the manager's event loop."""

    def __init__(self) -> None:
        self._ingresses: dict[str, _Ingress] = {}
        self._sums: defaultdict[Key, float] = defaultdict(float)  # of the counters' increases
        self._ended: set[Key] = set()  # series that an ingress does not export any more
        self._heads: dict[bytes, list[bytes]] = {}  # by family

    def add(self, ingress_id: str, counts: IngressCounts, now_s: float) -> None:
        known = self._ingresses.get(ingress_id)
        if known is None:
            new = self._ingresses[ingress_id] = _Ingress(counts, now_s)
            if counts.was_taken:  # only its later increases are added
                self._parse(new)
                self._sums.update({key: self._sums[key] for key in new.counters})
            self._forget(now_s)
        elif counts.serial > known.counts.serial:  # calls may overtake each other
            known.counts, known.reported_s, known.is_read = counts, now_s, False

    def text(self, now_s: float) -> bytes:
        """Returns the sums in Prometheus' text format."""
        for ingress in self._ingresses.values():
            self._read(ingress)
        living = [one for one in self._ingresses.values() if now_s - one.reported_s <= MAX_AGE_S]
        self._drop_ended(living)
        sums = self._sums.copy()
        for ingress in living:
            for key, value in ingress.gauges.items():
                sums[key] += value
            for key, value in ingress.common.items():
                sums[key] = max(sums[key], value)
        families = {name: list(head) for name, head in self._heads.items()}
        for (family, sample), value in sums.items():
            families[family].append(b"%s %s" % (sample, repr(float(value)).encode()))
        return b"".join(line + b"\n" for lines in families.values() for line in lines)

    def _read(self, ingress: _Ingress) -> None:
        """Adds the increases in the last counts of an ingress. A series of its own that fell has
        restarted, and a missing series has ended: the old values of both stay in the sums."""
        if ingress.is_read:
            return
        old = ingress.counters
        self._parse(ingress)
        for key, value in ingress.counters.items():
            before = old.get(key, 0.0)
            self._sums[key] += value - before if value >= before else value
        self._ended |= old.keys() - ingress.counters.keys()

    def _parse(self, ingress: _Ingress) -> None:
        ingress.is_read = True
        ingress.counters, ingress.gauges, ingress.common = {}, {}, {}
        for key, kind, is_own, value in self._samples(ingress.counts.text):
            if not is_own:
                ingress.common[key] = value
            elif kind in _SUMMED:
                ingress.counters[key] = value
            else:
                ingress.gauges[key] = value

    def _samples(self, text: bytes) -> Iterator[tuple[Key, bytes, bool, float]]:
        """Yields key, type, whether the series has the label `ingress`, and value."""
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
        """Removes ended series that no live ingress exports from the sums: their versions are
        unregistered, and would otherwise pile up."""
        for key in [key for key in self._ended if all(key not in one.counters for one in living)]:
            self._ended.remove(key)
            self._sums.pop(key, None)
            for ingress in self._ingresses.values():
                ingress.counters.pop(key, None)

    def _forget(self, now_s: float) -> None:
        """Forgets the oldest of many ended ingresses. If such an ingress comes back, its report has
        `was_taken` set, so that its counts are not added twice."""
        known = self._ingresses.items()
        gone = [name for name, one in known if now_s - one.reported_s > MAX_AGE_S]
        gone.sort(key=lambda name: self._ingresses[name].reported_s)
        for name in gone[: max(0, len(gone) - MAX_GONE)]:
            self._read(self._ingresses.pop(name))


class EngineCounters:
    def __init__(self) -> None:
        self._last: dict[str, tuple[bytes, ...]] = {}  # by base digest

    def add(self, texts: EngineTexts) -> None:
        """Adds the expositions of a scrape; a base without any keeps its last."""
        self._last |= {digest: tuple(found) for digest, found in texts.items() if found}

    def text(self, asleep: Collection[str], served: Collection[str]) -> bytes:
        """Returns the counters of the engines of sleeping bases, and forgets bases that are not
        served. Both are digests."""
        self._last = {digest: texts for digest, texts in self._last.items() if digest in served}
        found = [text for digest, texts in self._last.items() if digest in asleep for text in texts]
        return join_texts(map(_counters, found)) if found else b""


def _counters(text: bytes) -> bytes:
    """Returns the families that only grow, and the state of sleep."""
    lines: list[bytes] = []
    head: list[bytes] = []
    family, is_kept = b"", False
    for line in text.splitlines():
        if line.startswith(b"# "):
            _, word, family, rest = line.split(b" ", 3)
            if word == b"HELP":
                head = [line]
                is_kept = False
            elif rest in _SUMMED or family == _STATE:
                lines += (*head, line)
                is_kept = True
        elif is_kept and family == _STATE:
            name = line.rpartition(b" ")[0]
            lines.append(name + (b" 1.0" if _ASLEEP in name else b" 0.0"))
        elif is_kept:
            lines.append(line)
    return b"\n".join((*lines, b""))

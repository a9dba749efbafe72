"""Prometheus' text format: renders metric families, and joins the texts of several processes.

A family is the text of its HELP and TYPE lines and its samples. The output equals that of
prometheus_client's `generate_latest`, in a fraction of its time: an ingress renders its counts
every few seconds between requests.

Each function takes a family's name, its numbers and its labels: `own` are the process's, with their
values, and `labels` the names of the others. The numbers are by the values of `labels`: a string
for a single label, a tuple for several, and a plain number without any.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from prometheus_client.utils import floatToGoString

from serve_app.metrics.families import HELP
from serve_app.metrics.histograms import Histogram

T = TypeVar("T")

K = TypeVar("K", bound=str | tuple[str, ...])
Own = Mapping[str, str]
_Pairs = list[tuple[str, str]]  # each label with its text `label="value"`, sorted by label

_NONE: Own = {}


def counter(name: str, numbers: float | Mapping[K, float], own: Own = _NONE, *labels: str) -> str:
    """`name` comes without `_total`, which the text has."""
    return _plain_family(name, "_total", "counter", _samples(numbers, own, labels))


def gauge(name: str, numbers: float | Mapping[K, float], own: Own = _NONE, *labels: str) -> str:
    return _plain_family(name, "", "gauge", _samples(numbers, own, labels))


def histogram(
    name: str, histograms: Histogram | Mapping[K, Histogram], own: Own = _NONE, *labels: str
) -> str:
    lines = _head(name, "", "histogram")
    for pairs, counts in _samples(histograms, own, labels):
        before = "".join(f"{pair}," for label, pair in pairs if label < "le")
        after = "".join(f",{pair}" for label, pair in pairs if label > "le")
        total = 0
        for bound, count in zip(counts.bounds, counts.counts, strict=True):
            total += count
            lines.append(f'{name}_bucket{{{before}le="{bound}"{after}}} {_number(total)}')
        braces = _braces(pairs)
        lines.append(f"{name}_count{braces} {_number(total)}")
        lines.append(f"{name}_sum{braces} {_number(counts.total)}")
    return "\n".join((*lines, ""))


def as_text(*families: str) -> bytes:
    return "".join(families).encode()


def join_texts(texts: Iterable[bytes]) -> bytes:
    """Joins several texts: each family's HELP and TYPE once, its samples together."""
    heads: dict[bytes, list[bytes]] = {}
    samples: dict[bytes, list[bytes]] = {}
    for text in texts:
        family = b""
        for line in text.splitlines():
            if line.startswith(b"# "):
                kind, family = line.split(b" ", 3)[1:3]
                head = heads.setdefault(family, [])
                if len(head) < 2 and kind in (b"HELP", b"TYPE"):
                    head.append(line)
            elif line:
                samples.setdefault(family, []).append(line)
    lines = [line for family in heads for line in (*heads[family], *samples.get(family, ()))]
    return b"\n".join(lines) + b"\n"


def _plain_family(
    name: str, suffix: str, kind: str, samples: Iterable[tuple[_Pairs, float]]
) -> str:
    lines = _head(name, suffix, kind)
    lines += (f"{name}{suffix}{_braces(pairs)} {_number(number)}" for pairs, number in samples)
    return "\n".join((*lines, ""))


def _head(name: str, suffix: str, kind: str) -> list[str]:
    words = HELP[name].replace("\\", "\\\\").replace("\n", "\\n")
    return [f"# HELP {name}{suffix} {words}", f"# TYPE {name}{suffix} {kind}"]


def _samples(
    found: T | Mapping[Any, T], own: Own, labels: Sequence[str]
) -> Iterator[tuple[_Pairs, T]]:
    for key, number in found.items() if isinstance(found, Mapping) else [((), found)]:
        values = (key,) if isinstance(key, str) else key
        pairs = sorted(zip((*own, *labels), (*own.values(), *values), strict=True))
        yield [(label, f'{label}="{_escaped(value)}"') for label, value in pairs], number


def _braces(pairs: _Pairs) -> str:
    return f"{{{','.join(pair for _, pair in pairs)}}}" if pairs else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    text: str = floatToGoString(value)  # type: ignore[no-untyped-call]
    return text

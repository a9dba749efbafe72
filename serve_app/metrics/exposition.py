"""Prometheus' text format: renders metric families, and joins the texts of several processes.

A family is the text of its HELP and TYPE lines and its samples. The output equals that of
prometheus_client's `generate_latest`, in a fraction of its time: an ingress renders its counts
every few seconds between requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client.utils import floatToGoString

from serve_app.metrics.histograms import Histogram

Labels = Sequence[str]  # names
Values = Sequence[str]  # in the order of the labels
Rows = Iterable[tuple[Values, float]]


def counter(name: str, words: str, labels: Labels, rows: Rows) -> str:
    """`name` comes without `_total`, which the text has."""
    return _plain_family(f"{name}_total", "counter", words, labels, rows)


def gauge(name: str, words: str, labels: Labels, rows: Rows) -> str:
    return _plain_family(name, "gauge", words, labels, rows)


def histogram(
    name: str, words: str, labels: Labels, rows: Iterable[tuple[Values, Histogram]]
) -> str:
    lines = _head(name, "histogram", words)
    for values, counts in rows:
        pairs = _pairs(labels, values)
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


def _plain_family(name: str, kind: str, words: str, labels: Labels, rows: Rows) -> str:
    lines = _head(name, kind, words)
    lines += (f"{name}{_braces(_pairs(labels, values))} {_number(n)}" for values, n in rows)
    return "\n".join((*lines, ""))


def _head(name: str, kind: str, words: str) -> list[str]:
    words = words.replace("\\", "\\\\").replace("\n", "\\n")
    return [f"# HELP {name} {words}", f"# TYPE {name} {kind}"]


def _pairs(labels: Labels, values: Values) -> list[tuple[str, str]]:
    """Returns each label with its text `label="value"`, sorted by label."""
    pairs = sorted(zip(labels, values, strict=True))
    return [(label, f'{label}="{_escaped(value)}"') for label, value in pairs]


def _braces(pairs: Sequence[tuple[str, str]]) -> str:
    return f"{{{','.join(pair for _, pair in pairs)}}}" if pairs else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    text: str = floatToGoString(value)  # type: ignore[no-untyped-call]
    return text

"""What one ingress replica counts itself, and how several expositions become one.

Ignorant of the engines' families, which come as text.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


def rendered(collector: Collector) -> bytes:
    """As prometheus_client's `generate_latest`, in less than half of its time: an ingress renders
    its counts every few seconds between requests."""
    lines: list[str] = []
    for family in collector.collect():
        name = family.name + ("_total" if family.type == "counter" else "")
        words = family.documentation.replace("\\", "\\\\").replace("\n", "\\n")
        lines += (f"# HELP {name} {words}", f"# TYPE {name} {family.type}")
        for sample in family.samples:
            labels = ",".join(
                f'{key}="{_escaped(value)}"' for key, value in sorted(sample.labels.items())
            )
            braces = f"{{{labels}}}" if labels else ""
            lines.append(f"{sample.name}{braces} {floatToGoString(sample.value)}")  # type: ignore[no-untyped-call]
    return "\n".join((*lines, "")).encode()


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def join_texts(texts: Iterable[bytes]) -> bytes:
    """Several expositions as one: each family's HELP and TYPE once, its samples together."""
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

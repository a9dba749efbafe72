"""The last counters of engines whose base sleeps, kept by the manager.

An engine that sleeps is a process that ended. Its counters stay in the exposition until the base
runs again, under the same labels, so that sums over engines do not fall and no rate sees a gap. Its
gauges go, except for the state of sleep. After a restart of the manager there are no counters of
bases that slept before. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from serve_app.metrics.exposition import join_texts

EngineTexts = Mapping[str, Sequence[bytes]]  # expositions of the engine replicas, by base digest

_KEPT = (b"counter", b"histogram")
_STATE = b"vllm:engine_sleep_state"
_ASLEEP = b'sleep_state="discard_all"'


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
            elif rest in _KEPT or family == _STATE:
                lines += (*head, line)
                is_kept = True
        elif is_kept and family == _STATE:
            name = line.rpartition(b" ")[0]
            lines.append(name + (b" 1.0" if _ASLEEP in name else b" 0.0"))
        elif is_kept:
            lines.append(line)
    return b"\n".join((*lines, b""))

"""A prefix cache that knows chunks by name: least recently used first, and what changed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class PrefixCache:
    __slots__ = ("_cached", "_chunks", "_evicted", "chunk")

    def __init__(self, chunk: int) -> None:
        self.chunk = chunk  # tokens
        self._chunks: OrderedDict[int, None] = OrderedDict()
        self._cached: list[int] = []  # since the last `changes`
        self._evicted: list[int] = []

    @property
    def num_tokens(self) -> int:
        return len(self._chunks) * self.chunk

    def find(self, prefixes: Sequence[int], num_prompt: int) -> int:
        """Tokens found, never the very last: its logits are what the step is for."""
        chunks = self._chunks
        found = 0
        for digest in prefixes[: (num_prompt - 1) // self.chunk]:
            if digest not in chunks:
                break
            found += 1
        for digest in reversed(prefixes[:found]):  # the ends of prompts are given up first
            chunks.move_to_end(digest)
        return found * self.chunk

    def publish(self, prefixes: Sequence[int]) -> None:
        chunks = self._chunks
        for digest in reversed(prefixes):
            if digest in chunks:
                chunks.move_to_end(digest)
            else:
                chunks[digest] = None
                self._cached.append(digest)

    def shrink(self, num_tokens: int) -> None:
        """Gives up what was not used for longest, until it holds so many tokens at most."""
        limit = max(0, num_tokens // self.chunk)
        while len(self._chunks) > limit:
            self._evicted.append(self._chunks.popitem(last=False)[0])

    def changes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(cached, evicted) since the last call."""
        if not self._cached and not self._evicted:
            return (), ()
        chunks = self._chunks
        cached = tuple(digest for digest in self._cached if digest in chunks)
        evicted = tuple(digest for digest in self._evicted if digest not in chunks)
        self._cached.clear()
        self._evicted.clear()
        return cached, evicted

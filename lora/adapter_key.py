"""The key of a request's adapters: the digest of one, or `0.5*DIGEST+DIGEST` for several.

Their deltas add up, each times its weight, in the order of the key. The text names a combination
where a digest names an adapter: in the order of a batch, in the names of KV blocks, in routing. A
single adapter of weight 1 has its digest as its key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

_KNOWN = 4096  # keys whose parts are remembered


class Weighted(Protocol):
    """One adapter of a request: a `WeightedAdapter`, or an object with its fields."""

    @property
    def digest(self) -> str: ...
    @property
    def weight(self) -> float: ...


@dataclass(frozen=True, slots=True)
class WeightedAdapter:
    digest: str  # without + and *
    weight: float = 1.0  # finite; its value is that of the nearest float32


def adapter_key(adapters: Sequence[Weighted]) -> str | None:
    """Returns the key, None without adapters. Equal weights in float32 have equal keys."""
    return "+".join(_text(one) for one in adapters) or None


@lru_cache(_KNOWN)
def key_adapters(key: str) -> tuple[WeightedAdapter, ...]:
    """Returns the adapters of a key of `adapter_key`, in order."""
    return tuple(_read(part) for part in key.split("+"))


@lru_cache(_KNOWN)
def key_digests(key: str | None) -> tuple[str, ...]:
    return () if key is None else tuple(one.digest for one in key_adapters(key))


def _text(adapter: Weighted) -> str:
    weight = np.float32(adapter.weight)
    if weight == 1:
        return adapter.digest
    return f"{np.format_float_positional(weight, trim='-')}*{adapter.digest}"


def _read(part: str) -> WeightedAdapter:
    weight, times, digest = part.rpartition("*")
    return WeightedAdapter(digest, float(weight) if times else 1.0)

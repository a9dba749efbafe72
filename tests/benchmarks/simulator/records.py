"""The outcomes of all requests in columns, and the summaries made of them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tests.benchmarks.simulator.calls import Call

TIERS = ("", "device", "host", "disk", "registry")
_TIER_CODES = {name: code for code, name in enumerate(TIERS)}

Column = NDArray[np.float64]


class Records:
    """`stream_s`: from the end of a step to who reads of it."""

    def __init__(self, stream_s: float) -> None:
        self._stream_s = stream_s
        self._rows = array("d")
        self._names: dict[str, int] = {}  # of adapters and tenants

    _WIDTH = 12

    def __len__(self) -> int:
        return len(self._rows) // self._WIDTH

    def add(self, call: Call) -> None:
        ttft_s = call.first_s + self._stream_s - call.arrived_s
        self._rows.extend(
            (
                call.index,
                call.arrived_s,
                ttft_s,
                call.ended_s + self._stream_s - call.arrived_s,
                call.placed_s - call.arrived_s,
                call.expected_s,
                call.replica,
                _TIER_CODES[call.found_in],
                call.num_prompt,
                call.num_cached,
                call.num_output,
                self._code(call.adapter or "") * 65536 + self._code(call.tenant),
            )
        )

    def column(self, name: str) -> Column:
        table = np.frombuffer(self._rows, dtype=np.float64).reshape(-1, self._WIDTH)
        return table[:, _COLUMNS.index(name)]

    def adapters(self) -> Column:
        """A number for each one; `code_of` tells which."""
        return np.asarray(self.column("names") // 65536)

    def tenants(self) -> Column:
        return np.asarray(self.column("names") % 65536)

    def code_of(self, name: str) -> int:
        return self._code(name)

    def _code(self, name: str) -> int:
        return self._names.setdefault(name, len(self._names))


_COLUMNS = (
    "index",
    "arrived_s",
    "ttft_s",
    "duration_s",
    "held_s",  # before a replica was chosen
    "expected_s",
    "replica",
    "tier",
    "prompt",
    "cached",
    "output",
    "names",
)


def summary(records: Records, skip: float = 0.1) -> dict[str, object]:
    """Summarises all but the first `skip` of the requests, which find everything empty."""
    since_s = float(np.quantile(records.column("arrived_s"), skip)) if skip else 0.0
    counts = records.column("arrived_s") >= since_s
    ttft = records.column("ttft_s")[counts]
    prompt, cached = records.column("prompt")[counts], records.column("cached")[counts]
    tiers = records.column("tier")[counts]
    # From the choice of a replica on, without the constant of the front.
    known = {
        name: round(float(np.mean(tiers == code)), 4)
        for code, name in enumerate(TIERS)
        if name and np.any(tiers == code)
    }
    return {
        "requests": len(ttft),
        "ttft_ms": quantiles_ms(ttft),
        "mean_ttft_ms": round(1000 * float(ttft.mean()), 2),
        "prefix_hit_share": round(float(cached.sum() / prompt.sum()), 4),
        "adapters_found_in": known,
    }


def quantiles_ms(values_s: Column) -> dict[str, float]:
    found = np.quantile(values_s, (0.5, 0.95, 0.99))
    names = ("p50", "p95", "p99")
    shown = {name: round(1000 * float(v), 2) for name, v in zip(names, found, strict=True)}
    return shown | {"max": round(1000 * float(values_s.max()), 2)}


def jain(shares: Sequence[float]) -> float:
    """1: all have the same; 1/n: one has all."""
    values = np.asarray(shares)
    return float(values.sum() ** 2 / (len(values) * (values**2).sum()))


def over_time(
    times_s: Column, values: Column, bin_s: float, quantile: float
) -> tuple[list[float], list[float]]:
    """(middles of the bins, quantile of the values in each; below 0: their mean)."""
    bins = (times_s / bin_s).astype(int)
    order = np.argsort(bins, kind="stable")
    bins, values = bins[order], values[order]
    numbers, firsts = np.unique(bins, return_index=True)
    parts = np.split(values, firsts[1:])
    middles = [(float(number) + 0.5) * bin_s for number in numbers]
    if quantile < 0:
        return middles, [float(part.mean()) for part in parts]
    return middles, [float(np.quantile(part, quantile)) for part in parts]

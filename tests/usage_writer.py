"""A process that records batches of use without end, to be killed; with few imports."""

from __future__ import annotations

from pathlib import Path

from serve_app.tenancy.ledger import Ledger
from serve_app.tenancy.store import Store
from serve_app.tenancy.usage import Usage, UsageBatch, UsageKey

HOUR = 1_790_000_000 // 3600 * 3600
PIRATE = UsageKey("k1", "acme", "base", "pirate@3", 16)
BARE = UsageKey("k1", "acme", "base", "base@1")
OTHER = UsageKey("k2", "other", "base", "pirate@3", 16, "canary")


def batch(number: int, source: str = "i0-x", **rows: Usage) -> UsageBatch:
    keys = {"pirate": PIRATE, "bare": BARE, "other": OTHER}
    return UsageBatch(source, number, tuple((keys[name], one) for name, one in rows.items()))


def record_for_ever(url: str, started: str) -> None:
    """Writes the number of the last batch that was recorded into the file `started`."""
    ledger, number = Ledger(Store(url)), 0
    while True:
        number += 1
        ledger.record(batch(number, pirate=Usage(1, 1), bare=Usage(1, 1)), HOUR)
        new = Path(f"{started}.new")  # whole at all times, also if this process is killed
        new.write_text(str(number))
        new.replace(started)

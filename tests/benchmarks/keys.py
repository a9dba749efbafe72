"""Keys in an ingress: the memory of a table and the time of a check, as JSON lines.

Each line after the machine's has `name`, `value` and `unit`. A check is `Authenticator.check` with
all of its parts: the route, the headers, the hash and the scope.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import pickle
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from serve_app.errors import ApiError
from serve_app.tenancy.authentication import Authenticator
from serve_app.tenancy.caller import KeyPolicy
from serve_app.tenancy.keys import digest, new_id, new_key
from serve_app.tenancy.table import KeyDelta, KeyEntry, KeyTable
from tests.benchmarks.report import Report

PEPPER = b"of the benchmark"
PATH = "/v1/chat/completions"
ROUNDS = 20_000


def resident_bytes() -> int:
    gc.collect()
    found: int = psutil.Process().memory_info().rss
    return found


def make_keys(number: int) -> tuple[list[str], bytes]:
    """Returns keys, and the pickled delta with which a manager sends them."""
    texts = [new_key(new_id()) for _ in range(number)]
    entries = tuple(
        KeyEntry(
            text[4:14],
            KeyPolicy(f"tenant {n}", ("base:*", f"adapter-{n}"), requests_per_minute=n),
            digest(PEPPER, text),
        )
        for n, text in enumerate(texts)
    )
    return texts, pickle.dumps(KeyDelta("e-1", entries, (), True, PEPPER))


async def check_us(authenticator: Authenticator, texts: Sequence[str]) -> float:
    """Returns the microseconds of a check, refused ones included."""
    headers = [
        [
            (b"host", b"localhost"),
            (b"content-type", b"application/json"),
            (b"authorization", f"Bearer {text}".encode()),
        ]
        for text in texts
    ]
    began_s = time.perf_counter()
    for one in headers:
        with suppress(ApiError):
            await authenticator.check("POST", PATH, one)
    return 1e6 * (time.perf_counter() - began_s) / len(texts)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=10_000)
    parser.add_argument("--unknown", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path, help="a file that the lines are added to")
    options = parser.parse_args()
    lines = Report(options.out)
    lines.emit_machine("keys", keys=options.keys, unknown=options.unknown)

    def report(name: str, value: float, unit: str) -> None:
        lines.emit(name=name, value=round(value, 3), unit=unit)

    texts, content = make_keys(options.keys)
    table = KeyTable()
    authenticator = Authenticator(table, "the admin token")
    before = resident_bytes()
    began_s = time.perf_counter()
    table.apply(pickle.loads(content))
    report("apply_whole_table", 1e3 * (time.perf_counter() - began_s), "ms")
    report("table_resident", (resident_bytes() - before) / 1e6, "MB")
    report("delta_size", len(content) / 1e6, "MB")
    known = (texts * (1 + ROUNDS // len(texts)))[:ROUNDS]
    report("check_known", await check_us(authenticator, known), "us")
    batch = [new_key(new_id()) for _ in range(min(ROUNDS, options.unknown))]
    report("check_unknown", await check_us(authenticator, batch), "us")
    before = resident_bytes()
    for _ in range(max(1, options.unknown // len(batch))):
        await check_us(authenticator, [new_key(new_id()) for _ in batch])
    report("unknown_keys_resident", (resident_bytes() - before) / 1e6, "MB")


if __name__ == "__main__":
    asyncio.run(main())

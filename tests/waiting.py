"""For tests that wait for something, on the event loop or beside a server.

The limits are far above the usual times: the machine may run other tests beside this one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


async def until(condition: Callable[[], bool], timeout_s: float = 300.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


def eventually(condition: Callable[[], bool], timeout_s: float = 180.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def wait_for_midnight(margin_s: float = 120.0) -> None:
    """Waits until the day in UTC is over, if it has less than `margin_s` left: a test of a budget
    of a day that runs across its end gets two."""
    rest_s = 86_400 - time.time() % 86_400
    if rest_s < margin_s:
        time.sleep(rest_s + 1)


def wait_settled(
    read: Callable[[], object], quiet_s: float = 2.5, timeout_s: float = 180.0
) -> None:
    """Waits until `read` has returned the same value for `quiet_s`: processes report their counts
    once a second, so that the count of a request can follow its answer."""
    deadline = time.monotonic() + timeout_s
    value, since = read(), time.monotonic()
    while time.monotonic() - since < quiet_s:
        assert time.monotonic() < deadline, f"it still changes: {value}"
        time.sleep(0.1)
        if (now := read()) != value:
            value, since = now, time.monotonic()

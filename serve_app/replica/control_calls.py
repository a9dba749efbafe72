"""Room for control calls in an engine replica that is full.

Serve counts every call of a replica against `max_ongoing_requests`. The router's calls are rejected
beyond it and go elsewhere, while a call to all replicas waits for the end of a request: the metrics
of an engine, its adapters and its orders would be missing exactly under overload.
"""

from __future__ import annotations

from typing import cast

from ray.serve._private.utils import Semaphore

CONTROL_CALLS = 64  # beyond the limit, at a time


def answer_while_full() -> None:
    """Has Serve's part of this process begin calls that it does not reject at once, even if the
    replica is full. Serve has no setting for it. It asks `locked` before it accepts a call of the
    router's, so the limit of requests stays as it is. Call it in a deployment's constructor."""
    Semaphore.acquire = _acquire_beyond  # type: ignore[method-assign]


_acquire = Semaphore.acquire


async def _acquire_beyond(semaphore: Semaphore) -> bool:
    most: int = semaphore.get_max_value()  # type: ignore[no-untyped-call]
    if semaphore._value < most + CONTROL_CALLS:
        semaphore._value += 1
        return True
    return cast(bool, await _acquire(semaphore))  # type: ignore[no-untyped-call]

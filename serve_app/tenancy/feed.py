"""Keeps an ingress's table of keys equal to the manager's, by long poll."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from serve_app.ray_calls import RAY_ERRORS
from serve_app.tasks import keep
from serve_app.tenancy.table import KeyDelta, KeyTable

logger = logging.getLogger(__name__)

LONG_POLL_S = 20.0
_RETRY_S = 0.5

# (known revision, time-out in seconds) -> the changes since, None if there were none
Poll = Callable[[str, float], Awaitable[KeyDelta | None]]


def follow(table: KeyTable, poll: Poll) -> asyncio.Task[None]:
    """Begins to follow the manager. A failed poll is repeated; the table stays in use."""

    async def run() -> None:
        while True:
            try:
                delta = await poll(table.revision, LONG_POLL_S)
            except RAY_ERRORS as error:
                logger.warning("could not receive changes of the keys: %s", error)
                await asyncio.sleep(_RETRY_S)
                continue
            if delta is not None:
                table.apply(delta)

    return keep(run, "follow-keys")

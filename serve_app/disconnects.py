"""Clients that leave before their answer ends."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import Receive


async def call_when_gone(receive: Receive, callback: Callable[[], None]) -> None:
    """For a task beside the answer. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
    callback()

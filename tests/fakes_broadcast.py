"""The calls to all replicas of a deployment, where some replicas hang."""

from __future__ import annotations

import asyncio
from typing import Any

from ray.serve.handle import DeploymentBroadcastResponse


class Result:
    """The result of a replica: nothing, or never anything."""

    def __init__(self, *, is_hung: bool = False) -> None:
        self.is_cancelled = False
        self._is_hung = is_hung

    async def get_async(self) -> None:
        if self._is_hung:
            await asyncio.Event().wait()

    def cancel(self) -> None:
        self.is_cancelled = True


class Handle:
    """A handle that keeps the calls and their results."""

    def __init__(self, *is_hung: bool) -> None:
        """`is_hung`: of each replica."""
        self.is_hung = is_hung
        self.calls: list[tuple[str, object]] = []
        self.results: list[list[Result]] = []

    def broadcast(self, method: str, argument: object) -> DeploymentBroadcastResponse:
        self.calls.append((method, argument))
        return DeploymentBroadcastResponse(self._begin(), None)

    async def _begin(self) -> list[Any]:
        self.results.append([Result(is_hung=one) for one in self.is_hung])
        return self.results[-1]

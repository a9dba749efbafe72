"""Calls of every replica of an application, from the manager."""

from __future__ import annotations

import asyncio

from ray import serve
from ray.serve.handle import DeploymentHandle

from serve_app.topology import ENGINE

_TIMEOUT_S = 5.0


class Broadcasts:
    def __init__(self) -> None:
        self._handles: dict[str, DeploymentHandle[object]] = {}  # by application

    async def call(self, app_name: str, method: str, argument: object) -> int:
        """How many failed. Raises where there is no such application, or no answer in time."""
        if app_name not in self._handles:
            self._handles[app_name] = await asyncio.to_thread(
                serve.get_deployment_handle, ENGINE, app_name
            )
        results = (
            await self._handles[app_name]
            .broadcast(method, argument)
            .results_async(timeout_s=_TIMEOUT_S, return_exceptions=True)
        )
        return sum(isinstance(result, BaseException) for result in results)

"""The accounts of callers at an ingress: their limits, and their use."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from serve_app.tasks import check_running
from serve_app.tenancy.leases import Grants, LeaseRequest
from serve_app.tenancy.limits import Limits
from serve_app.tenancy.usage import UsageBatch, UsageMeter


class Accounts:
    def __init__(
        self,
        ingress_id: str,
        lease: Callable[[LeaseRequest], Awaitable[dict[str, Grants]]],
        record: Callable[[UsageBatch], Awaitable[bool]],
        num_ingresses: Callable[[], int],
    ) -> None:
        """`lease` and `record` call the manager."""
        self.limits = Limits(ingress_id, lease, num_ingresses)
        self.meter = UsageMeter(ingress_id, record, self.limits.recorded)
        self._tasks: tuple[asyncio.Task[None], ...] = ()

    def start(self) -> None:
        self._tasks = self.limits.start(), self.meter.start()

    async def close(self) -> None:
        """Sends the use that is left; the leases expire."""
        await self.meter.close()

    def check_tasks(self) -> None:
        """Raises RuntimeError if leases are no longer claimed, or usage is no longer sent."""
        check_running(*self._tasks)

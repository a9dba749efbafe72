"""The manager of a fleet: it publishes the platform's view, wakes the base, and passes quarantined
requests from an ingress to the others.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from serve_app.messages import IngressReport, ReportAnswer
from serve_app.platform_view import PlatformView
from serve_app.tenancy.leases import Grants, LeaseRequest, Leases
from serve_app.tenancy.usage import Usage, UsageBatch

_START_S = 2.0  # the start of a base


class Manager:
    def __init__(self, view: PlatformView, num_ingresses: int) -> None:
        self.platform = view
        self._num_ingresses = num_ingresses
        self._serial = int(view.revision)
        self._quarantined: dict[str, Any] = {}
        self._changed = asyncio.Event()
        self.view = _Remote(self._view)
        self.report = _Remote(self._report)
        self.wake_base = _Remote(self._wake)
        self.lease = _Remote(self._lease)
        self.record_usage = _Remote(self._record)
        self.usage: defaultdict[str, Usage] = defaultdict(Usage)  # recorded, by key id
        self._leases = Leases(burst_s=0.5)
        self._recorded: Counter[str] = Counter()  # the last batch of each source
        self._num_records = 0
        self._is_asleep = False

    def fall_asleep(self) -> None:
        """Lets the base sleep until a request wakes it."""
        self._is_asleep = True
        self._say(state="asleep")

    async def wake(self) -> None:
        if self._is_asleep:
            self._is_asleep = False
            self._say(state="starting", is_waking=True)
            await asyncio.sleep(_START_S)
            self._say(state="running", is_waking=False)

    def _say(self, **changes: Any) -> None:
        self._serial += 1
        base = replace(self.platform.bases[0], **changes)
        self.platform = replace(self.platform, revision=str(self._serial), bases=(base,))
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wake(self, digest: str) -> None:
        await self.wake()

    async def _view(self, revision: str, timeout_s: float) -> PlatformView | None:
        if revision == self.platform.revision:
            try:
                await asyncio.wait_for(self._changed.wait(), timeout_s)
            except TimeoutError:
                return None
        await asyncio.sleep(0.01)
        return self.platform

    async def _report(self, report: IngressReport) -> ReportAnswer:
        self._quarantined[report.ingress_id] = report.quarantined
        await asyncio.sleep(0.01)
        held = [one for entries in self._quarantined.values() for one in entries]
        return ReportAnswer(self._num_ingresses, tuple(held))

    async def _lease(self, request: LeaseRequest) -> dict[str, Grants]:
        await asyncio.sleep(0.005)
        return self._leases.grant(request, {}, {}, asyncio.get_running_loop().time())

    async def _record(self, batch: UsageBatch) -> bool:
        """Records like the ledger; every third answer is lost."""
        await asyncio.sleep(0.005)
        if batch.number > self._recorded[batch.source]:
            self._recorded[batch.source] = batch.number
            for key, usage in batch.rows:
                self.usage[key.key_id].add(usage)
        self._num_records += 1
        if self._num_records % 3 == 0:
            raise ConnectionError("the answer is lost")
        return True


class _Remote:
    def __init__(self, method: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        self.remote = method

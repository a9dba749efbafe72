"""The limits and the recorded use of all keys, kept by the manager."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from serve_app.config import TenancyArgs
from serve_app.metrics.exposition import as_text, gauge
from serve_app.tenancy.leases import Grants, LeaseRequest, Leases, TotalName

if TYPE_CHECKING:
    from serve_app.tenancy.service import KeyService

_MAX_BUDGETS = 100  # in the metrics


class KeyLimits:
    """All methods belong to the manager's event loop."""

    def __init__(self, args: TenancyArgs, keys: KeyService) -> None:
        from serve_app.tenancy.ledger import UsageBook  # imports the database's libraries

        self._keys = keys
        self.leases = Leases(args.burst_s)
        self.book = UsageBook(keys.store, args.prices)
        self.book.start()

    def grant(self, request: LeaseRequest) -> dict[str, Grants]:
        resets_s = self.book.turn(time.time())
        now_s = asyncio.get_running_loop().time()
        return self.leases.grant(request, self.book.used, resets_s, now_s)

    def text(self) -> bytes:
        """Returns the use of the budgets in Prometheus' text format."""
        self.book.turn(time.time())
        ratios: dict[tuple[str, str, str], float] = {}
        for key_id, policy in self._keys.policies():
            budgets: tuple[tuple[TotalName, int | None], ...] = (
                ("day", policy.tokens_per_day),
                ("month", policy.tokens_per_month),
            )
            for period, budget in budgets:
                used = self.book.used.get((key_id, period), 0.0)
                if budget is not None and used > 0:
                    ratios[key_id, policy.tenant, period] = used / budget
        return budgets_text(ratios)


def budgets_text(ratios: Mapping[tuple[str, str, str], float]) -> bytes:
    """Returns the largest ratios. `ratios`: by key id, tenant, and day or month."""
    most = heapq.nlargest(_MAX_BUDGETS, ratios.items(), key=lambda item: item[1])
    labels = "key", "tenant", "period"
    return as_text(gauge("loraplex_key_budget_used_ratio", dict(most), {}, *labels))

"""The manager's remote methods about keys, their limits and use, and the audit log."""

from __future__ import annotations

import asyncio
import heapq
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serve_app.admin_api import KeyLine
from serve_app.config import KEY_PEPPER, TenancyArgs, database_url, secret
from serve_app.errors import ApiError
from serve_app.metrics.exposition import as_text, gauge
from serve_app.ray_calls import refusing
from serve_app.tenancy.leases import BUDGETS, Grants, LeaseRequest, Leases, limits_of
from serve_app.tenancy.orders import Act, KeyOrder, UsageGroup, UsageQuery
from serve_app.tenancy.table import KeyDelta
from serve_app.tenancy.usage import UsageBatch, ingress_of

if TYPE_CHECKING:
    from serve_app.tenancy.service import KeyService

_MAX_BUDGETS = 100  # in the metrics


class Keys:
    """The keys of a manager, their limits and their use. All methods belong to its event loop."""

    def __init__(self, args: TenancyArgs, service: KeyService, began_s: float = -math.inf) -> None:
        """`began_s`: as of `Leases`."""
        from serve_app.tenancy.ledger import UsageBook  # imports the database's libraries

        self.service = service
        self.leases = Leases(args.burst_s, began_s)
        self.book = UsageBook(service.store, args.prices, self._note_counted)

    async def grant(self, request: LeaseRequest) -> dict[str, Grants] | None:
        """Returns None for claims on budgets whose recorded use is not known: the ingress goes on
        without a manager."""
        names = set().union(*request.keys.values())
        if not names.isdisjoint(BUDGETS) and not await self.book.know():
            return None
        resets_s = self.book.turn(time.time())
        now_s = asyncio.get_running_loop().time()
        return self.leases.grant(request, self.book.used, resets_s, now_s)

    def _note_counted(self, source: str, key_id: str, num_tokens: int) -> None:
        self.leases.note_recorded(ingress_of(source), key_id, num_tokens)

    def text(self) -> bytes:
        """Returns the use of the budgets in Prometheus' text format."""
        self.book.turn(time.time())
        ratios: dict[tuple[str, str, str], float] = {}
        for key_id, policy in self.service.policies():
            for period, budget in limits_of(policy).items():
                if used := self.book.used.get((key_id, period), 0.0):
                    ratios[key_id, policy.tenant, period] = used / budget
        return budgets_text(ratios)


class KeyCalls:
    """A base of `Manager`."""

    _keys: Keys | None  # None: tenancy.enabled is false

    async def key_delta(self, known: str, timeout_s: float) -> KeyDelta | None:
        return await self._opened_keys().service.delta(known, timeout_s)

    @refusing
    async def order_key(self, order: KeyOrder) -> tuple[KeyLine, str]:
        return await self._opened_keys().service.order(order)

    @refusing
    async def revoke_keys(self, actor: str, references: Sequence[str]) -> list[str]:
        return await self._opened_keys().service.revoke(actor, references)

    @refusing
    async def key_lines(self) -> list[KeyLine]:
        return await self._opened_keys().service.lines()

    @refusing
    async def key_line(self, reference: str) -> KeyLine:
        return await self._opened_keys().service.line(reference)

    async def note_act(self, act: Act) -> None:
        await self._opened_keys().service.note(act)

    @refusing
    async def acts(self, limit: int, before_id: int | None) -> list[dict[str, Any]]:
        return await self._opened_keys().service.acts(limit, before_id)

    async def lease(self, request: LeaseRequest) -> dict[str, Grants] | None:
        return await self._opened_keys().grant(request)

    async def record_usage(self, batch: UsageBatch) -> bool:
        return await self._opened_keys().book.record(batch)

    @refusing
    async def usage(self, query: UsageQuery) -> list[UsageGroup]:
        return await self._opened_keys().book.groups(query)

    def _opened_keys(self) -> Keys:
        if self._keys is None:
            words = "Keys are off: set tenancy.enabled in the config file."
            raise ApiError(404, words, code="keys_off")
        return self._keys


def open_keys(args: TenancyArgs, home: Path | None) -> Keys | None:
    """Opens the keys of a manager and begins to follow their database; None if keys are off. Raises
    ValueError and PepperError."""
    if not args.enabled:
        return None
    from serve_app.tenancy.service import KeyService  # imports the database's libraries

    service = KeyService(database_url(args), secret(KEY_PEPPER), home)
    keys = Keys(args, service, asyncio.get_running_loop().time())
    keys.service.start()
    keys.book.start()
    return keys


def budgets_text(ratios: Mapping[tuple[str, str, str], float]) -> bytes:
    """Returns the largest ratios. `ratios`: by key id, tenant, and day or month."""
    most = heapq.nlargest(_MAX_BUDGETS, ratios.items(), key=lambda item: item[1])
    labels = "key", "tenant", "period"
    return as_text(gauge("loraplex_key_budget_used_ratio", dict(most), {}, *labels))

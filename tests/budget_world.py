"""The world of `limits_world` with recorded use: each ingress has a meter, the manager has a book
in SQLite, and their calls may be slow or lost."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import sqlalchemy as sa

from serve_app.config import TenancyArgs
from serve_app.control.key_calls import Keys
from serve_app.tenancy.leases import Grants, LeaseRequest
from serve_app.tenancy.ledger import UsageBook
from serve_app.tenancy.store import Store, StoreUnavailableError
from serve_app.tenancy.usage import Usage, UsageBatch, UsageKey, UsageMeter
from tests.limits_world import World
from tests.virtual_loop import virtual_time

USAGE_KEY = UsageKey("key", "acme", "base", "base@1")


class WeakStore(Store):
    """A store that can be away."""

    is_away = False

    @contextmanager
    def transaction(self) -> Iterator[sa.Connection]:
        if self.is_away:
            raise StoreUnavailableError("away")
        with super().transaction() as connection:
            yield connection


@dataclass
class BudgetWorld(World):
    """`slowest_s`: of one way of a call; `lost_share`: of the ways that end in an error."""

    url: str = ""
    slowest_s: float = 0.01
    lost_share: float = 0.0
    is_busy: bool = False  # a claim takes longer than an ingress waits for it
    num_used: int = 0  # tokens of ended requests
    open_tokens: int = 0
    most_tokens: int = 0  # used and open at once

    def __post_init__(self) -> None:
        super().__post_init__()
        self.store = WeakStore(self.url)
        self.store.upgrade()
        self.keys = self._manager(-math.inf)
        self.meters = [
            UsageMeter(f"i{number}", self.record, limits.recorded)
            for number, limits in enumerate(self.limits)
        ]

    def _manager(self, began_s: float) -> Keys:
        service: Any = SimpleNamespace(store=self.store)
        keys = Keys(TenancyArgs(enabled=True, burst_s=self.burst_s), service, began_s)
        keys.book = UsageBook(self.store, {}, keys._note_counted, lambda: time.time())
        return keys

    def revive(self) -> None:
        self.keys = self._manager(self.loop.time())
        self.keys.book.start()
        self.is_down = False

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        async def all_of_it() -> None:
            self.keys.book.start()
            for meter in self.meters:
                meter.start()
            await work

        with virtual_time(self.loop):
            super().run(all_of_it())
        self.store.close()

    async def claim(self, request: LeaseRequest) -> dict[str, Grants] | None:
        self.num_calls += 1
        await self._travel()
        await asyncio.sleep(1.0 if self.is_busy else 0.0)
        grants = await self.keys.grant(request)
        await self._travel()
        return grants

    async def record(self, batch: UsageBatch) -> bool:
        await self._travel()
        is_recorded = await self.keys.book.record(batch)
        await self._travel()
        return is_recorded

    async def _travel(self) -> None:
        await asyncio.sleep(self.slowest_s * self.random.random() ** 4)
        if self.is_down:
            await asyncio.sleep(60.0)  # Serve waits for another replica
        if self.random.random() < self.lost_share:
            raise ConnectionError("lost")

    async def request(self, ingress: int, expected: int, real: int, lasts_s: float) -> None:
        """`real`: 0 for a request that fails without an answer."""
        charge = await self.admit(ingress, expected, real)
        if charge is None:
            return
        self.open_tokens += expected
        self._note_most()
        try:
            await asyncio.sleep(lasts_s)
        except asyncio.CancelledError:
            real = 0
            raise
        finally:
            self.num_open -= 1
            self.open_tokens -= expected
            charge.settle(real)
            if real:
                self.num_used += real
                self.meters[ingress].add(USAGE_KEY, Usage(1, real))
            self._note_most()

    def _note_most(self) -> None:
        self.most_tokens = max(self.most_tokens, self.num_used + self.open_tokens)

    @property
    def num_recorded(self) -> int:
        return self.keys.book._ledger.tokens(0).get("key", 0)

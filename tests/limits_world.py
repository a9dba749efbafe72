"""Ingresses and a manager with leases in virtual time: requests come by a Poisson process each, the
manager can be killed, and each admission is recorded."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from serve_app.errors import RateLimitError
from serve_app.tenancy.caller import Caller, KeyPolicy
from serve_app.tenancy.leases import Grants, LeaseRequest, Leases, LimitName
from serve_app.tenancy.limits import Charge, Limits
from tests.virtual_loop import VirtualLoop

LATENCY_S = 0.003


@dataclass
class World:
    policy: KeyPolicy
    num_ingresses: int
    seed: int = 0
    burst_s: float = 0.5
    admitted: list[tuple[float, int]] = field(default_factory=list)  # seconds, real tokens
    num_refused: int = 0
    num_calls: int = 0
    num_open: int = 0
    most_open: int = 0
    is_down: bool = False
    used: dict[tuple[str, LimitName], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.loop = VirtualLoop(self.seed)
        self.caller = Caller("key", self.policy)
        self.random = random.Random(self.seed)
        self.leases = Leases(self.burst_s)
        self.limits = [
            Limits(f"i{number}", self.claim, lambda: self.num_ingresses, self.loop.time)
            for number in range(self.num_ingresses)
        ]

    async def claim(self, request: LeaseRequest) -> dict[str, Grants]:
        self.num_calls += 1
        await asyncio.sleep(LATENCY_S * self.random.uniform(0.5, 1.5))
        if self.is_down:
            await asyncio.sleep(60.0)  # Serve waits for another replica
        resets_s: dict[LimitName, float] = {"day": 3600.0, "month": 86400.0}
        grants = self.leases.grant(request, self.used, resets_s, self.loop.time())
        await asyncio.sleep(LATENCY_S * self.random.uniform(0.5, 1.5))
        return grants

    def kill(self) -> None:
        self.is_down = True

    def revive(self) -> None:
        """Starts a manager that has forgotten everything."""
        self.leases = Leases(self.burst_s)
        self.is_down = False

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.set_event_loop(self.loop)

        async def all_of_it() -> None:
            for limits in self.limits:
                limits.start()
                await asyncio.sleep(self.random.uniform(0, 1 / self.num_ingresses))
            await work

        try:
            self.loop.run_until_complete(all_of_it())
        finally:
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.run_until_complete(asyncio.sleep(0.01))
            asyncio.set_event_loop(None)
            self.loop.close()

    async def clients(
        self,
        ingress: int,
        rate: Callable[[float], float],
        seconds: float,
        tokens: Callable[[], tuple[int, int]] = lambda: (1, 1),
        lasts_s: Callable[[], float] = lambda: 0.5,
    ) -> None:
        """Sends `rate` requests per second; `tokens` returns the expected and the real ones."""
        until_s = self.loop.time() + seconds
        async with asyncio.TaskGroup() as group:
            while (now_s := self.loop.time()) < until_s:
                await asyncio.sleep(self.random.expovariate(max(rate(now_s), 1e-3)))
                group.create_task(self.request(ingress, *tokens(), lasts_s()))

    async def admit(self, ingress: int, expected: int, real: int) -> Charge | None:
        """Returns None if the request is refused."""
        limits, caller = self.limits[ingress], self.caller
        try:
            limits.check(caller)
            charge = await limits.admit(caller, expected)
        except RateLimitError:
            self.num_refused += 1
            return None
        self.admitted.append((self.loop.time(), real))
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        return charge

    async def request(self, ingress: int, expected: int, real: int, lasts_s: float) -> None:
        charge = await self.admit(ingress, expected, real)
        if charge is None:
            return
        await asyncio.sleep(lasts_s)
        charge.settle(real)
        charge.close()
        self.num_open -= 1

    def num_admitted(self, begin_s: float, end_s: float) -> int:
        return sum(begin_s <= at_s < end_s for at_s, _ in self.admitted)

    def tokens_admitted(self, begin_s: float, end_s: float) -> int:
        return sum(tokens for at_s, tokens in self.admitted if begin_s <= at_s < end_s)

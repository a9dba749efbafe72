"""The use of the server by key, model version and arm: counted by ingresses, recorded by the
manager.

An ingress sends the sums since its last batch that was recorded, under a number. It repeats a batch
unchanged until the manager has recorded it, and the manager records each number once, so that a
lost answer, a manager that restarts and a database that is away neither lose nor repeat anything.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from serve_app.tasks import keep

logger = logging.getLogger(__name__)

SEND_INTERVAL_S = 1.0
_CALL_S = 10.0  # the manager waits for its database
_CLOSE_S = 2.0  # at the end of the server the manager may be gone before


@dataclass(frozen=True, slots=True)
class UsageKey:
    """The account and the model that a request is counted for."""

    key_id: str
    tenant: str
    base: str  # registered name
    model: str  # registered name@version, of the adapter or of the base
    rank: int = 0  # of the adapter, for prices
    arm: str = ""  # stable or canary, for an adapter on trial


@dataclass(slots=True)
class Usage:
    """The sums of some requests."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt tokens
    output_tokens: int = 0
    engine_ms: float = 0.0

    @property
    def num_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens

    def add(self, other: Usage) -> None:
        self.requests += other.requests
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.output_tokens += other.output_tokens
        self.engine_ms += other.engine_ms


@dataclass(frozen=True, slots=True)
class UsageBatch:
    """The use since the batch before. `source`: an ingress process, which numbers its batches from
    1 on."""

    source: str
    number: int
    rows: tuple[tuple[UsageKey, Usage], ...]


Record = Callable[[UsageBatch], Awaitable[bool]]


def _new_source(ingress_id: str) -> str:
    return f"{ingress_id}-{secrets.token_hex(4)}"


def ingress_of(source: str) -> str:
    """Returns the id of the ingress that has a batch's source."""
    return source.rpartition("-")[0]


class UsageMeter:
    """The use at an ingress that is not recorded yet. All methods belong to its event loop."""

    def __init__(
        self, ingress_id: str, record: Record, on_recorded: Callable[[str, int], None]
    ) -> None:
        """`record` sends a batch to the manager and returns True once it is recorded; `on_recorded`
        is then called with each key id and its tokens."""
        self._source = _new_source(ingress_id)
        self._record = record
        self._on_recorded = on_recorded
        self._number = 0
        self._sums: defaultdict[UsageKey, Usage] = defaultdict(Usage)
        self._batch: UsageBatch | None = None  # sent, and not known to be recorded
        self._task: asyncio.Task[None] | None = None

    def start(self) -> asyncio.Task[None]:
        """Returns the task that sends the use from now on."""
        self._task = keep(self._run, "send-usage")
        return self._task

    def add(self, key: UsageKey, usage: Usage) -> None:
        self._sums[key].add(usage)

    async def send(self) -> None:
        """Sends the use so far. A batch that fails stays."""
        if self._batch is None:
            if not self._sums:
                return
            self._number += 1
            self._batch = UsageBatch(self._source, self._number, tuple(self._sums.items()))
            self._sums = defaultdict(Usage)
        batch = self._batch
        async with asyncio.timeout(_CALL_S):
            is_recorded = await self._record(batch)
        if is_recorded:
            self._batch = None
            for key, usage in batch.rows:
                self._on_recorded(key.key_id, usage.num_tokens)

    async def close(self) -> None:
        """Sends the rest of the use, at the end of an ingress whose requests have ended."""
        if self._task is not None:
            self._task.cancel()
        try:
            async with asyncio.timeout(_CLOSE_S):
                while self._batch is not None or self._sums:
                    await self.send()
                    if self._batch is not None:  # the manager's database is away
                        await asyncio.sleep(SEND_INTERVAL_S / 4)
        except Exception as error:
            logger.error("the use of keys in the last second is lost: %r", error)

    async def _run(self) -> None:
        is_away = False
        while True:
            await asyncio.sleep(SEND_INTERVAL_S)
            try:
                await self.send()
                is_away = False
            except Exception as error:  # repeated after the interval
                if not is_away:
                    logger.warning("could not send the use of keys to the manager: %r", error)
                is_away = True

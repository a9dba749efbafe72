"""The recorded use: sums by hour in the store's database, and the tokens of this day and month.

Only the manager writes. The hour is that of its clock when a batch arrives. Methods of `Ledger`
block and belong in a thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, delete, func, select
from sqlalchemy.dialects import postgresql, sqlite

from serve_app.config import PriceArgs
from serve_app.tasks import keep, share
from serve_app.tenancy.leases import LimitName, TotalName
from serve_app.tenancy.orders import DAY_S, HOUR_S, Group, UsageGroup, UsageQuery
from serve_app.tenancy.store import Store, StoreUnavailableError
from serve_app.tenancy.tables import USAGE, USAGE_BATCHES
from serve_app.tenancy.usage import Usage, UsageBatch

logger = logging.getLogger(__name__)

_KEPT_S = 30 * DAY_S  # the numbers of batches of an ingress that is gone
_RETRY_S = 1.0
_KNOW_S = 0.5  # an ingress waits no longer for its claim
_SUMS = ("requests", "prompt_tokens", "cached_tokens", "output_tokens", "engine_ms")

_COLUMNS: dict[Group, ColumnElement[Any]] = {
    "key": USAGE.c.key_id,
    "tenant": USAGE.c.tenant,
    "base": USAGE.c.base,
    "model": USAGE.c.model,
    "arm": USAGE.c.arm,
    "hour": USAGE.c.hour,
    "day": USAGE.c.hour - USAGE.c.hour % DAY_S,
}


class Ledger:
    def __init__(self, store: Store) -> None:
        self._store = store
        dialect = postgresql if store.dialect == "postgresql" else sqlite
        batches, usage = dialect.insert(USAGE_BATCHES), dialect.insert(USAGE)
        self._note_batch = batches.on_conflict_do_update(
            index_elements=["source"],
            set_={"number": batches.excluded.number, "at_s": batches.excluded.at_s},
            where=USAGE_BATCHES.c.number < batches.excluded.number,
        )
        self._add = usage.on_conflict_do_update(
            index_elements=[column.name for column in USAGE.primary_key],
            set_={name: USAGE.c[name] + usage.excluded[name] for name in _SUMS},
        )

    def record(self, batch: UsageBatch, now_s: float) -> bool:
        """Adds a batch to the sums of this hour. Returns False, without an addition, if it was
        recorded before. Raises StoreUnavailableError."""
        hour = int(now_s // HOUR_S * HOUR_S)
        rows = [
            {
                "hour": hour,
                **{name: getattr(key, name) for name in key.__slots__},
                **{name: getattr(usage, name) for name in _SUMS},
            }
            for key, usage in batch.rows
        ]
        with self._store.transaction() as connection:
            note = {"source": batch.source, "number": batch.number, "at_s": now_s}
            if not connection.execute(self._note_batch, note).rowcount:
                return False
            connection.execute(self._add, rows)
            if batch.number == 1:
                old = USAGE_BATCHES.c.at_s < now_s - _KEPT_S
                connection.execute(delete(USAGE_BATCHES).where(old))
            return True

    def tokens(self, from_s: float) -> dict[str, int]:
        """Returns the recorded tokens since the hour that begins at `from_s`, by key id."""
        tokens = func.sum(USAGE.c.prompt_tokens + USAGE.c.output_tokens)
        query = select(USAGE.c.key_id, tokens).where(USAGE.c.hour >= from_s)
        with self._store.transaction() as connection:
            rows = connection.execute(query.group_by(USAGE.c.key_id))
            return {key_id: int(number) for key_id, number in rows}

    def groups(self, query: UsageQuery, prices: Mapping[str, PriceArgs]) -> list[UsageGroup]:
        """Returns the sums of a query, in the order of their values. `prices`: by base, "*" for
        the others."""
        columns = [_COLUMNS[name] for name in query.by]
        priced = [USAGE.c.base, USAGE.c.rank]
        sums = [func.sum(USAGE.c[name]) for name in _SUMS]
        is_in = (USAGE.c.hour >= query.from_s) & (USAGE.c.hour < query.to_s)
        if query.key_id is not None:
            is_in &= USAGE.c.key_id == query.key_id
        found: defaultdict[tuple[str | int, ...], tuple[Usage, list[float]]]
        found = defaultdict(lambda: (Usage(), []))
        with self._store.transaction() as connection:
            selected = select(*columns, *priced, *sums).where(is_in)
            for row in connection.execute(selected.group_by(*columns, *priced)):
                *values, base, rank, requests, prompt, cached, output, ms = row
                usage = Usage(int(requests), int(prompt), int(cached), int(output), float(ms))
                known, costs = found[tuple(values)]
                known.add(usage)
                costs.append(cost(usage, prices.get(base) or prices.get("*"), rank))
        return [
            UsageGroup(values, usage, sum(costs))
            for values, (usage, costs) in sorted(found.items(), key=lambda item: item[0])
        ]


def cost(usage: Usage, price: PriceArgs | None, rank: int) -> float:
    """Returns the price of some use of a base, or of its adapters of this rank."""
    if price is None:
        return 0.0
    cached = price.prompt if price.cached is None else price.cached
    tokens = (
        (usage.prompt_tokens - usage.cached_tokens) * price.prompt
        + usage.cached_tokens * cached
        + usage.output_tokens * price.output
    )
    hours = usage.engine_ms / 1000 / HOUR_S
    return (tokens / 1e6 + hours * price.engine_hour) * (1 + price.per_rank * rank)


class UsageBook:
    """The manager's side of the use. All methods belong to its event loop."""

    def __init__(
        self,
        store: Store,
        prices: Mapping[str, PriceArgs],
        on_counted: Callable[[str, str, int], None] = lambda source, key_id, num_tokens: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`on_counted` is called with the source of a batch, each key id and its tokens when `used`
        begins to have them."""
        self.used: defaultdict[tuple[str, LimitName], float] = defaultdict(float)
        self._ledger = Ledger(store)
        self._prices = prices
        self._on_counted = on_counted
        self._clock = clock
        self._lock = asyncio.Lock()
        self._is_read = False
        self._is_known = False  # it was read once
        self._reading: asyncio.Task[None] | None = None  # the last one that callers waited for
        self._began_s: dict[TotalName, float] = {}  # of the day and month that `used` is about

    def start(self) -> None:
        keep(self._read_until_done, "read-usage")

    async def know(self) -> bool:
        """Reads the recorded use of this day and month if it was never read. Returns False if that
        fails, or lasts: each claim that waited for a reading of its own would stay here, and while
        the database hangs they would become more than the manager has places for."""
        if not self._is_known:
            if self._reading is None or self._reading.done():
                self._reading = share(self._try_to_read(), "read-usage")
            await asyncio.wait((self._reading,), timeout=_KNOW_S)
        return self._is_known

    async def record(self, batch: UsageBatch) -> bool:
        """Returns True once the batch is recorded, and False while the database is away."""
        async with self._lock:
            try:
                await self._read()
                now_s = self._clock()
                # Read again if this fails or is cancelled: the database may have the batch.
                self._is_read = False
                is_new = await _to_its_end(self._ledger.record, batch, now_s)
                # Otherwise a manager before may have recorded it after this one had read the sums.
                self._is_read = is_new
                await self._read()
            except StoreUnavailableError:
                return False
            self.turn(now_s)
            for key, usage in batch.rows if is_new else ():
                self.used[key.key_id, "day"] += usage.num_tokens
                self.used[key.key_id, "month"] += usage.num_tokens
                self._on_counted(batch.source, key.key_id, usage.num_tokens)
            return True

    async def groups(self, query: UsageQuery) -> list[UsageGroup]:
        """Raises StoreUnavailableError."""
        return await asyncio.to_thread(self._ledger.groups, query, self._prices)

    def turn(self, now_s: float) -> dict[LimitName, float]:
        """Begins a new day and month when it is time, and the next batch reads their recorded use:
        a clock that is set back returns to a day with use. Returns the seconds until the next day
        and month."""
        resets: dict[LimitName, float] = {}
        for name, (begin_s, end_s) in _periods(now_s).items():
            if self._began_s.setdefault(name, begin_s) != begin_s:
                self._began_s[name] = begin_s
                self._is_read = False
                for key in [key for key in self.used if key[1] == name]:
                    del self.used[key]
            resets[name] = end_s - now_s
        return resets

    async def _read_until_done(self) -> None:
        while not self._is_read:
            await self._try_to_read()
            await asyncio.sleep(_RETRY_S)

    async def _try_to_read(self) -> None:
        async with self._lock:
            with suppress(StoreUnavailableError):  # the service of the keys has logged it
                await self._read()

    async def _read(self) -> None:
        """Reads the tokens of this day and month, unless they are known; later batches are added
        to them."""
        if self._is_read:
            return
        now_s = self._clock()
        for name, (begin_s, _) in _periods(now_s).items():
            for key_id, number in (await asyncio.to_thread(self._ledger.tokens, begin_s)).items():
                self.used[key_id, name] = number
            self._began_s[name] = begin_s
        self._is_read = self._is_known = True


async def _to_its_end(
    write: Callable[[UsageBatch, float], bool], batch: UsageBatch, now_s: float
) -> bool:
    """Writes in a thread. A caller that is cancelled waits for it: the next call would read a day
    without the batch and a month with it."""
    writing = share(asyncio.to_thread(write, batch, now_s), "record-usage")
    try:
        return await asyncio.shield(writing)
    except asyncio.CancelledError:
        await asyncio.wait((writing,))
        if not writing.cancelled():
            writing.exception()  # seen: the batch comes again
        raise


def _periods(now_s: float) -> dict[TotalName, tuple[float, float]]:
    """Returns the begin and the end of the present day and month in UTC."""
    day = datetime.fromtimestamp(now_s, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    month = day.replace(day=1)
    next_month = (month + timedelta(days=32)).replace(day=1)
    return {
        "day": (day.timestamp(), (day + timedelta(days=1)).timestamp()),
        "month": (month.timestamp(), next_month.timestamp()),
    }

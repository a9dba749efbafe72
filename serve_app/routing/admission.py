"""Where requests of one base wait for an engine: the fair queue as coroutines see it.

A request goes when an engine replica has room, or waits for its turn. It is refused before it
waits: when the queue is full and holds its owner's share already, or when it would have to wait
longer than `max_queue_s`. A client that leaves, leaves the queue. Each ingress replica puts its own
requests in order; what the others sent shows in the engines' frames.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from starlette.types import Receive

from serve_app.asgi import ClientGoneError, call_when_gone
from serve_app.config import FairnessArgs
from serve_app.errors import OverloadedError
from serve_app.queue_stats import QueueStats
from serve_app.routing.cost import Price, price
from serve_app.routing.fair_queue import Entry, FairQueue
from serve_app.routing.pace import Pace
from serve_app.routing.room import has_room
from serve_app.routing.view import Ask, ReplicaViews

_LOOK_AGAIN_S = 0.1  # should no frame come
_TRIM_S = 0.5
_MAX_RETRY_AFTER_S = 60  # clients of OpenAI's library do not wait longer
_USUAL_OUTPUT_TOKENS = 128.0  # of a sequence, until some have ended
_OUTPUT_WEIGHT = 1 / 32  # of a newly ended one in the mean


@dataclass(frozen=True, slots=True)
class Applicant:
    """Who asks for an engine."""

    tenant: str = ""
    adapter: str = ""  # by name, so that its versions share; "": none
    rank: int = 0
    priority: int = 0  # lower is earlier


class Ticket:
    """One HTTP request that may go to an engine, or waits for it, until `leave`."""

    def __init__(self, queue: AdmissionQueue, entry: Entry, ask: Ask, price: Price, output: int):
        self.waited_s = 0.0
        self._queue = queue
        self._entry = entry
        self._ask = ask
        self._price = price
        self._turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._num_charged = output  # tokens
        self._num_generated = 0
        self._is_open = True

    def generated(self, num_tokens: int) -> None:
        """So many output tokens until now, of all its choices."""
        if self._is_open and num_tokens > self._num_generated:
            self._queue._generated(self, num_tokens)

    def leave(self) -> None:
        """Its answer ended, or nobody wants it any more. Once or more often."""
        if self._is_open:
            self._is_open = False
            self._queue._left(self)


class AdmissionQueue:
    """Of one base and ingress replica; all in one event loop, but for `placed`."""

    def __init__(
        self,
        settings: FairnessArgs,
        max_waiting: int,
        views: Callable[[], ReplicaViews | None],
        stats: QueueStats,
        base: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`views`: of the base's engine replicas; without any, Serve's own limits apply."""
        self._settings = settings
        self._max_waiting = max_waiting
        self._views = views
        self._stats, self._of_base = stats, stats.of_base(base)
        self._clock = clock
        self._queue = FairQueue(settings.weights, settings.max_wait_s)
        self._pace = Pace()
        self._waiting: dict[Entry, Ticket] = {}
        self._under_way: dict[str, Ask] = {}  # by call, until a replica counts it
        self._mean_output = _USUAL_OUTPUT_TOKENS
        self._num_open = 0
        self._running_cost = 0.0
        self._trimmed_s = 0.0
        self._soon: asyncio.Handle | None = None
        self._later: asyncio.TimerHandle | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def waiting_tokens(self) -> int:
        """Of the prompts that wait."""
        return sum(ticket._ask.num_tokens for ticket in self._waiting.values())

    @property
    def is_idle(self) -> bool:
        """Nobody waits, and nobody's answer is still to be charged."""
        return not self._num_open

    def check(self, who: Applicant) -> None:
        """Refuses what is hopeless while it has cost nothing: before its prompt is known."""
        if len(self._queue):
            self._find_place(who, price(who.rank).of(0, self._mean_output))

    async def enter(
        self, who: Applicant, ask: Ask, max_tokens: int, receive: Receive | None = None
    ) -> Ticket:
        """Returns when the request may go. `max_tokens`: of all its choices; `receive`: tells when
        the client leaves, the body must have been read. Raises OverloadedError, ClientGoneError."""
        output = min(max_tokens, round(self._mean_output * ask.num_sequences))
        of_one = price(who.rank)
        cost = of_one.of(ask.num_tokens, output)
        is_free = not len(self._queue) and self._has_room()
        if not is_free and (rival := self._find_place(who, cost)) is not None:
            self._expel(self._waiting[rival], self._refusal_of("full", rival))
        now_s = self._clock()
        if not len(self._queue):
            self._pace.begin(now_s)
        entry = self._queue.add(who.tenant, who.adapter, who.priority, cost, now_s)
        ticket = self._waiting[entry] = Ticket(self, entry, ask, of_one, output)
        self._num_open += 1
        self._of_base.num_waiting += 1
        if is_free:
            self._send_next(now_s)
        else:
            await self._wait(ticket, receive)
        return ticket

    def placed(self, call_id: str) -> None:
        """A replica's view counts this call from now on. From any thread."""
        self._under_way.pop(call_id, None)

    def wake(self) -> None:
        """There may be room: a frame came, or an answer ended."""
        if self._soon is None and len(self._queue):
            self._soon = asyncio.get_running_loop().call_soon(self._look)

    async def _wait(self, ticket: Ticket, receive: Receive | None) -> None:
        loop = asyncio.get_running_loop()
        self._look_later()
        timer = loop.call_later(self._patience_s, self._expire, ticket)
        watch: asyncio.Task[None] | None = None
        if receive is not None:
            gone = ClientGoneError()
            watch = loop.create_task(call_when_gone(receive, lambda: self._expel(ticket, gone)))
        try:
            await ticket._turn
        except BaseException:
            ticket.leave()
            raise
        finally:
            timer.cancel()
            if watch is not None:
                watch.cancel()

    def _look(self) -> None:
        self._soon = None
        while len(self._queue) and self._has_room():
            now_s = self._clock()
            self._pace.departed(self._send_next(now_s), now_s)
        if len(self._queue) and self._clock() - self._trimmed_s >= _TRIM_S:
            self._trim()
        self._look_later()

    @property
    def _patience_s(self) -> float:
        """Twice what was expected of anybody: the engines stand still, or others came."""
        return 2 * self._settings.max_queue_s

    def _trim(self) -> None:
        """Who filled the queue alone, and has to share it since, is told now and not in the end."""
        self._trimmed_s = self._clock()
        while (entry := self._queue.largest()) is not None:
            if self._wait_s(_applicant(entry), 0.0) <= self._patience_s:
                break
            self._expel(self._waiting[entry], self._refusal_of("waited", entry))

    def _look_later(self) -> None:
        if self._later is not None:
            self._later.cancel()
            self._later = None
        if len(self._queue):
            loop = asyncio.get_running_loop()
            self._later = loop.call_later(_LOOK_AGAIN_S, self._look)

    def _has_room(self) -> bool:
        views = self._views()
        if views is None:
            return True
        under_way = tuple(self._under_way.values())  # one bytecode: safe beside `placed`
        return has_room(views.replicas, under_way, self._settings.max_engine_queue_s)

    def _send_next(self, now_s: float) -> float:
        """What it costs."""
        entry = self._queue.pop(now_s)
        assert entry is not None
        ticket = self._waiting.pop(entry)
        ticket.waited_s = now_s - entry.enqueued_s
        self._running_cost += entry.cost
        self._under_way[ticket._ask.call_id] = ticket._ask
        self._of_base.num_waiting -= 1
        self._of_base.waits.observe(ticket.waited_s)
        self._stats.count_tokens(entry.tenant, ticket._ask.num_tokens)
        if not ticket._turn.done():
            ticket._turn.set_result(None)
        return entry.cost

    def _find_place(self, who: Applicant, cost: float) -> Entry | None:
        """The one that leaves for a newcomer, where the queue is full. Raises OverloadedError."""
        if self._wait_s(who, cost) > self._settings.max_queue_s:
            raise self._refusal("expected_wait", who, cost)
        if len(self._queue) < self._max_waiting:
            return None
        rival = self._queue.rival(who.tenant, who.adapter, who.priority)
        if rival is None:
            raise self._refusal("full", who, cost)
        return rival

    def _wait_s(self, who: Applicant, cost: float) -> float:
        """Expected; 0: not known."""
        if not len(self._queue):
            return 0.0
        ahead = self._queue.cost_ahead(who.tenant, who.adapter, who.priority, cost)
        return self._pace.wait_s(ahead, self._running_cost, self._clock()) or 0.0

    def _refusal_of(self, reason: str, entry: Entry) -> OverloadedError:
        return self._refusal(reason, _applicant(entry), entry.cost)

    def _refusal(self, reason: str, who: Applicant, cost: float) -> OverloadedError:
        self._of_base.sheds[reason] += 1
        wait_s = min(self._wait_s(who, cost), _MAX_RETRY_AFTER_S)
        return OverloadedError("Too many requests wait for this model.", max(1, ceil(wait_s)))

    def _expire(self, ticket: Ticket) -> None:
        self._expel(ticket, self._refusal_of("waited", ticket._entry))

    def _expel(self, ticket: Ticket, error: Exception) -> None:
        ticket.leave()
        if not ticket._turn.done():
            ticket._turn.set_exception(error)

    def _generated(self, ticket: Ticket, num_tokens: int) -> None:
        self._stats.count_tokens(ticket._entry.tenant, num_tokens - ticket._num_generated)
        ticket._num_generated = num_tokens
        if num_tokens > ticket._num_charged:
            more = ticket._price.of(0, num_tokens - ticket._num_charged)
            self._queue.charge(ticket._entry, more)
            ticket._num_charged = num_tokens

    def _left(self, ticket: Ticket) -> None:
        if self._waiting.pop(ticket._entry, None) is not None:
            self._of_base.num_waiting -= 1
        else:  # it went
            self._under_way.pop(ticket._ask.call_id, None)
            self._running_cost -= ticket._entry.cost
            unused = ticket._num_charged - ticket._num_generated
            self._queue.charge(ticket._entry, -ticket._price.of(0, unused))
            if ticket._num_generated:
                one = ticket._num_generated / ticket._ask.num_sequences
                self._mean_output += _OUTPUT_WEIGHT * (one - self._mean_output)
                went_s = ticket._entry.enqueued_s + ticket.waited_s
                self._pace.ended(self._clock() - went_s)
        self._queue.close(ticket._entry)
        self._num_open -= 1
        self.wake()


def _applicant(entry: Entry) -> Applicant:
    return Applicant(entry.tenant, entry.adapter, priority=entry.priority)

"""Where requests of one base wait for an engine: the waiting room as coroutines see it.

A request goes when an engine replica has room, or waits for its turn, or is refused. A client that
leaves, leaves the queue. Each ingress replica puts its own requests in order; what the others sent
shows in the engines' frames.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from math import ceil

from starlette.types import Receive

from serve_app.admission.capacity import has_room
from serve_app.admission.waiting_room import Applicant, Guest, Reason, Refused, WaitingRoom
from serve_app.config import FairnessArgs
from serve_app.disconnects import call_when_gone
from serve_app.errors import ClientGoneError, OverloadedError
from serve_app.messages import Backlog, RoutingRequest
from serve_app.metrics.queue import QueueStats
from serve_app.routing.view import ReplicaViews
from serve_app.tasks import spawn

_LOOK_AGAIN_S = 0.1  # should no frame come
_TRIM_S = 0.5
_MAX_RETRY_AFTER_S = 60  # clients of OpenAI's library do not wait longer


class Ticket:
    """One HTTP request that may go to an engine, or waits for it, until `leave`."""

    def __init__(self, queue: AdmissionQueue, guest: Guest, ask: RoutingRequest) -> None:
        self._queue = queue
        self._guest = guest
        self._ask = ask
        self._turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._is_open = True

    @property
    def waited_s(self) -> float:
        return self._guest.waited_s

    def generated(self, num_tokens: int) -> None:
        """So many output tokens until now, of all its choices."""
        if self._is_open and num_tokens > self._guest.num_generated:
            self._queue._generated(self._guest, num_tokens)

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
        self._max_engine_queue_s = settings.max_engine_queue_s
        self._views = views
        self._stats, self._of_base = stats, stats.of_base(base)
        self._clock = clock
        self._room = WaitingRoom(
            settings.weights, settings.max_wait_s, settings.max_queue_s, max_waiting
        )
        self._waiting: dict[Guest, Ticket] = {}
        self._under_way: dict[str, RoutingRequest] = {}  # by call, until a replica counts it
        self._trimmed_s = 0.0
        self._soon: asyncio.Handle | None = None
        self._later: asyncio.TimerHandle | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._room)

    @property
    def backlog(self) -> Backlog:
        sent, refused = self._room.demand.per_s(self._clock())
        return Backlog(len(self._room), self._room.waiting_tokens, sent, refused)

    @property
    def is_idle(self) -> bool:
        """Nobody waits, and nobody's answer is still to be charged."""
        return not self._room.num_open

    def check(self, who: Applicant) -> None:
        """Refuses what is hopeless while it has cost nothing: before its prompt is known."""
        try:
            self._room.check(who, self._clock())
        except Refused as refused:
            raise self._overloaded(refused) from None

    async def enter(
        self, who: Applicant, ask: RoutingRequest, max_tokens: int, receive: Receive | None = None
    ) -> Ticket:
        """Returns when the request may go. `max_tokens`: of all its choices; `receive`: tells when
        the client leaves, the body must have been read. Raises OverloadedError, ClientGoneError."""
        has_room = not len(self._room) and self._has_room()
        try:
            guest, rival = self._room.enter(
                who, ask.num_tokens, ask.num_sequences, max_tokens, self._clock(), has_room=has_room
            )
        except Refused as refused:
            raise self._overloaded(refused) from None
        ticket = Ticket(self, guest, ask)
        if rival is not None:
            self._refuse(self._waiting[rival], "full")
        if guest.is_waiting:
            self._waiting[guest] = ticket
            self._of_base.num_waiting += 1
            await self._wait(ticket, receive)
        else:
            self._went(ticket)
        return ticket

    def placed(self, call_id: str) -> None:
        """A replica's view counts this call from now on. From any thread."""
        self._under_way.pop(call_id, None)

    def wake(self) -> None:
        """There may be room: a frame came, or an answer ended."""
        if self._soon is None and len(self._room):
            self._soon = asyncio.get_running_loop().call_soon(self._look)

    async def _wait(self, ticket: Ticket, receive: Receive | None) -> None:
        loop = asyncio.get_running_loop()
        self._look_later()
        timer = loop.call_later(self._room.patience_s, self._refuse, ticket, "waited")
        watch: asyncio.Task[None] | None = None
        if receive is not None:
            gone = ClientGoneError()
            watch = spawn(call_when_gone(receive, lambda: _end(ticket, gone)), "watch-client")
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
        while len(self._room) and self._has_room():
            guest = self._room.next(self._clock())
            assert guest is not None
            ticket = self._waiting.pop(guest)
            self._of_base.num_waiting -= 1
            self._went(ticket)
            if not ticket._turn.done():
                ticket._turn.set_result(None)
        if len(self._room) and self._clock() - self._trimmed_s >= _TRIM_S:
            self._trim()
        self._look_later()

    def _trim(self) -> None:
        """Those without hope are told now and not in the end."""
        self._trimmed_s = self._clock()
        while (guest := self._room.hopeless(self._clock())) is not None:
            self._refuse(self._waiting[guest], "waited")

    def _look_later(self) -> None:
        if self._later is not None:
            self._later.cancel()
            self._later = None
        if len(self._room):
            loop = asyncio.get_running_loop()
            self._later = loop.call_later(_LOOK_AGAIN_S, self._look)

    def _has_room(self) -> bool:
        views = self._views()
        if views is None:
            return True
        under_way = tuple(self._under_way.values())  # one bytecode: safe beside `placed`
        return has_room(views.replicas, under_way, self._max_engine_queue_s)

    def _went(self, ticket: Ticket) -> None:
        ask, guest = ticket._ask, ticket._guest
        self._under_way[ask.call_id] = ask
        self._of_base.waits.observe(guest.waited_s)
        self._stats.count_tokens(guest.entry.tenant, ask.num_tokens)

    def _refuse(self, ticket: Ticket, reason: Reason) -> None:
        if ticket._guest.is_waiting:
            ticket._is_open = False
            self._forget(ticket)
            _end(ticket, self._overloaded(self._room.refuse(ticket._guest, reason, self._clock())))

    def _overloaded(self, refused: Refused) -> OverloadedError:
        self._of_base.sheds[refused.reason] += 1
        wait_s = min(refused.wait_s, _MAX_RETRY_AFTER_S)
        return OverloadedError("Too many requests wait for this model.", max(1, ceil(wait_s)))

    def _generated(self, guest: Guest, num_tokens: int) -> None:
        self._stats.count_tokens(guest.entry.tenant, num_tokens - guest.num_generated)
        self._room.generated(guest, num_tokens)

    def _left(self, ticket: Ticket) -> None:
        self._forget(ticket)
        self._room.leave(ticket._guest, self._clock())
        self.wake()

    def _forget(self, ticket: Ticket) -> None:
        self._under_way.pop(ticket._ask.call_id, None)
        if self._waiting.pop(ticket._guest, None) is not None:
            self._of_base.num_waiting -= 1


def _end(ticket: Ticket, error: Exception) -> None:
    ticket.leave()
    if not ticket._turn.done():
        ticket._turn.set_exception(error)

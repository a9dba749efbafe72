"""The state that the generations of an ingress replica share so that they outlive their engines.

Holds every live attempt. Attempts on a draining replica, or on an engine silent for `silence_s`,
fail so that their generations continue on another replica, as soon as there is one; attempts sent
to an engine that was already silent fail sooner, and attempts that wait for a row of a batch while
another engine has one free. Also holds the queues of suspects, the quarantine and the metrics.
Ignorant of tokens.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable

from serve_app.dispatch.attempt import Attempt
from serve_app.dispatch.request_quarantine import RequestQuarantine
from serve_app.errors import EngineGoneError
from serve_app.metrics.ingress import MigrationMetrics
from serve_app.stream.server import StreamServer
from serve_app.stream.wire import DEPRIORITISE_S, SILENCE_S
from serve_app.tasks import keep

logger = logging.getLogger(__name__)

_CHECK_INTERVAL_S = 1.0
# A check that is this late is skipped: the process was held up and has unread frames.
_LATE_S = 0.5
_MAX_DEATHS = 32
_SAME_DEATH_S = 5.0  # reports of an engine's death within this time are of the same death


class ReplicaLeavesError(Exception):
    """The engine's replica drains: its requests continue on another replica."""


class FreeRowsError(Exception):
    """The request waits for a row of its engine's batch, and another engine has free rows."""


class SilentEngineError(EngineGoneError):
    """The engine is connected, but no frame comes from it or its step does not end."""


class SuspectQueue:
    """Requests that may have killed their engine go to the next engine in turn, so that another
    death shows which of them is guilty and no innocent request is convicted with it.

    The next suspect's turn begins when the suspect before it got a token, failed or left. The turn
    of a suspect that saw two or more deaths is exclusive: other requests that want an engine
    meanwhile wait, for a bounded time. There is a queue for each base in each ingress replica.
    """

    def __init__(self) -> None:
        self._turns: list[SuspectTurn] = []  # the first has begun

    @property
    def exclusive(self) -> SuspectTurn | None:
        """The turn whose end all other requests have to await, or None."""
        return self._turns[0] if self._turns and self._turns[0].is_exclusive else None

    def join(self, *, is_exclusive: bool) -> SuspectTurn:
        turn = SuspectTurn(self, is_exclusive)
        self._turns.append(turn)
        self._begin_first()
        return turn

    def end(self, turn: SuspectTurn) -> None:
        if turn in self._turns:
            self._turns.remove(turn)
            turn.is_over.set_result(None)
            self._begin_first()

    def _begin_first(self) -> None:
        if self._turns and not self._turns[0].has_begun.done():
            self._turns[0].has_begun.set_result(None)


class SuspectTurn:
    """The turn of a suspect: `has_begun` is done when it may go, `is_over` when the next may."""

    def __init__(self, queue: SuspectQueue, is_exclusive: bool) -> None:
        loop = asyncio.get_running_loop()
        self.has_begun: asyncio.Future[None] = loop.create_future()
        self.is_over: asyncio.Future[None] = loop.create_future()
        self.is_exclusive = is_exclusive
        self._queue = queue

    def end(self) -> None:
        """Lets the next suspect go. May be called again."""
        self._queue.end(self)


class Migrations:
    def __init__(
        self,
        server: StreamServer,
        placed_at: Callable[[str, str], str | None],
        deprioritise: Callable[[str], None],
        ingress: str,
        silence_s: float = SILENCE_S,
        shun_s: float = DEPRIORITISE_S,
    ) -> None:
        """`placed_at` and `deprioritise`: see `routing.state`."""
        self.metrics = MigrationMetrics(ingress)
        self.quarantine = RequestQuarantine()
        self.has_silent_engine = False  # an engine is connected, but silent for `silence_s`
        self.server = server
        self._placed_at, self._deprioritise = placed_at, deprioritise
        self._silence_s, self._shun_s = silence_s, shun_s
        self._attempts: dict[str, set[Attempt]] = {}  # live, by application
        self._up: dict[str, frozenset[str]] = {}  # engine ids by application, as Serve's router has
        self._gone: dict[str, set[str]] = {}  # were up, and may still have requests
        self._arrivals: dict[str, asyncio.Future[None]] = {}  # by application, see `arrival`
        self._suspects: dict[str, SuspectQueue] = {}  # by application
        # Engine id -> when it died, the attempts there without a token; the newest deaths.
        self._deaths: dict[str, tuple[float, frozenset[Attempt]]] = {}

    def start(self) -> None:
        keep(self._watch_engines, "watch-engines")

    def add(self, attempt: Attempt) -> None:
        self._attempts.setdefault(attempt.app_name, set()).add(attempt)

    def remove(self, attempt: Attempt) -> None:
        live = self._attempts.get(attempt.app_name, set())
        live.discard(attempt)
        if not live:
            self._attempts.pop(attempt.app_name, None)

    def engine_of(self, attempt: Attempt) -> str | None:
        """Returns the engine replica of this attempt; None while it is unknown."""
        return attempt.stream.engine_id or self._placed_at(attempt.app_name, attempt.call_id)

    def arrival(self, app_name: str) -> asyncio.Future[None]:
        """Returns a future that is done when Serve's router gets a new replica."""
        if app_name not in self._arrivals:
            self._arrivals[app_name] = asyncio.get_running_loop().create_future()
        return self._arrivals[app_name]

    def suspects(self, app_name: str) -> SuspectQueue:
        return self._suspects.setdefault(app_name, SuspectQueue())

    def is_quiet(self, app_name: str, *, ignore_first: bool) -> bool:
        """True if every live attempt has a token of its present engine. `ignore_first`: only
        attempts that follow another engine's have to."""
        return all(
            attempt.stream.has_output or (ignore_first and attempt.is_first)
            for attempt in self._attempts.get(app_name, ())
        )

    def record_death(self, app_name: str, engine_id: str) -> None:
        """Notes which attempts the engine had without a token, for `was_alone`. The first report of
        a death counts: attempts that report it later may be elsewhere by then."""
        known = self._deaths.get(engine_id)
        now_s = time.monotonic()
        if known is not None and now_s - known[0] < _SAME_DEATH_S:
            return
        newcomers = frozenset(
            attempt
            for attempt in self._attempts.get(app_name, ())
            if not attempt.stream.has_output and self.engine_of(attempt) in (None, engine_id)
        )
        self._deaths.pop(engine_id, None)
        self._deaths[engine_id] = (now_s, newcomers)
        while len(self._deaths) > _MAX_DEATHS:
            del self._deaths[next(iter(self._deaths))]

    def was_alone(self, attempt: Attempt, engine_id: str) -> bool:
        """True if no other attempt of this ingress could have been at this engine without a token
        when it died."""
        return self._deaths[engine_id][1] <= {attempt}

    def replicas_changed(self, app_name: str, up: Iterable[str]) -> None:
        """Updates the ids of the engines to which Serve's router sends new requests."""
        before, now = self._up.get(app_name, frozenset()), frozenset(up)
        self._up[app_name] = now
        gone = self._gone.setdefault(app_name, set())
        gone |= before - now
        gone -= now
        if now - before and (arrival := self._arrivals.pop(app_name, None)) is not None:
            arrival.set_result(None)
        self._leave_gone_replicas(app_name)

    async def _watch_engines(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + _CHECK_INTERVAL_S
            await asyncio.sleep(_CHECK_INTERVAL_S)
            if loop.time() - due_s < _LATE_S:
                self.check_engines()

    def check_engines(self) -> None:
        """Fails the attempts whose engine is silent, or was found to be on a replica that left."""
        silence_s = {engine: self.server.silence_s(engine) or 0.0 for engine in self.server.engines}
        self.has_silent_engine = any(each_s > self._silence_s for each_s in silence_s.values())
        for engine_id, each_s in silence_s.items():
            if each_s > self._shun_s:
                self._deprioritise(engine_id)
        for app_name, attempts in tuple(self._attempts.items()):
            self._leave_gone_replicas(app_name)
            for attempt in tuple(attempts):
                if attempt.is_movable:
                    self._check_silence(attempt)
            self._use_free_rows(self._up.get(app_name, frozenset()), attempts)
        for gone in self._gone.values():
            gone &= self.server.engines

    def _leave_gone_replicas(self, app_name: str) -> None:
        gone = self._gone.get(app_name)
        if not gone or not self._up[app_name]:
            return  # without another replica the attempts had better end where they are
        for attempt in tuple(self._attempts.get(app_name, ())):
            engine_id = self.engine_of(attempt)
            if not attempt.is_movable or engine_id is None or engine_id not in gone:
                continue
            if engine_id in self.server.engines:
                attempt.stream.fail(ReplicaLeavesError())
            else:  # it left because it died: its calls are about to report the same
                attempt.stream.fail(EngineGoneError(f"engine {engine_id} is gone", engine_id))

    def _use_free_rows(self, up: frozenset[str], attempts: Collection[Attempt]) -> None:
        """Fails as many attempts that wait for a row as other engines have rows free: an engine
        that came after they were sent would idle while they wait for the end of long answers. Each
        request moves at most once for this reason."""
        loads = {name: load for name, load in self.server.loads.items() if name in up}
        waiting = {
            name: load.num_waiting - load.num_waiting_for_adapter for name, load in loads.items()
        }
        if not any(waiting.values()):
            return
        max_num_seqs = next(iter(attempts)).max_num_seqs  # of each engine of the base
        free = [
            max(0, max_num_seqs - load.num_running)
            for name, load in loads.items()
            if not waiting[name] and (self.server.silence_s(name) or 0.0) <= self._shun_s
        ]
        silent = [attempt for attempt in attempts if not attempt.stream.has_output]
        on_their_way = sum(attempt.num_sequences for attempt in silent if not attempt.is_first)
        num_free, before_s = sum(free) - on_their_way, time.monotonic() - _CHECK_INTERVAL_S
        for attempt in sorted(silent, key=lambda one: -one.began_s):  # the newest wait
            engine_id, size = attempt.stream.engine_id or "", attempt.num_sequences
            if waiting.get(engine_id, 0) <= 0:
                continue
            waiting[engine_id] -= size
            may_move = attempt.is_movable and attempt.is_first and attempt.began_s < before_s
            if may_move and size <= num_free:
                num_free -= size
                attempt.stream.fail(FreeRowsError("another engine has free rows"))

    def _check_silence(self, attempt: Attempt) -> None:
        engine_id = self.engine_of(attempt)
        silence_s = None if engine_id is None else self.server.silence_s(engine_id)
        if engine_id is None or silence_s is None:
            return
        if silence_s > self._shun_s and time.monotonic() - silence_s < attempt.began_s:
            words = f"engine {engine_id} was silent when a request came"
            attempt.stream.fail(SilentEngineError(words, engine_id, was_dead=True))
        elif silence_s > self._silence_s:
            logger.warning("engine %s has been silent or stuck for %.0f s", engine_id, silence_s)
            attempt.stream.fail(SilentEngineError(f"engine {engine_id} is silent", engine_id))

"""The tokens of one HTTP request, whatever becomes of the engines that make them.

When its engine dies, falls silent or is drained, the prompt and the tokens so far are sent to
another replica, with the same seed and the same adapter; the reader sees a pause. A request whose
engine died before it gave it a token since it came there is a suspect and goes on by itself (see
`probation`); when that kills the next engine too, it is quarantined. So a request that kills at its
prompt costs two engines, one that kills at a later token makes progress first and costs three.
Ignorant of HTTP and text.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from ray.serve.handle import DeploymentHandle

from engine.admission import EngineLimits
from engine.types import EngineLoad, Request, TokenOutput
from registry.entities import AdapterVersion
from serve_app.attempt import Attempt
from serve_app.config import MigrationArgs
from serve_app.errors import RequestQuarantinedError
from serve_app.journey import Journey, NotTakenError
from serve_app.migrations import Migrations
from serve_app.probation import MAX_TURN_S, Turn
from serve_app.progress import Progress
from serve_app.routing.asks import make_ask
from serve_app.stream_server import StreamServer
from serve_app.topology import SubmitCall

STAY = MigrationArgs(limit=0)


@dataclass(frozen=True, slots=True)
class Lane:
    """To the replicas of one base."""

    server: StreamServer
    handle: DeploymentHandle[object]
    limits: EngineLimits
    app_name: str
    model_name: str
    migration: MigrationArgs


class Generation:
    """`close` aborts in the engine whatever has not ended."""

    def __init__(
        self,
        migrations: Migrations,
        lane: Lane,
        requests: tuple[Request, ...],
        adapter: AdapterVersion | None,
        session: str | None = None,
    ) -> None:
        """Raises RequestQuarantinedError."""
        migrations.quarantine.check(requests)
        self._loop = asyncio.get_running_loop()
        self._migrations = migrations
        self._lane = lane
        self._adapter = adapter
        self._session = session
        self._progress = Progress(requests)
        self._journey = Journey(migrations, lane.app_name, lane.model_name, lane.migration)
        self._failure: Exception | None = None  # the reader's own
        self._is_over: asyncio.Future[None] = self._loop.create_future()
        self._turn: Turn | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._attempt = self._place(self._progress.requests, is_first=True)

    @property
    def engine_load(self) -> EngineLoad | None:
        """Of the engine that answers, as of its last step; None before the first token."""
        return self._attempt.engine_load

    @property
    def is_done(self) -> bool:
        return self._progress.is_done

    async def read(self) -> list[TokenOutput]:
        """Everything that arrived since the last read, at least one output.

        Raises what ended it: OverloadedError, ServiceUnavailableError, RequestQuarantinedError, an
        EngineError or a RegistryError.
        """
        while True:
            try:
                outputs = await self._attempt.read()
            except Exception as error:
                if self._failure is not None:
                    raise self._failure from None
                await self._go_on(error)
                continue
            outputs = self._progress.take(outputs)
            if outputs:
                if self._timers:
                    self._settle()
                self._journey.progress()
                return outputs

    def end_choice(self, request_id: str, choice: int) -> None:
        """The reader needs no more of this choice (a stop string): the engine drops it."""
        if self._progress.is_open(request_id, choice):
            self._attempt.abort(self._progress.engine_id(request_id), choice)
            self._progress.end(request_id, choice)

    def fail(self, error: Exception) -> None:
        """The reader gets this error after what already arrived."""
        self._failure = error
        self._attempt.fail(error)
        self._end()

    def close(self) -> None:
        self._leave()
        self._progress.end_all()
        self._end()

    async def _go_on(self, error: Exception) -> None:
        """Another attempt, or the failure for the reader."""
        on_probation = self._turn is not None
        try:
            pause_s = self._journey.judge(error, self._attempt, on_probation=on_probation)
        except RequestQuarantinedError:
            self._migrations.quarantine.add(self._progress.requests)
            raise
        self._leave()
        if self._journey.is_suspect:
            await self._wait_for_turn()
        await self._wait(pause_s)
        try:
            self._attempt = self._place(self._progress.resume(), is_first=False)
        except Exception as last:
            self._journey.give_up(last)
            raise

    def _place(self, requests: tuple[Request, ...], *, is_first: bool) -> Attempt:
        lane = self._lane
        ask = make_ask(requests, self._adapter, lane.limits, self._session, self._journey.avoid)
        call = SubmitCall(requests, self._adapter, lane.server.address, ask)
        is_movable = lane.migration.limit > 0
        attempt = Attempt(lane.server, lane.handle, call, is_first=is_first, is_movable=is_movable)
        self._migrations.enter(lane.app_name, attempt)
        if not is_first:
            left_s = self._journey.deadline_s - time.monotonic()
            self._timers = [self._loop.call_later(left_s, self._check_taken, attempt)]
            if self._turn is not None:
                self._timers.append(self._loop.call_later(MAX_TURN_S, self._end_turn, attempt))
        return attempt

    def _leave(self) -> None:
        """The attempt, wherever it stands."""
        self._settle()
        self._migrations.leave(self._lane.app_name, self._attempt)
        self._attempt.close(self._progress.open_requests)

    def _settle(self) -> None:
        """The attempt succeeded or failed."""
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        if self._turn is not None:
            self._turn.leave()
            self._turn = None

    async def _wait_for_turn(self) -> None:
        """Bounded: after half the time limit it goes as all others do, and is not judged."""
        turn = self._migrations.probation(self._lane.app_name).join()
        try:
            await asyncio.wait(
                {turn.begun, self._is_over}, timeout=self._lane.migration.timeout_s / 2
            )
            self._raise_failure()
        except BaseException:
            turn.leave()
            raise
        if turn.begun.done():
            self._turn = turn
        else:
            turn.leave()
        self._journey.restart_clock()

    async def _wait(self, seconds: float) -> None:
        if seconds:
            await asyncio.wait({self._is_over}, timeout=seconds)
            self._raise_failure()

    def _check_taken(self, attempt: Attempt) -> None:
        if attempt.engine_id is None:
            attempt.fail(NotTakenError("no other engine replica took this request over in time"))

    def _end_turn(self, attempt: Attempt) -> None:
        """Of one that waits long at its engine: the next one may go. Where no engine has it yet,
        that one would wait with it."""
        if attempt.engine_id is None:
            self._timers.append(self._loop.call_later(MAX_TURN_S, self._end_turn, attempt))
        elif self._turn is not None:
            self._turn.leave()
            self._turn = None

    def _end(self) -> None:
        if not self._is_over.done():
            self._is_over.set_result(None)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

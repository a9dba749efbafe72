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
from engine.types import NO_MEMORY, EngineLoad, Request, TokenOutput
from registry.entities import AdapterVersion
from serve_app.config import MigrationArgs
from serve_app.dispatch.attempt import Attempt
from serve_app.dispatch.journey import MigrationState, NotTakenError
from serve_app.dispatch.migrations import Migrations
from serve_app.dispatch.probation import SuspectTurn
from serve_app.dispatch.progress import Progress
from serve_app.errors import NoMemoryError, RequestQuarantinedError
from serve_app.messages import RoutingRequest, SubmitCall
from serve_app.routing.request import make_routing_request
from serve_app.stream.server import StreamServer

STAY = MigrationArgs(limit=0)
MAX_TURN_S = 10.0  # at an engine, without a token; then the next suspect may go
MAX_HOLD_S = 5.0  # of those who are held up by a suspect
_LOOK_S = 0.02
_FIRST = asyncio.FIRST_COMPLETED


@dataclass(frozen=True, slots=True)
class CallParameters:
    """To the replicas of one base."""

    server: StreamServer
    handle: DeploymentHandle[object]
    limits: EngineLimits
    app_name: str
    model_name: str
    migration: MigrationArgs
    has_client: bool = True  # else nobody loses anything when a request fails


class Generation:
    """`close` aborts in the engine whatever has not ended."""

    def __init__(
        self,
        migrations: Migrations,
        lane: CallParameters,
        requests: tuple[Request, ...],
        adapter: AdapterVersion | None,
        ask: RoutingRequest,
    ) -> None:
        """`ask`: the requests as a router sees them. Raises RequestQuarantinedError."""
        migrations.quarantine.check(requests)
        self._loop = asyncio.get_running_loop()
        self._migrations = migrations
        self._lane = lane
        self._adapter = adapter
        self._ask = ask
        self._progress = Progress(requests)
        self._journey = MigrationState(
            migrations,
            lane.app_name,
            lane.model_name,
            lane.migration,
            has_client=lane.has_client,
        )
        self._failure: Exception | None = None  # the reader's own
        self._is_over: asyncio.Future[None] = self._loop.create_future()
        self._turn: SuspectTurn | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._attempt: Attempt | None = None  # made by the first read

    @property
    def engine_load(self) -> EngineLoad | None:
        """Of the engine that answers, as of its last step; None before the first token."""
        return None if self._attempt is None else self._attempt.engine_load

    @property
    def is_warm(self) -> bool:
        """An engine took the request, and had its adapter on the device."""
        return self._attempt is not None and self._attempt.found_in == "device"

    @property
    def is_done(self) -> bool:
        return self._progress.is_done

    async def read(self) -> list[TokenOutput]:
        """Everything that arrived since the last read, at least one output.

        Raises what ended it: OverloadedError, ServiceUnavailableError, RequestQuarantinedError,
        NoMemoryError, AdapterUnsupportedError, an EngineError or a RegistryError.
        """
        while True:
            attempt = self._attempt or await self._begin()
            try:
                outputs = await attempt.read()
            except Exception as error:
                self._raise_failure()
                await self._go_on(attempt, error)
                continue
            if any(output.error == NO_MEMORY for output in outputs):
                outputs = [output for output in outputs if output.error != NO_MEMORY]
                attempt.fail(NoMemoryError())  # after what came before it
            outputs = self._progress.take(outputs)
            if outputs:
                if self._timers:
                    self._settle()
                self._journey.progress()
                return outputs

    def end_choice(self, request_id: str, choice: int) -> None:
        """The reader needs no more of this choice (a stop string): the engine drops it."""
        if self._progress.is_open(request_id, choice):
            num_tokens = self._progress.end(request_id, choice)
            if self._attempt is not None:
                self._attempt.stop(self._progress.engine_id(request_id), choice, num_tokens)

    def fail(self, error: Exception) -> None:
        """The reader gets this error after what already arrived."""
        self._failure = error
        if self._attempt is not None:
            self._attempt.fail(error)
        self._end()

    def close(self) -> None:
        self._leave()
        self._progress.end_all()
        self._end()

    async def _begin(self) -> Attempt:
        await self._let_suspect_pass()
        return self._place(self._progress.requests, self._ask, is_first=True)

    async def _go_on(self, attempt: Attempt, error: Exception) -> None:
        """Another attempt, or the failure for the reader."""
        on_probation = self._turn is not None
        try:
            pause_s = self._journey.judge(error, attempt, on_probation=on_probation)
        except RequestQuarantinedError:
            self._migrations.quarantine.add(self._progress.requests)
            raise
        finally:
            self._leave()
        # A new replica may be the only one that can take it, and need not live as long as a pause.
        await self._wait(pause_s, self._migrations.arrival(self._lane.app_name))
        if self._journey.is_suspect:
            await self._wait_for_turn()
        else:
            self._journey.extend(await self._let_suspect_pass())
        requests, session = self._progress.resume(), self._ask.session
        avoid, limits = self._journey.avoid, self._lane.limits
        ask = make_routing_request(requests, self._adapter, limits, session, avoid)
        self._place(requests, ask, is_first=False)

    def _place(
        self, requests: tuple[Request, ...], ask: RoutingRequest, *, is_first: bool
    ) -> Attempt:
        lane = self._lane
        call = SubmitCall(requests, self._adapter, lane.server.address, ask)
        attempt = Attempt(
            lane.server,
            lane.handle,
            call,
            is_first=is_first,
            is_movable=lane.migration.limit > 0,
        )
        self._attempt = attempt
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
        if self._attempt is not None:
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
        began_s, patience_s = self._loop.time(), self._lane.migration.timeout_s / 2
        turn = self._migrations.probation(self._lane.app_name).join(
            is_exclusive=self._journey.num_deaths > 1
        )
        try:
            await self._wait(patience_s, turn.has_begun)
            if turn.has_begun.done():
                await self._wait_for_quiet(patience_s, turn)
        except BaseException:
            turn.leave()
            raise
        if turn.has_begun.done():
            self._turn = turn
        else:
            turn.leave()
        self._journey.extend(self._loop.time() - began_s)

    async def _wait_for_quiet(self, patience_s: float, turn: SuspectTurn) -> None:
        """Until nobody else could be taken for the one who killed the next engine."""
        until_s = self._loop.time() + patience_s
        while self._loop.time() < until_s and not self._migrations.is_quiet(
            self._lane.app_name, but_for_new=not turn.is_exclusive
        ):
            await self._wait(_LOOK_S)

    async def _let_suspect_pass(self) -> float:
        """Returns the seconds that it took."""
        began_s = self._loop.time()
        turn = self._migrations.probation(self._lane.app_name).exclusive
        if turn is not None:
            await self._wait(MAX_HOLD_S, turn.is_over)
        return self._loop.time() - began_s

    async def _wait(self, seconds: float, *futures: asyncio.Future[None]) -> None:
        """For one of these, at most so long."""
        if seconds:
            await asyncio.wait({self._is_over, *futures}, timeout=seconds, return_when=_FIRST)
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

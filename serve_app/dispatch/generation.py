"""The tokens of an HTTP request, whatever happens to the engines that make them.

When its engine dies, falls silent or is drained, the prompt and the tokens so far are sent to
another replica, with the same seed and the same adapter; the reader sees a pause. A request whose
engine died before it sent a token for it is a suspect and goes to the next engine alone (see
`SuspectQueue`); if that engine dies too, with no other newcomer there, the request is quarantined.
So a request that crashes engines during prefill can take down two of them; a request that crashes
them later, three. Ignorant of HTTP and text.
"""

from __future__ import annotations

import asyncio
import time

from engine.types import NO_MEMORY, EngineLoad, Request, TokenOutput
from registry.entities import WeightedVersion
from serve_app.dispatch.attempt import Attempt
from serve_app.dispatch.base_handle import BaseHandle
from serve_app.dispatch.migration_state import MigrationState, NotAcceptedError
from serve_app.dispatch.migrations import Migrations, SuspectTurn
from serve_app.dispatch.progress import Progress
from serve_app.errors import NoMemoryError, RequestQuarantinedError
from serve_app.messages import RoutingRequest, SubmitCall
from serve_app.observe.record import Move
from serve_app.routing.request import make_routing_request

MAX_TURN_S = 10.0  # of a suspect at an engine without a token; then the next suspect may go
MAX_HOLD_S = 5.0  # of requests that wait for an exclusive suspect
_QUIET_CHECK_S = 0.02


class Generation:
    """The successive attempts of an HTTP request; `close` aborts all open choices."""

    def __init__(
        self,
        migrations: Migrations,
        base: BaseHandle,
        requests: tuple[Request, ...],
        adapters: tuple[WeightedVersion, ...],
        routing: RoutingRequest,
        *,
        is_copy: bool = False,
    ) -> None:
        """`routing` describes `requests` to the router. `is_copy`: no client loses an answer when
        it fails. Raises RequestQuarantinedError."""
        migrations.quarantine.check(requests)
        self.request_ids = tuple(request.request_id for request in requests)
        self._loop = asyncio.get_running_loop()
        self._migrations = migrations
        self._base = base
        self._adapters = adapters
        self._routing = routing
        self._progress = Progress(requests)
        self._state = MigrationState(migrations, base, is_copy=is_copy)
        self._failure: Exception | None = None  # set by `fail`
        self._is_over: asyncio.Future[None] = self._loop.create_future()
        self._turn: SuspectTurn | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._attempt: Attempt | None = None  # the newest; made by the first read

    @property
    def engine_load(self) -> EngineLoad | None:
        """The load of the present engine after its last step; None before the first token."""
        return None if self._attempt is None else self._attempt.stream.engine_load

    @property
    def is_warm(self) -> bool:
        """True if an engine accepted the request and had its adapter on the device."""
        return self._attempt is not None and self._attempt.stream.found_in == "device"

    @property
    def is_accepted(self) -> bool:
        """True if the present engine has accepted the request."""
        return self._attempt is not None and self._attempt.stream.engine_id is not None

    @property
    def moves(self) -> tuple[Move, ...]:
        """The migrations so far, failed migrations included."""
        return tuple(self._state.moves)

    async def read(self) -> list[TokenOutput]:
        """Returns the outputs that arrived since the last read, at least one.

        Raises the error that ended it: OverloadedError, ServiceUnavailableError,
        RequestQuarantinedError, NoMemoryError, AdapterUnsupportedError, an EngineError or a
        RegistryError.
        """
        while True:
            if (attempt := self._attempt) is None:
                await self._wait_for_suspect()
                attempt = self._submit(self._progress.requests, self._routing, is_first=True)
            try:
                outputs = await attempt.stream.read()
            except Exception as error:
                self._raise_failure()
                await self._migrate(attempt, error)
                continue
            if any(output.error == NO_MEMORY for output in outputs):
                outputs = [output for output in outputs if output.error != NO_MEMORY]
                attempt.stream.fail(NoMemoryError())  # after the outputs before it
            outputs = self._progress.record(outputs)
            if outputs:
                if self._timers:
                    self._settle()
                self._state.on_tokens()
                return outputs

    def end_choice(self, request_id: str, choice: int) -> None:
        """Drops the rest of this choice in the engine, because a stop string ended it."""
        if self._progress.is_open(request_id, choice):
            num_tokens = self._progress.end(request_id, choice)
            if self._attempt is not None:
                self._attempt.stream.stop(self._progress.engine_id(request_id), choice, num_tokens)

    def fail(self, error: Exception) -> None:
        """Makes `read` raise this error after everything that already arrived."""
        self._failure = error
        if self._attempt is not None:
            self._attempt.stream.fail(error)
        self._end()

    def close(self) -> None:
        self._leave_attempt()
        self._progress.end_all()
        self._end()

    async def _migrate(self, attempt: Attempt, error: Exception) -> None:
        """Makes another attempt, or raises the error for the reader."""
        state, app_name = self._state, self._base.app_name
        is_on_trial = self._turn is not None
        try:
            pause_s = state.on_failure(error, attempt, is_on_trial=is_on_trial)
        except RequestQuarantinedError:
            self._migrations.quarantine.add(self._progress.requests)
            raise
        finally:
            self._leave_attempt()
        # Only a new replica may be able to accept it, and that may be gone before the pause ends.
        await self._wait(pause_s, self._migrations.arrival(app_name))
        if state.is_suspect:
            state.extend(await self._wait_for_turn())
        else:
            state.extend(await self._wait_for_suspect())
        requests, session = self._progress.resume(), self._routing.session
        limits = self._base.description.limits
        routing = make_routing_request(requests, self._adapters, limits, session, state.avoid)
        self._submit(requests, routing, is_first=False)

    def _submit(
        self, requests: tuple[Request, ...], routing: RoutingRequest, *, is_first: bool
    ) -> Attempt:
        versions = tuple(one.version for one in self._adapters)
        server = self._migrations.server
        call = SubmitCall(requests, versions, server.address, routing)
        self._attempt = attempt = Attempt(server, self._base, call, is_first=is_first)
        self._migrations.add(attempt)
        if not is_first:
            left_s = self._state.deadline_s - time.monotonic()
            self._timers = [self._loop.call_later(left_s, self._check_accepted, attempt)]
            if self._turn is not None:
                self._timers.append(self._loop.call_later(MAX_TURN_S, self._end_turn, attempt))
        return attempt

    def _leave_attempt(self) -> None:
        self._settle()
        if self._attempt is not None:
            self._migrations.remove(self._attempt)
            self._attempt.close(self._progress.open_requests)

    def _settle(self) -> None:
        """Ends the timers and the turn of an attempt that succeeded or failed."""
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        if self._turn is not None:
            self._turn.end()
            self._turn = None

    async def _wait_for_turn(self) -> float:
        """Waits for this suspect's turn, and in it until no other request could be blamed for the
        next engine's death; returns the seconds that it lasted. Without a turn after half the time
        limit, the request goes as all others do and is not convicted."""
        began_s, patience_s = self._loop.time(), self._base.migration.timeout_s / 2
        app_name = self._base.app_name
        turn = self._migrations.suspects(app_name).join(is_exclusive=self._state.num_deaths > 1)
        try:
            await self._wait(patience_s, turn.has_begun)
            until_s = self._loop.time() + patience_s
            while (
                turn.has_begun.done()
                and self._loop.time() < until_s
                and not self._migrations.is_quiet(app_name, ignore_first=not turn.is_exclusive)
            ):
                await self._wait(_QUIET_CHECK_S)
        except BaseException:
            turn.end()
            raise
        if turn.has_begun.done():
            self._turn = turn
        else:
            turn.end()
        return self._loop.time() - began_s

    async def _wait_for_suspect(self) -> float:
        """Waits while an exclusive suspect has its turn; returns the seconds that it lasted."""
        began_s = self._loop.time()
        turn = self._migrations.suspects(self._base.app_name).exclusive
        if turn is not None:
            await self._wait(MAX_HOLD_S, turn.is_over)
        return self._loop.time() - began_s

    async def _wait(self, seconds: float, *futures: asyncio.Future[None]) -> None:
        """Waits for any of these, at most so long; raises the error of `fail`."""
        if seconds:
            over = {self._is_over, *futures}
            await asyncio.wait(over, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            self._raise_failure()

    def _check_accepted(self, attempt: Attempt) -> None:
        if attempt.stream.engine_id is None:
            error = NotAcceptedError("no other engine replica took this request over in time")
            attempt.stream.fail(error)

    def _end_turn(self, attempt: Attempt) -> None:
        """Lets the next suspect go, because this request waits long at its engine. While no engine
        has accepted it, the next suspect would only wait with it."""
        if attempt.stream.engine_id is None:
            self._timers.append(self._loop.call_later(MAX_TURN_S, self._end_turn, attempt))
        elif self._turn is not None:
            self._turn.end()
            self._turn = None

    def _end(self) -> None:
        if not self._is_over.done():
            self._is_over.set_result(None)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

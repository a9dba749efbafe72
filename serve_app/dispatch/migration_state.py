"""The migration state of a request: which engines it left, and whether a failure ends it or moves
it to another engine.

A death, a silence or a lack of memory counts against the limit, a drain or a wait for a row does
not. An engine that was dead before the request came, a full queue or a missing adapter is retried
until the time limit of the current migration. For suspects see `generation`. Reads errors and
clocks, calls no engine.
"""

from __future__ import annotations

import logging
import random
import time

from engine.errors import EngineDeadError, UnknownAdapterError
from registry.errors import CacheFailedError, CacheFullError, RegistryUnavailableError
from serve_app.dispatch.attempt import Attempt, CallCancelledError, UnconnectedError
from serve_app.dispatch.base_handle import BaseHandle
from serve_app.dispatch.migrations import (
    FreeRowsError,
    Migrations,
    ReplicaLeavesError,
    SilentEngineError,
)
from serve_app.errors import (
    AdapterUnsupportedError,
    EngineGoneError,
    NoMemoryError,
    OverloadedError,
    RequestQuarantinedError,
)
from serve_app.metrics.ingress import Reason
from serve_app.observe.record import Move

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
# Refusals of another replica that may pass.
_TRANSIENT = (UnknownAdapterError, RegistryUnavailableError, CacheFullError, CacheFailedError)


class NotAcceptedError(EngineDeadError):
    """No other replica accepted the request in time."""


class MigrationState:
    """A migration lasts from the loss of an engine to the first token of the next."""

    def __init__(self, migrations: Migrations, base: BaseHandle, *, is_copy: bool) -> None:
        self.avoid: frozenset[str] = frozenset()  # ids of the engines that the request left
        self.is_suspect = False
        self.num_deaths = 0
        self.deadline_s = 0.0  # of the current migration, on the monotonic clock
        self._migrations = migrations
        self._model_name, self._settings = base.base.name, base.migration
        # Begins at 0: Prometheus sees no increase in a series that appears with the first loss.
        migrations.metrics.lost[self._model_name] += 0
        self._is_copy = is_copy
        self._reason: Reason | None = None  # of the current migration; None: there is none
        self.moves: list[Move] = []
        self._pause_s = _FIRST_PAUSE_S  # before its next retry
        self._last_token_s: float | None = None

    def on_failure(self, error: BaseException, attempt: Attempt, *, is_on_trial: bool) -> float:
        """Returns the seconds to wait before the next attempt; raises the error for the client if
        there is to be none. `is_on_trial`: the attempt was a suspect's turn."""
        engine_id = (
            error.engine_id
            if isinstance(error, EngineGoneError)
            else self._migrations.engine_of(attempt)
        )
        try:
            pause_s = self._pause_after(error, attempt, engine_id, is_on_trial)
        except Exception as final:
            self._end(final)
            raise
        if engine_id is not None:
            self.avoid |= {engine_id}
        logger.info("a request of %s leaves engine %s: %s", attempt.app_name, engine_id, error)
        return pause_s

    def on_tokens(self) -> None:
        """Notes that tokens came from the present engine, which ends a migration."""
        now_s = time.monotonic()
        if self._record_end(is_ok=True):
            if self._last_token_s is not None:
                gap_s = now_s - self._last_token_s
                self._migrations.metrics.gap(self._model_name, gap_s)
            self.is_suspect = False
        self._last_token_s = now_s

    def extend(self, seconds: float) -> None:
        """Moves the deadline by the wait for a suspect's turn, which is no wait for a replica. The
        deadline is not set again: a request that is refused again and again still meets it."""
        self.deadline_s += seconds

    def _pause_after(
        self, error: BaseException, attempt: Attempt, engine_id: str | None, is_on_trial: bool
    ) -> float:
        if self._settings.limit == 0 or isinstance(error, NotAcceptedError):
            raise error
        if isinstance(error, ReplicaLeavesError):
            self._begin("drain")
        elif isinstance(error, FreeRowsError):
            self._begin("wait")
        elif _is_loss(error) and not (
            # Serve may send requests to a dead replica for some time: that is no second death.
            engine_id is not None and self._migrations.server.has_lost(engine_id, attempt.began_s)
        ):
            self._begin(_reason(error))
            self._suspect(error, attempt, engine_id, is_on_trial)
            self._count_death(error)
        elif isinstance(error, NoMemoryError):
            self._begin("memory")
            self._count_death(error)
        elif isinstance(error, EngineDeadError):
            if self._reason is None:
                self._begin(_reason(error))
            return self._next_pause(error)
        elif self._reason is not None and _is_transient(error):
            return self._next_pause(error)
        else:
            raise error
        return 0.0

    def _begin(self, reason: Reason) -> None:
        self._record_end(is_ok=False)
        self._reason = reason
        self.moves.append(Move(time.time(), reason))
        self._pause_s = _FIRST_PAUSE_S
        self.deadline_s = time.monotonic() + self._settings.timeout_s

    def _record_end(self, *, is_ok: bool) -> bool:
        """Counts the end of the current migration; returns False if there was none."""
        reason, self._reason = self._reason, None
        if reason is not None:
            result = "ok" if is_ok else "failed"
            self._migrations.metrics.moves[self._model_name, reason, result] += 1
        return reason is not None

    def _end(self, error: Exception) -> None:
        """Counts a request that ends without its last token."""
        metrics, model = self._migrations.metrics, self._model_name
        was_migrating = self._record_end(is_ok=False)
        if isinstance(error, AdapterUnsupportedError):
            return  # no engine would have answered it
        if isinstance(error, RequestQuarantinedError):
            metrics.quarantined[model] += 1
        elif not self._is_copy and (was_migrating or isinstance(error, EngineDeadError)):
            metrics.lost[model] += 1

    def _count_death(self, error: BaseException) -> None:
        self.num_deaths += 1
        if self.num_deaths > self._settings.limit:
            raise error

    def _next_pause(self, error: BaseException) -> float:
        left_s = self.deadline_s - time.monotonic()
        if left_s < _FIRST_PAUSE_S:
            raise error
        pause_s = min(self._pause_s, left_s / 2) * random.uniform(0.5, 1.0)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return pause_s

    def _suspect(
        self, error: BaseException, attempt: Attempt, engine_id: str | None, is_on_trial: bool
    ) -> None:
        """Raises RequestQuarantinedError if the request alone can have killed the engine."""
        if engine_id is not None:
            self._migrations.record_death(attempt.app_name, engine_id)
        self.is_suspect = not attempt.stream.has_output
        if (
            self.is_suspect
            and is_on_trial
            and engine_id is not None
            and self._migrations.was_alone(attempt, engine_id)
        ):
            raise RequestQuarantinedError from error


def _reason(error: BaseException) -> Reason:
    return "silence" if isinstance(error, SilentEngineError) else "death"


def _is_loss(error: BaseException) -> bool:
    """True if an engine that had the request, as far as is known, has it no longer."""
    if isinstance(error, EngineGoneError) and error.was_dead:
        return False
    is_alive = isinstance(error, CallCancelledError | UnconnectedError)
    return isinstance(error, EngineDeadError) and not is_alive


def _is_transient(error: BaseException) -> bool:
    return isinstance(error, _TRANSIENT) or type(error) is OverloadedError

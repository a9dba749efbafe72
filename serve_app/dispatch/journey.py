"""What one request went through: which engines it left, and whether a failure is its end or sends
it on.

A death, a silence or a lack of memory counts against the limit, a drain does not. An engine that
was dead before the request came, a full queue, a missing adapter: tried again until the time limit
of the move under way. A request whose engine died before it gave it a token is a suspect; one that
was on probation then, with no other newcomer at the engine, is convicted. Knows errors and clocks,
no engines.
"""

from __future__ import annotations

import logging
import random
import time
from dataclasses import dataclass

from engine.errors import EngineDeadError, UnknownAdapterError
from registry.errors import CacheFullError, RegistryUnavailableError
from serve_app.config import MigrationArgs
from serve_app.dispatch.attempt import Attempt, CallCancelledError, UnconnectedError
from serve_app.dispatch.migrations import Migrations, ReplicaLeavesError, SilentEngineError
from serve_app.errors import (
    AdapterUnsupportedError,
    EngineGoneError,
    NoMemoryError,
    OverloadedError,
    RequestQuarantinedError,
)
from serve_app.metrics.migration import Reason

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
# What keeps another replica from taking a request now, and may pass.
_PASSING = (UnknownAdapterError, RegistryUnavailableError, CacheFullError)


class NotTakenError(EngineDeadError):
    """No other replica took the request over in time."""


@dataclass(slots=True)
class _Move:
    """From the loss of an engine to the first token of the next one."""

    reason: Reason
    deadline_s: float  # for another replica to take it
    pause_s: float = _FIRST_PAUSE_S


class MigrationState:
    def __init__(
        self,
        migrations: Migrations,
        app_name: str,
        model_name: str,
        args: MigrationArgs,
        *,
        has_client: bool = True,
    ) -> None:
        """`has_client`: false for a copy, which no client can lose."""
        self.avoid: frozenset[str] = frozenset()  # engines it left
        self.is_suspect = False
        self._migrations = migrations
        self._app_name = app_name
        self._model_name = model_name
        self._args = args
        self._has_client = has_client
        self.num_deaths = 0
        self._move: _Move | None = None
        self._last_token_s: float | None = None

    @property
    def deadline_s(self) -> float:
        """Of the move under way, on the monotonic clock."""
        assert self._move is not None
        return self._move.deadline_s

    def judge(self, error: BaseException, attempt: Attempt, *, on_probation: bool) -> float:
        """After so many seconds another attempt may be made. Raises what the client is told when
        there is to be none."""
        try:
            pause_s = self._judge(error, attempt, on_probation)
        except Exception as last:
            self.give_up(last)
            raise
        engine_id = self._engine_of(error, attempt)
        if engine_id is not None:
            self.avoid |= {engine_id}
        logger.info("a request of %s leaves engine %s: %s", self._app_name, engine_id, error)
        return pause_s

    def give_up(self, error: Exception) -> None:
        """It ends without its last token, by whomever's fault."""
        metrics, model, move = self._migrations.metrics, self._model_name, self._move
        self._move = None
        if move is not None:
            metrics.moved(model, move.reason, is_ok=False)
        if isinstance(error, AdapterUnsupportedError):
            return  # no engine would have answered it
        if isinstance(error, RequestQuarantinedError):
            metrics.quarantined(model)
        elif self._has_client and (move is not None or isinstance(error, EngineDeadError)):
            metrics.lost(model)

    def progress(self) -> None:
        """Tokens came from the engine where it is now."""
        now_s = time.monotonic()
        if self._move is not None:
            metrics = self._migrations.metrics
            metrics.moved(self._model_name, self._move.reason, is_ok=True)
            if self._last_token_s is not None:
                metrics.gap(self._model_name, now_s - self._last_token_s)
            self._move = None
            self.is_suspect = False
        self._last_token_s = now_s

    def extend(self, seconds: float) -> None:
        """Moves the deadline, for the wait for a suspect's turn is no wait for a replica. The clock
        is not started anew: a request that is refused again and again meets its time limit."""
        assert self._move is not None
        self._move.deadline_s += seconds

    def _judge(self, error: BaseException, attempt: Attempt, on_probation: bool) -> float:
        if self._args.limit == 0 or isinstance(error, NotTakenError):
            raise error
        if isinstance(error, ReplicaLeavesError):
            self._begin("drain")
        elif _is_loss(error) and not self._was_gone(error, attempt):
            self._begin(_reason(error))
            self._suspect(error, attempt, on_probation)
            self._count(error)
        elif isinstance(error, NoMemoryError):
            self._begin("memory")
            self._count(error)
        elif isinstance(error, EngineDeadError):
            if self._move is None:
                self._begin(_reason(error))
            return self._pause(error)
        elif self._move is not None and _passes(error):
            return self._pause(error)
        else:
            raise error
        return 0.0

    def _count(self, error: BaseException) -> None:
        self.num_deaths += 1
        if self.num_deaths > self._args.limit:
            raise error

    def _begin(self, reason: Reason) -> None:
        if self._move is not None:
            self._migrations.metrics.moved(self._model_name, self._move.reason, is_ok=False)
        self._move = _Move(reason, time.monotonic() + self._args.timeout_s)

    def _pause(self, error: BaseException) -> float:
        move = self._move
        assert move is not None
        left_s = move.deadline_s - time.monotonic()
        if left_s < _FIRST_PAUSE_S:
            raise error
        pause_s = min(move.pause_s, left_s / 2) * random.uniform(0.5, 1.0)
        move.pause_s = min(2 * move.pause_s, _LONGEST_PAUSE_S)
        return pause_s

    def _suspect(self, error: BaseException, attempt: Attempt, on_probation: bool) -> None:
        engine_id = self._engine_of(error, attempt)
        if engine_id is not None:
            self._migrations.note_death(self._app_name, engine_id)
        self.is_suspect = not attempt.has_output
        if (
            self.is_suspect
            and on_probation
            and engine_id is not None
            and self._migrations.was_alone(attempt, engine_id)
        ):
            raise RequestQuarantinedError from error

    def _was_gone(self, error: BaseException, attempt: Attempt) -> bool:
        """Serve may send requests to a dead replica for some time: that is no second death."""
        engine_id = self._engine_of(error, attempt)
        return engine_id is not None and self._migrations.was_gone(attempt, engine_id)

    def _engine_of(self, error: BaseException, attempt: Attempt) -> str | None:
        if isinstance(error, EngineGoneError):
            return error.engine_id
        return self._migrations.where(self._app_name, attempt)


def _reason(error: BaseException) -> Reason:
    return "silence" if isinstance(error, SilentEngineError) else "death"


def _is_loss(error: BaseException) -> bool:
    """An engine that had the request, as far as anyone knows, and has it no more."""
    if isinstance(error, EngineGoneError) and error.was_dead:
        return False
    lives = isinstance(error, CallCancelledError | UnconnectedError)
    return isinstance(error, EngineDeadError) and not lives


def _passes(error: BaseException) -> bool:
    return isinstance(error, _PASSING) or type(error) is OverloadedError

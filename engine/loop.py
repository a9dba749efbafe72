"""The thread that owns the engine: steps while there is work, commands between two steps.

All access to the engine passes through one queue. The thread sleeps on a condition when it is idle.
Free of event loops; the commands are opaque.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

from engine.core import Engine
from engine.errors import EngineDeadError
from engine.types import EngineLoad, StepOutput

logger = logging.getLogger(__name__)

# An engine that sleeps while there is work tries a step after this time. A stuck engine changes
# nothing in that step; any other was put to sleep wrongly.
_WATCH_S = 1.0
_FAULT_S = 3.0  # for the loop to end by itself after a fault

T = TypeVar("T")


class EngineLoop:
    def __init__(self, engine: Engine) -> None:
        self._on_step: list[Callable[[StepOutput], None]] = []
        self._on_death: list[Callable[[EngineDeadError], None]] = []
        self._load: EngineLoad = engine.load()  # after the newest step or command
        self._engine = engine
        self._wakeup = threading.Condition()  # guards the next four fields
        self._commands: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._is_stopping = False
        self._fault: EngineDeadError | None = None  # from outside, for the thread to raise
        self._death: EngineDeadError | None = None
        self._awaited: list[tuple[Callable[[], bool], Future[None]]] = []  # this thread's only
        self._step_began_s: float | None = None
        self._is_in_step = False
        self._is_overdue = False  # the next step is the watchdog's
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def subscribe(self, callback: Callable[[StepOutput], None]) -> None:
        """Registers a callback that the engine's thread calls once per step."""
        self._on_step.append(callback)

    def on_death(self, callback: Callable[[EngineDeadError], None]) -> None:
        """Registers a callback that the engine's thread calls once, when its loop ends for any
        reason."""
        self._on_death.append(callback)

    def load(self) -> EngineLoad:
        return self._load

    def stop(self) -> None:
        """Returns when the step in progress has ended. Unfinished requests are lost."""
        with self._wakeup:
            self._is_stopping = True
            self._wakeup.notify()
        if self._thread.is_alive():
            self._thread.join(None if self._death is None else _FAULT_S)
        elif self._death is None:  # never started
            self._die(EngineDeadError("the engine was stopped"))

    def fail(self, fault: EngineDeadError) -> None:
        """Ends the loop with this error before its next step. Any thread may call it. A step that
        waits for a lost device holds back its thread, but not the end of the requests."""
        with self._wakeup:
            self._fault = fault
            self._wakeup.notify()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_FAULT_S)
            if self._thread.is_alive():
                self._die(fault)

    def call(self, command: Callable[[], T]) -> Future[T]:
        """Runs a command between two steps; the future holds its result. Once the loop has ended,
        it holds EngineDeadError."""
        future: Future[T] = Future()
        with self._wakeup:
            if self._death is None:
                self._commands.append((command, future))
                self._wakeup.notify()
                return future
        future.set_exception(self._death)
        return future

    def call_when_true(self, condition: Callable[[], bool]) -> Future[None]:
        """Returns a future that is done when `condition`, evaluated now and after each step, is
        true."""
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()
        asked = self.call(lambda: self._ask(condition, future))
        asked.add_done_callback(lambda done: _pass_error_on(done, future))
        return future

    def last_step_age_s(self) -> float:
        """Returns how long the current step, or the command between two steps, has lasted so far; 0
        when idle, infinite when dead."""
        began_s = self._step_began_s
        if self._death is not None:
            return math.inf
        return 0.0 if began_s is None else time.monotonic() - began_s

    def usual_step_s(self) -> float:
        """Returns the longest recent duration of steps like the current one; infinite if unknown or
        while a command between two steps runs."""
        return self._engine.usual_step_s if self._is_in_step else math.inf

    def _run(self) -> None:
        death = EngineDeadError("the engine was stopped")
        try:
            while self._wait_for_work():
                self._turn()
        except BaseException as error:
            # Not only Exception: waiting callers must get an error whatever ends this thread.
            logger.exception("the engine's loop died")
            death = EngineDeadError(f"the engine died: {type(error).__name__}")
            if isinstance(error, EngineDeadError):
                death = error
        finally:
            self._die(death)

    def _wait_for_work(self) -> bool:
        """Returns after `_WATCH_S` at the latest while there is work, stuck or not."""
        with self._wakeup:
            is_called = self._wakeup.wait_for(
                lambda: (
                    self._is_stopping
                    or self._fault
                    or self._commands
                    or (self._engine.has_work and not self._engine.is_stuck)
                ),
                _WATCH_S if self._engine.has_work else None,
            )
            self._is_overdue = not is_called
            if self._fault is not None and not self._is_stopping:
                raise self._fault
            return not self._is_stopping

    def _turn(self) -> None:
        self._step_began_s = time.monotonic()
        self._run_commands()
        if self._engine.has_work:
            self._step_began_s, self._is_in_step = time.monotonic(), True
            step = self._engine.step()
            self._is_in_step = False
            if self._is_overdue and not self._engine.is_stuck:
                step = self._note_missed_wakeup(step)
            self._load = step.load
            _notify(self._on_step, step)
        else:
            self._load = self._engine.load()
        self._ask_awaited()
        self._step_began_s = None

    def _note_missed_wakeup(self, step: StepOutput) -> StepOutput:
        self._engine.num_missed_wakeups += 1
        load = self._engine.load()
        logger.error(
            "the engine slept for %.1f s while requests could run: %d running, %d waiting",
            _WATCH_S,
            load.num_running,
            load.num_waiting,
        )
        return replace(step, load=load)

    def _run_commands(self) -> None:
        with self._wakeup:
            commands = tuple(self._commands)
            self._commands.clear()
        if commands:
            self._is_overdue = False  # the commands may have made requests runnable
        for command, future in commands:
            if future.set_running_or_notify_cancel():
                self._step_began_s = time.monotonic()
                _fulfil(command, future)

    def _ask_awaited(self) -> None:
        waiting, self._awaited = self._awaited, []
        for condition, future in waiting:
            self._ask(condition, future)

    def _ask(self, condition: Callable[[], bool], future: Future[None]) -> None:
        if condition():
            self._load = self._engine.load()
            future.set_result(None)
        else:
            self._awaited.append((condition, future))

    def _die(self, death: EngineDeadError) -> None:
        """Does nothing the second time."""
        with self._wakeup:
            if self._death is not None:
                return
            self._death = death
            commands = tuple(self._commands)
            self._commands.clear()
        for _, future in commands:
            if future.set_running_or_notify_cancel():
                future.set_exception(death)
        for _, future in self._awaited:
            future.set_exception(death)
        self._awaited.clear()
        _notify(self._on_death, death)


def _notify(callbacks: list[Callable[[T], None]], value: T) -> None:
    for callback in tuple(callbacks):
        try:
            callback(value)
        except Exception:  # a subscriber's fault must not end the engine
            logger.exception("a subscriber of the engine failed")


def _fulfil(command: Callable[[], T], future: Future[T]) -> None:
    try:
        future.set_result(command())
    except Exception as error:  # goes to the waiting caller
        future.set_exception(error)


def _pass_error_on(source: Future[None], target: Future[None]) -> None:
    error = source.exception()
    if error is not None:
        target.set_exception(error)

"""The processes of a fleet, simulated in this process, and calls of an actor as Ray makes them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass
from typing import Any

from ray.exceptions import ActorDiedError, RayTaskError

from serve_app.routing.state import RoutingStates
from tests.virtual_loop import VirtualLoop

_CALL_S = (0.0002, 0.004)  # in each direction between a replica and its actor

PROCESS: ContextVar[Process] = ContextVar("process")


class Process:
    """Code that runs in its contexts finds the state of this process and no other."""

    def __init__(self, loop: VirtualLoop, name: str) -> None:
        self.name = name
        self.states = RoutingStates()
        self._loop = loop
        self._context = copy_context()
        self._context.run(PROCESS.set, self)

    def context(self) -> Context:
        return self._context.copy()

    def run(self, function: Callable[..., Any], *args: object) -> Any:
        return self.context().run(function, *args)

    def task(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return self._loop.create_task(work, context=self.context())


class Actor:
    """Acts as Ray's handle: `name.remote(...)` calls `target.name`. A call has latency both ways,
    an exception comes wrapped, and a cancellation of the caller does not reach the call."""

    def __init__(self, loop: VirtualLoop, process: Process, targets: dict[str, Any]) -> None:
        self.is_dead = False
        self._loop = loop
        self._process = process
        self._targets = targets
        self._calls: dict[asyncio.Task[Any], asyncio.Future[Any]] = {}
        self._frozen: list[tuple[asyncio.Future[Any], str, tuple[object, ...]]] | None = None

    def __getattr__(self, name: str) -> _Method:
        if name.startswith("_"):
            raise AttributeError(name)
        return _Method(self, name)

    def freeze(self) -> None:
        self._frozen = []

    def thaw(self) -> None:
        frozen, self._frozen = self._frozen or [], None
        for call in frozen:
            self._begin(*call)

    def kill(self) -> None:
        self.is_dead = True
        self.thaw()
        calls, self._calls = self._calls, {}
        for task, answer in calls.items():
            task.cancel()
            self._later(answer, error=ActorDiedError())

    def _call(self, name: str, args: tuple[object, ...]) -> asyncio.Future[Any]:
        answer: asyncio.Future[Any] = self._loop.create_future()
        answer.add_done_callback(was_read)
        self._loop.call_later(self._loop.random.uniform(*_CALL_S), self._begin, answer, name, args)
        return answer

    def _begin(self, answer: asyncio.Future[Any], name: str, args: tuple[object, ...]) -> None:
        if self.is_dead:
            self._later(answer, error=ActorDiedError())
        elif self._frozen is not None:
            self._frozen.append((answer, name, args))
        else:
            task = self._process.task(self._targets[name](*args))
            self._calls[task] = answer
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        answer = self._calls.pop(task, None)
        if answer is None:  # its process died
            if not task.cancelled():
                task.exception()
        elif (error := task.exception()) is None:
            self._later(answer, task.result())
        else:
            assert isinstance(error, Exception)
            self._later(answer, error=RayTaskError("call", "", error).as_instanceof_cause())

    def _later(
        self, answer: asyncio.Future[Any], result: object = None, error: Exception | None = None
    ) -> None:
        def end() -> None:
            if not answer.done() and error is not None:
                answer.set_exception(error)
            elif not answer.done():
                answer.set_result(result)

        self._loop.call_later(self._loop.random.uniform(*_CALL_S), end)


@dataclass(frozen=True, slots=True)
class _Method:
    actor: Actor
    name: str

    def remote(self, *args: object) -> asyncio.Future[Any]:
        return self.actor._call(self.name, args)


def was_read(future: asyncio.Future[Any]) -> None:
    """Reads the exception of a task whose caller may be gone, so that asyncio does not log it."""
    if not future.cancelled():
        future.exception()

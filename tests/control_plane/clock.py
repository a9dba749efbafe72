"""An event loop whose time passes only when no task is ready, so that an hour lasts seconds and a
seed determines the run.

Threads are replaced: work that a coroutine hands to a thread runs at once, in the loop's thread,
and its result comes after `late_s`.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

# The name of the process of a task: all tasks of a process die together.
OWNER: ContextVar[str] = ContextVar("owner", default="")


class StuckError(AssertionError):
    """Raised when every task waits for another task and none for a time."""


class _Skipping(selectors.DefaultSelector):  # type: ignore[misc,valid-type]
    """Skips the time that the loop would wait for."""

    skip: Callable[[float | None], None]

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready and (timeout is None or timeout > 0):
            self.skip(timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        selector = _Skipping()
        selector.skip = self._skip
        self.now_s = 1000.0
        self.wall_s = 1.8e9  # the machine's clock at `now_s` 0
        self.late_s = 0.0  # delay of a thread's result
        self.errors: list[str] = []  # of tasks that were never awaited
        super().__init__(selector)
        self.set_exception_handler(self._note)
        self.set_task_factory(_with_owner)

    def time(self) -> float:
        return self.now_s

    def wall_time(self) -> float:
        return self.wall_s + self.now_s

    def run_in_executor(  # type: ignore[override]
        self, executor: object, function: Callable[..., Any], *arguments: Any
    ) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = self.create_future()
        error, result = None, None
        try:
            result = function(*arguments)
        except Exception as raised:
            error = raised
        late_s, self.late_s = self.late_s, 0.0
        self.call_later(late_s, _settle, future, error, result)
        return future

    def kill(self, owner: str) -> None:
        for task in asyncio.all_tasks(self):
            if getattr(task, "owner", "") == owner:
                task.cancel()

    def _skip(self, timeout: float | None) -> None:
        if timeout is None:
            raise StuckError("every task waits for another one")
        self.now_s += timeout

    def _note(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.errors.append(f"{context.get('message')}: {type(error).__name__}: {error}")


def _with_owner(
    loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any
) -> asyncio.Task[Any]:
    task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=loop, **options)
    task.owner = OWNER.get()  # type: ignore[attr-defined]
    return task


def _settle(future: asyncio.Future[Any], error: Exception | None, result: object) -> None:
    if future.done():  # cancelled
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


@contextmanager
def owned_by(owner: str) -> Iterator[None]:
    token = OWNER.set(owner)
    try:
        yield
    finally:
        OWNER.reset(token)

"""The background tasks of this process: each is held until it ends, and each failure is seen.

`keep` is for loops that last as long as their process: a failed loop begins again, after a pause
that grows. `spawn` is for work without an awaiter. Both log and count failures, by names that are
few and fixed. `share` is for work whose awaiter gets the failure. Tasks are created in this module
alone; see tests/test_architecture.py.
"""

from __future__ import annotations

import asyncio
import logging
import time
from asyncio import Task
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from contextvars import Context
from typing import Any, TypeVar

from serve_app.metrics.exposition import as_text, counter

logger = logging.getLogger(__name__)

T = TypeVar("T")

_FIRST_PAUSE_S = 0.5
_MAX_PAUSE_S = 10.0
_SETTLED_S = 60.0  # a loop that ran this long begins again after the first pause

_held: set[Task[Any]] = set()  # the event loop itself refers to its tasks weakly
_num_failures: Counter[str] = Counter()  # by task name; 0 from a name's first task on


def share(work: Coroutine[Any, Any, T], name: str, context: Context | None = None) -> Task[T]:
    """Starts a task whose awaiter handles its failure."""
    task = asyncio.get_running_loop().create_task(work, name=name, context=context)
    _held.add(task)
    task.add_done_callback(_held.discard)
    return task


def spawn(work: Coroutine[Any, Any, T], name: str, context: Context | None = None) -> Task[T]:
    """Starts a task without an awaiter: its failure is logged and counted."""
    _num_failures[name] += 0
    task = share(work, name, context)
    task.add_done_callback(_look_at_end)
    return task


def keep(work: Callable[[], Coroutine[Any, Any, None]], name: str) -> Task[None]:
    """Runs `work`, again after each failure, until it returns or the task is cancelled. Only for
    work that can start over at any time."""
    return spawn(_keep(work, name), name)


def keep_polling(poll: Callable[[], None], every_s: float, name: str) -> Task[None]:
    """Calls `poll` every `every_s` seconds. A failure is logged, and the next poll tries again."""

    async def run() -> None:
        while True:
            await asyncio.sleep(every_s)
            try:
                poll()
            except Exception:
                logger.exception("a poll of %s failed", name)

    return keep(run, name)


def check_running(*tasks: Task[Any] | None) -> None:
    """Raises RuntimeError when one of these tasks has ended, for health checks. None: not begun."""
    for task in tasks:
        if task is not None and task.done():
            raise RuntimeError(f"the task {task.get_name()!r} ended")


def has_failed(task: Task[Any]) -> bool:
    """Returns True if the task has ended by an exception or was cancelled."""
    return task.done() and (task.cancelled() or task.exception() is not None)


def failures_text(labels: Mapping[str, str]) -> bytes:
    """Returns the counts of this process in Prometheus' text format."""
    return as_text(counter("loraplex_task_failures", _num_failures, labels, "task"))


async def _keep(work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
    pause_s = _FIRST_PAUSE_S
    while True:
        began_s = time.monotonic()
        try:
            await work()
            return
        except (Exception, asyncio.CancelledError):
            this = asyncio.current_task()
            if this is None or this.cancelling():
                raise
            # A cancelled awaitable counts as a failure, such as a Ray call whose far end is gone.
            _num_failures[name] += 1
            logger.exception("the task %s failed, it begins again", name)
        if time.monotonic() - began_s > _SETTLED_S:
            pause_s = _FIRST_PAUSE_S
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _MAX_PAUSE_S)


def _look_at_end(task: Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _num_failures[task.get_name()] += 1
        logger.error("the task %s ended by an exception", task.get_name(), exc_info=error)

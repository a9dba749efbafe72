"""The background tasks of this process: each is held, and none ends by an exception unseen.

`keep` is for loops that last as long as their process: one that fails begins again, after a pause
that grows. `spawn` is for work that nobody awaits. Both log and count failures, by names that are
few and fixed. `share` is for work that somebody awaits, who gets its failure. Tasks are made here
and nowhere else; see tests/test_architecture.py.
"""

from __future__ import annotations

import asyncio
import logging
import time
from asyncio import Task
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextvars import Context
from typing import Any, TypeVar

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from serve_app.metrics.exposition import rendered

logger = logging.getLogger(__name__)

T = TypeVar("T")

_FIRST_PAUSE_S = 0.5
_MAX_PAUSE_S = 10.0
_SETTLED_S = 60.0  # a loop that ran so long begins again after the first pause

_held: set[Task[Any]] = set()  # the event loop itself refers to its tasks weakly
_num_failures: Counter[str] = Counter()  # by task; each that was ever begun here is in it


def share(work: Coroutine[Any, Any, T], name: str, context: Context | None = None) -> Task[T]:
    """Somebody awaits the task: its failure is the awaiter's."""
    task = asyncio.get_running_loop().create_task(work, name=name, context=context)
    _held.add(task)
    task.add_done_callback(_held.discard)
    return task


def spawn(work: Coroutine[Any, Any, T], name: str, context: Context | None = None) -> Task[T]:
    """Nobody awaits the task: its failure is logged and counted."""
    _num_failures[name] += 0
    task = share(work, name, context)
    task.add_done_callback(_look_at_end)
    return task


def keep(work: Callable[[], Coroutine[Any, Any, None]], name: str) -> Task[None]:
    """Runs `work`, again after each failure, until it returns or the task is cancelled. Only for
    work that may begin anew at any time."""
    return spawn(_keep(work, name), name)


def check_running(*tasks: Task[Any] | None) -> None:
    """For health checks: raises RuntimeError when one of these tasks has ended. None: not begun."""
    for task in tasks:
        if task is not None and task.done():
            raise RuntimeError(f"the task {task.get_name()!r} ended")


def failures_text(labels: Mapping[str, str]) -> bytes:
    """The counts of this process in Prometheus' text format."""
    return rendered(_Failures(labels))


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
            # Or what it awaited was cancelled, such as a call of Ray's whose far end is gone.
            _note_failure(name)
        if time.monotonic() - began_s > _SETTLED_S:
            pause_s = _FIRST_PAUSE_S
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _MAX_PAUSE_S)


def _note_failure(name: str) -> None:
    _num_failures[name] += 1
    logger.exception("the task %s failed, it begins again", name)


def _look_at_end(task: Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _num_failures[task.get_name()] += 1
        logger.error("the task %s ended by an exception", task.get_name(), exc_info=error)


class _Failures(Collector):
    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "loraplex_task_failures",
            "Background tasks that failed, by name",
            labels=[*self._labels, "task"],
        )
        for name, count in sorted(_num_failures.items()):
            family.add_metric([*self._labels.values(), name], count)
        yield family

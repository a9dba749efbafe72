"""A time limit for whole answers of an MLflow server. MLflow's own ends a silent connection, but a
server that sends a byte now and then never reaches it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import requests

T = TypeVar("T")

_MAX_LATE = 16  # calls that are given up and still wait, each with a thread and a connection


class AnswerLimit:
    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._late: set[Future[Any]] = set()

    def call(self, function: Callable[[], T]) -> T:
        """Calls the function in a thread of its own. After the limit raises requests.ReadTimeout:
        the call goes on there, and its result is dropped. While too many such calls go on, raises
        it at once."""
        self._late = {one for one in self._late if not one.done()}
        if len(self._late) >= _MAX_LATE:
            raise requests.ReadTimeout(f"{_MAX_LATE} earlier answers are not complete yet")
        answer: Future[T] = Future()
        threading.Thread(
            target=_run, args=(function, answer), name="registry-call", daemon=True
        ).start()
        if not wait((answer,), self._limit_s).done:
            self._late = {*self._late, answer}
            raise requests.ReadTimeout(f"the answer was not complete after {self._limit_s:g} s")
        return answer.result()


def _run(function: Callable[[], T], answer: Future[T]) -> None:
    try:
        answer.set_result(function())
    except BaseException as error:  # is raised by the caller
        # Raised there, it would have the caller's handled error as its context.
        error.__cause__ = error.__cause__ or error.__context__
        answer.set_exception(error)

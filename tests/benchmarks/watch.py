"""Looks again and again at a server while a benchmark does something with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread


@contextmanager
def repeating(look: Callable[[], None], every_s: float) -> Iterator[None]:
    """Looks in a thread, first after `every_s`; a look that has begun is awaited."""
    over = Event()

    def run() -> None:
        while not over.wait(every_s):
            look()

    thread = Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()

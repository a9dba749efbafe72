"""The queue of suspects: requests that may have killed their engine go to the next engine in turn,
so that another death shows which of them is guilty and no innocent request is convicted with it.

A request is a suspect if its engine died before it sent a token for it. The next suspect's turn
begins when the suspect before it got a token, failed or left. The turn of a suspect that saw two or
more deaths is exclusive: other requests that want an engine meanwhile wait, for a bounded time.
There is a queue for each base in each ingress replica. Ignorant of engines and tokens.
"""

from __future__ import annotations

import asyncio
from collections import deque


class SuspectQueue:
    def __init__(self) -> None:
        self._waiting: deque[SuspectTurn] = deque()
        self._current: SuspectTurn | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def exclusive(self) -> SuspectTurn | None:
        """The turn whose end all other requests have to await, or None."""
        turn = self._current
        return turn if turn is not None and turn.is_exclusive else None

    def join(self, *, is_exclusive: bool) -> SuspectTurn:
        turn = SuspectTurn(self, is_exclusive)
        self._waiting.append(turn)
        self._advance()
        return turn

    def _end(self, turn: SuspectTurn) -> None:
        if turn is self._current:
            self._current = None
        elif turn in self._waiting:
            self._waiting.remove(turn)
        if not turn.is_over.done():
            turn.is_over.set_result(None)
        self._advance()

    def _advance(self) -> None:
        if self._current is None and self._waiting:
            self._current = self._waiting.popleft()
            self._current.has_begun.set_result(None)


class SuspectTurn:
    """The turn of a suspect: `has_begun` is done when it may go, `is_over` when the next may."""

    def __init__(self, queue: SuspectQueue, is_exclusive: bool) -> None:
        loop = asyncio.get_running_loop()
        self.has_begun: asyncio.Future[None] = loop.create_future()
        self.is_over: asyncio.Future[None] = loop.create_future()
        self.is_exclusive = is_exclusive
        self._queue = queue

    def end(self) -> None:
        """Lets the next suspect go. May be called again."""
        self._queue._end(self)

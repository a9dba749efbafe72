"""Requests that may have killed their engine go to the next one by one, so that when that dies too
it is known whose doing it was, and no innocent one is judged with the guilty.

A request is a suspect when its engine died before giving it a token since it was placed there. The
next suspect's turn begins when the one before got a token, failed or left. A turn of one that saw
more than one death is exclusive: who wants to go to an engine meanwhile is held, for a bounded
time. Of one base and one ingress replica; ignorant of engines and tokens.
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
        """The turn for whose end all others have to wait."""
        turn = self._current
        return turn if turn is not None and turn.is_exclusive else None

    def join(self, *, is_exclusive: bool) -> SuspectTurn:
        turn = SuspectTurn(self, is_exclusive)
        self._waiting.append(turn)
        self._advance()
        return turn

    def _leave(self, turn: SuspectTurn) -> None:
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
    """`has_begun` is done when this suspect may go, `is_over` when the next one may."""

    def __init__(self, probation: SuspectQueue, is_exclusive: bool) -> None:
        loop = asyncio.get_running_loop()
        self.has_begun: asyncio.Future[None] = loop.create_future()
        self.is_over: asyncio.Future[None] = loop.create_future()
        self.is_exclusive = is_exclusive
        self._probation = probation

    def leave(self) -> None:
        """A second time does nothing."""
        self._probation._leave(self)

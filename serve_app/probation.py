"""Requests that may have killed their engine go to the next one by one, so that when that dies too
it is known whose doing it was, and no innocent one is judged with the guilty.

A request is a suspect when its engine died before giving it a token since it was placed there. The
next suspect's turn begins when the one before got a token, failed or left, or has been at an engine
for MAX_TURN_S. Of one base and one ingress replica; ignorant of engines and tokens.
"""

from __future__ import annotations

import asyncio
from collections import deque

MAX_TURN_S = 10.0


class Probation:
    def __init__(self) -> None:
        self._waiting: deque[Turn] = deque()
        self._current: Turn | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def join(self) -> Turn:
        turn = Turn(self)
        self._waiting.append(turn)
        self._advance()
        return turn

    def _leave(self, turn: Turn) -> None:
        if turn is self._current:
            self._current = None
        elif turn in self._waiting:
            self._waiting.remove(turn)
        self._advance()

    def _advance(self) -> None:
        if self._current is None and self._waiting:
            self._current = self._waiting.popleft()
            self._current.begun.set_result(None)


class Turn:
    """`begun` is done when this suspect may go."""

    def __init__(self, probation: Probation) -> None:
        self.begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._probation = probation

    def leave(self) -> None:
        """A second time does nothing."""
        self._probation._leave(self)

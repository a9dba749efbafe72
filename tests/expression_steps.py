"""The steps of a backtracking search, as `re` takes them: a measure of work that is no time.

Follows the parsed expression (`re._parser`): literals, classes, groups, alternatives and greedy
repeats.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from re import _compiler, _parser  # type: ignore[attr-defined]
from typing import Any

_SINGLE = {"LITERAL", "NOT_LITERAL", "IN", "ANY"}


class _Search:
    """Counts each character that is compared and each place that is tried."""

    def __init__(self, pattern: re.Pattern[str], text: str) -> None:
        self._text = text
        self._parsed = _parser.parse(pattern.pattern, pattern.flags)
        self._singles: dict[int, re.Pattern[str]] = {}
        self.num_steps = 0

    def run(self) -> int:
        """Returns the number of matches that `finditer` finds."""
        found = start = 0
        while start <= len(self._text):
            self.num_steps += 1
            end = next(self._ends(tuple(self._parsed), start), None)
            found += end is not None
            start = start + 1 if end is None else max(end, start + 1)
        return found

    def _ends(self, items: tuple[Any, ...], at: int) -> Iterator[int]:
        """Yields the ends of all matches of the items at a place, in the order of `re`."""
        if not items:
            yield at
            return
        (op, argument), rest = items[0], items[1:]
        if str(op) in _SINGLE:
            if self._is_one(items[0], at):
                yield from self._ends(rest, at + 1)
        elif str(op) == "MAX_REPEAT":
            least, most, repeated = argument
            for middle in self._repeats(tuple(repeated), at, least, int(most)):
                yield from self._ends(rest, middle)
        elif str(op) == "SUBPATTERN":
            for middle in self._ends(tuple(argument[3]), at):
                yield from self._ends(rest, middle)
        elif str(op) == "BRANCH":
            for branch in argument[1]:
                for middle in self._ends(tuple(branch), at):
                    yield from self._ends(rest, middle)
        else:
            raise NotImplementedError(str(op))

    def _repeats(self, items: tuple[Any, ...], at: int, least: int, most: int) -> Iterator[int]:
        if len(items) == 1 and str(items[0][0]) in _SINGLE:
            end = at
            while end - at < most and self._is_one(items[0], end):
                end += 1
            yield from range(end, at + least - 1, -1)
            return
        if most:
            for middle in self._ends(items, at):
                if middle > at:
                    yield from self._repeats(items, middle, max(0, least - 1), most - 1)
        if least == 0:
            yield at

    def _is_one(self, item: Any, at: int) -> bool:
        self.num_steps += 1
        if id(item) not in self._singles:
            one = _parser.SubPattern(self._parsed.state, [item])
            self._singles[id(item)] = _compiler.compile(one, self._parsed.state.flags)
        return self._singles[id(item)].match(self._text, at) is not None


def steps(pattern: re.Pattern[str], text: str) -> int:
    """Returns the steps of a search for all matches. Asserts that it finds as many as `re`."""
    search = _Search(pattern, text)
    assert search.run() == sum(1 for _ in pattern.finditer(text)), pattern.pattern
    return search.num_steps

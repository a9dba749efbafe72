"""The nodes of a regular expression and where each may end, for a set of places to begin.

Places in a name are the bits of an integer, bit i before character i. A node never looks at a
place twice for one question, so that the work grows with the name and not with the number of ways
to match it. Knows no syntax.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from lora.errors import AdapterError

_MAX_WORK = 2_000_000  # nodes visited for one adapter: about a second
_PLAIN = re.compile(r"[A-Za-z0-9_.]+", re.ASCII)


class Work:
    """Counted in nodes; shared by all that one adapter brings."""

    def __init__(self) -> None:
        self._left = _MAX_WORK

    def spend(self, amount: int) -> None:
        self._left -= amount
        if self._left < 0:
            raise AdapterError(
                "adapter_config.json: its regular expressions take too long to match"
            )


class Name:
    """A module's name with what nodes ask of it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.last = 1 << len(text)  # the place behind it
        self._atoms: dict[str, int] = {}

    @property
    def after_dots(self) -> int:
        """The place before the name, and each behind a dot."""
        return 1 | self._places(r"\.") << 1

    @property
    def word_edges(self) -> int:
        words = self._places(r"\w")
        return (words ^ (words << 1)) & (2 * self.last - 1)

    @property
    def everywhere(self) -> int:
        return 2 * self.last - 1

    def of_atom(self, atom: str) -> int:
        """Before which characters it matches. Compiling a single atom is safe, and so is its use
        on one character."""
        if atom not in self._atoms:
            self._atoms[atom] = self._places(atom)
        return self._atoms[atom]

    def _places(self, atom: str) -> int:
        matches = re.compile(atom).fullmatch
        return sum(1 << i for i, character in enumerate(self.text) if matches(character))


class Node(Protocol):
    def ends(self, name: Name, starts: int, work: Work) -> int: ...


@dataclass(frozen=True, slots=True)
class Literal:
    text: str

    def ends(self, name: Name, starts: int, work: Work) -> int:
        found = 0
        for place in _bits(starts):
            work.spend(1)
            if name.text.startswith(self.text, place):
                found |= 1 << (place + len(self.text))
        return found


@dataclass(frozen=True, slots=True)
class Atom:
    """One character: a dot, a class, an escape."""

    text: str

    def ends(self, name: Name, starts: int, work: Work) -> int:
        work.spend(1)
        return (starts & name.of_atom(self.text)) << 1


@dataclass(frozen=True, slots=True)
class Anchor:
    text: str

    def ends(self, name: Name, starts: int, work: Work) -> int:
        work.spend(1)
        if self.text in ("^", r"\A"):
            return starts & 1
        if self.text in ("$", r"\Z"):
            return starts & name.last
        edges = name.word_edges
        return starts & (edges if self.text == r"\b" else name.everywhere & ~edges)


@dataclass(frozen=True, slots=True)
class Sequence:
    nodes: tuple[Node, ...]

    def ends(self, name: Name, starts: int, work: Work) -> int:
        for node in self.nodes:
            if not starts:
                break
            starts = node.ends(name, starts, work)
        return starts


@dataclass(frozen=True, slots=True)
class Either:
    nodes: tuple[Node, ...]

    def ends(self, name: Name, starts: int, work: Work) -> int:
        found = 0
        for node in self.nodes:
            work.spend(1)
            found |= node.ends(name, starts, work)
        return found


@dataclass(frozen=True, slots=True)
class Repeat:
    node: Node
    least: int
    most: int | None

    def ends(self, name: Name, starts: int, work: Work) -> int:
        """Places only move on or stay: after as many rounds as the name is long nothing changes."""
        here = starts
        for _ in range(self.least):
            work.spend(1)
            before, here = here, self.node.ends(name, here, work)
            if here in (0, before):
                break
        found = fresh = here
        count = self.least
        while fresh and (self.most is None or count < self.most):
            work.spend(1)
            fresh = self.node.ends(name, fresh, work) & ~found
            found |= fresh
            count += 1
        return found


@dataclass(frozen=True, slots=True)
class Lookahead:
    node: Node
    is_negative: bool

    def ends(self, name: Name, starts: int, work: Work) -> int:
        found = 0
        for place in _bits(starts):
            work.spend(1)
            if bool(self.node.ends(name, 1 << place, work)) != self.is_negative:
                found |= 1 << place
        return found


def is_plain(text: str) -> bool:
    """Without operators but the dot."""
    return _PLAIN.fullmatch(text) is not None


def _bits(places: int) -> Iterator[int]:
    while places:
        low = places & -places
        yield low.bit_length() - 1
        places ^= low

"""Names of modules as an adapter's configuration writes them: lists, and regular expressions.

An expression may come from anybody, and `re` could try it for ever while it holds the interpreter.
Here a set of positions, the bits of an integer, goes through the expression: each node is asked
where it may end if it begins at any of them. What that costs is counted, in all expressions of one
configuration together. `tests/test_lora_patterns.py` compares it with `re`. Knows no files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from lora.errors import AdapterError
from lora.pattern_nodes import Name, Node, Work, is_plain
from lora.pattern_syntax import PatternSyntaxError, parse_pattern
from lora.untrusted import shown

T = TypeVar("T")
_MAX_PATTERN = 4096  # characters; patterns of hundreds of alternatives are real
_MAX_ALL = 65536  # characters of all patterns of one configuration
_MAX_KEYS = 4096  # of one table; the largest bases have a thousand modules


@dataclass(slots=True)
class Limits:
    """What one configuration may cost."""

    work: Work = field(default_factory=Work)
    num_characters: int = 0


@dataclass(frozen=True, slots=True)
class NameList:
    """PEFT's: the module's whole name, or its end from a dot on."""

    names: frozenset[str]

    def __bool__(self) -> bool:
        return bool(self.names)

    def matches(self, name: str) -> bool:
        parts = name.split(".")
        return any(".".join(parts[i:]) in self.names for i in range(len(parts)))

    def has(self, name: str) -> bool:
        return name in self.names


@dataclass(frozen=True, slots=True)
class Pattern:
    """A regular expression of the adapter's."""

    text: str
    node: Node
    work: Work

    def __bool__(self) -> bool:
        return bool(self.text)

    def matches(self, name: str) -> bool:
        """As `re.fullmatch`."""
        return self._ends(Name(name), 1)

    def matches_end(self, name: Name) -> bool:
        """As PEFT's `re.match(rf"(.*\\.)?({pattern})$", name)`."""
        return self._ends(name, name.after_dots)

    def _ends(self, name: Name, starts: int) -> bool:
        return bool(self.node.ends(name, starts, self.work) & name.last)


class PatternTable(Generic[T]):
    """PEFT's rank_pattern and alpha_pattern: the first key that matches the module's end."""

    def __init__(self, values: Mapping[str, T], field: str, limits: Limits) -> None:
        if len(values) > _MAX_KEYS:
            raise AdapterError(f"{field} has {len(values)} keys, the limit is {_MAX_KEYS}")
        self._work = limits.work
        self._rows = tuple(
            (key, None if is_plain(key) else compile_pattern(key, field, limits), value)
            for key, value in values.items()
        )

    def find(self, module: str, default: T) -> T:
        name = Name(module)
        self._work.spend(len(self._rows))
        for key, pattern, value in self._rows:
            if _is_end(key, module) if pattern is None else pattern.matches_end(name):
                return value
        return default


def compile_pattern(text: str, field: str, limits: Limits) -> Pattern:
    limits.num_characters += len(text)
    if len(text) > _MAX_PATTERN or limits.num_characters > _MAX_ALL:
        raise AdapterError(
            f"{field}: {limits.num_characters} characters of regular expressions are too many"
        )
    try:
        return Pattern(text, parse_pattern(text), limits.work)
    except PatternSyntaxError as error:
        raise AdapterError(
            f"{field}: {shown(text)} is not a regular expression that is served: {error}"
        ) from None


def _is_end(key: str, module: str) -> bool:
    """Of a key without operators but the dot, which stands for any character."""
    start = len(module) - len(key)
    if start < 0 or (start and module[start - 1] != "."):
        return False
    tail = module[start:]
    return tail == key or all(k in (".", c) for k, c in zip(key, tail, strict=True))

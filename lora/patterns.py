"""Module names as an adapter's configuration gives them: lists and regular expressions.

An expression may come from anyone, and `re` could try it for years while it holds the interpreter.
`re` therefore only checks the syntax; the package `regex` matches, releases the interpreter
meanwhile, and stops at a deadline that all expressions of one configuration share. `_check` refuses
syntax that the two read differently, and patterns that compile slowly.
`tests/test_lora_patterns.py` compares the results with `re`. Reads no files.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import regex

from lora.errors import AdapterError
from lora.untrusted import shown

T = TypeVar("T")
_MAX_PATTERN = 4096  # characters; patterns of hundreds of alternatives are real
_MAX_ALL = 65536  # characters of all patterns of one configuration, counted repeats written out
_MAX_KEYS = 4096  # keys per table; the largest bases have a thousand modules
# Processor time to match all patterns of one configuration; real ones need milliseconds. `regex`
# counts that of the whole process, whose other threads may be busy.
_MAX_SECONDS = 10.0
_SECONDS_PER_KEY = 3e-7  # to compare a plain key
_PLAIN = re.compile(r"[A-Za-z0-9_.]+", re.ASCII)
_TOKEN = re.compile(
    r"""\\.                                            # an escape
    | (?P<set>\[\^?\]?(?:[^\]\\]|\\.)*\])
    | (?P<open>\[)                                     # a set without its end
    | \{(?P<low>[0-9]*)(?P<comma>,?)(?P<high>[0-9]*)\} # a counted repeat
    | \(\?(?P<flag>[a-zA-OQ-Z\#-])                     # inline flags and comments, no (?P<name>
    | .                                                # any other character
    """,
    re.ASCII | re.VERBOSE,
)
AT_END = r"(.*\.)?({})"  # PEFT's `re.match(rf"(.*\.)?({text})$", name)`, names being of one line
# `re` warns that these will mean sets of sets; `regex` reads [:alpha:] as a class.
_SET_IN_SET = re.compile(r".+\[|.*(?:--|&&|~~|\|\|)")


@dataclass(slots=True)
class Limits:
    """The budget that all expressions of one configuration share."""

    seconds: float = _MAX_SECONDS
    num_characters: int = 0

    def spend(self, seconds: float) -> None:
        self.seconds -= seconds
        if self.seconds < 0:
            raise AdapterError(
                "adapter_config.json: its regular expressions take too long to match"
            )


@dataclass(frozen=True, slots=True)
class NameList:
    """PEFT's list: each entry is a module's whole name, or its end after a dot."""

    names: frozenset[str]

    def matches(self, name: str) -> bool:
        if not self.names:
            return False
        parts = name.split(".")
        return any(".".join(parts[i:]) in self.names for i in range(len(parts)))


@dataclass(frozen=True, slots=True)
class Pattern:
    compiled: regex.Pattern[str]
    limits: Limits

    def matches(self, name: str) -> bool:
        """Returns the result of `re.fullmatch`; raises AdapterError at the deadline."""
        began = time.process_time()
        try:
            found = self.compiled.fullmatch(name, timeout=max(self.limits.seconds, 1e-6))
            seconds = time.process_time() - began
        except (TimeoutError, MemoryError):
            found, seconds = None, math.inf
        self.limits.spend(seconds)
        return found is not None


class PatternTable(Generic[T]):
    """PEFT's rank_pattern and alpha_pattern: the first key that matches the module's end."""

    def __init__(self, values: Mapping[str, T], field: str, limits: Limits) -> None:
        if len(values) > _MAX_KEYS:
            raise AdapterError(f"{field} has {len(values)} keys, the limit is {_MAX_KEYS}")
        self._limits = limits
        self._rows: list[tuple[str, Pattern | None, T]] = []
        for key, value in values.items():
            is_plain = _PLAIN.fullmatch(key)
            pattern = None if is_plain else compile_pattern(key, field, limits, AT_END)
            self._rows.append((key, pattern, value))

    def find(self, module: str, default: T) -> T:
        self._limits.spend(len(self._rows) * _SECONDS_PER_KEY)
        for key, pattern, value in self._rows:
            if _is_end(key, module) if pattern is None else pattern.matches(module):
                return value
        return default


def compile_pattern(text: str, field: str, limits: Limits, frame: str = "{}") -> Pattern:
    """`frame`: the pattern that is matched, with {} for the text."""
    try:
        if len(text) <= _MAX_PATTERN:
            limits.num_characters += _check(text)
            if limits.num_characters <= _MAX_ALL:
                re.compile(text)
                compiled = regex.compile(frame.replace("{}", text), cache_pattern=False)
                return Pattern(compiled, limits)
    except (re.error, regex.error, ValueError, OverflowError, RecursionError) as error:
        reason = "groups are nested too deep" if isinstance(error, RecursionError) else error
        raise AdapterError(
            f"{field}: {shown(text)} is not a regular expression that is served: {reason}"
        ) from None
    raise AdapterError(
        f"{field}: {len(text)} characters of regular expressions are too many, with those of the "
        f"other fields and with counted repeats written out; the limit is {_MAX_ALL}, "
        f"{_MAX_PATTERN} of one expression"
    )


def _check(text: str) -> int:
    """Returns the number of characters with counted repeats written out, as `regex` compiles them.
    Raises ValueError for syntax that module names do not need."""
    if not text.isascii() or not text.isprintable():
        raise ValueError("it has characters that no name has")
    sizes = [0]  # of each open group
    last = 0  # the size of the item that a quantifier would repeat
    for token in _TOKEN.finditer(text):
        if token["flag"]:
            raise ValueError("flags and comments inside a pattern are not supported")
        if token["set"] and _SET_IN_SET.match(token["set"]):
            raise ValueError("sets in sets are not supported")
        if token["open"]:
            raise ValueError("a [ without its ]")
        if token["low"] or token["high"]:
            count = max(int(token["low"] or 0), int(token["high"] or 0), 1)
            sizes[-1] += last * (count - 1)
            last *= count
        elif token.group().startswith("{"):
            # A literal to `re`, to `regex` perhaps the bounds of a fuzzy match.
            raise ValueError("a { without the count of a repeat")
        elif token.group() == "(":
            sizes.append(1)
        elif token.group() == ")":
            if len(sizes) == 1:
                raise ValueError("a ) without its (")
            last = sizes.pop()
            sizes[-1] += last
        else:
            last = 1
            sizes[-1] += 1
    return sum(sizes)


def _is_end(key: str, module: str) -> bool:
    """Returns True if `module` ends with a key whose only operator is the dot, which stands for any
    character."""
    start = len(module) - len(key)
    if start < 0 or (start and module[start - 1] != "."):
        return False
    tail = module[start:]
    return tail == key or all(k in (".", c) for k, c in zip(key, tail, strict=True))

"""Parts of JSON schemas that the grammar library would not enforce to the letter.

It reads numbers as float64 and brings integers into int64: an identifier of 18 digits in an `enum`
would become another one.

It quotes strings as JSON only after it has matched them. Where a class of characters takes
control characters, whose escapes have a backslash, it takes the quotation mark and the backslash,
too. It also reads nested classes and operations on classes, which ECMA 262 does not have.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from engine.grammar_sources import ends_in_escape
from serve_app.errors import shown

# The library takes February 29 of every year, the year 0, which parsers of dates refuse, and leap
# seconds at all times. The expressions hold beside the format, and need not repeat it.
_LEAP = "(0[48]|[2468][048]|[13579][26])"  # the last or, before 00, the first digits of the year
_DATE = (
    r"^((...[1-9]|..[1-9].|.[1-9]..|[1-9]...)-(0[^2]|1.|..-([013]|2[^9]))"
    rf"|(..{_LEAP}|{_LEAP}00)-)"
)
# A class, or an escaped character outside of one. Possessive: an expression of many open brackets
# would otherwise be scanned to its end at each of them.
_CLASS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*+(\])?", re.DOTALL)
_OPERATION = re.compile(r"\\.|(\[|&&|--|~~|\|\|)", re.DOTALL)
_CONTROL = re.compile(r"\\(?:x[01]|u00[01]|[xu]\{0*1?[0-9a-fA-F]\}|0|c)|[\x00-\x08\x0e-\x1f]")
_CONTROLS = r"\x00-\x1f"
PATTERNS_OF_FORMATS: Mapping[str, str] = {
    "date": _DATE,
    "date-time": f"{_DATE}.*:..:[0-5]",
    "time": "^..:..:[0-5]",
}
_BEYOND = 2**63
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")


class UnsupportedPatternError(ValueError):
    """The library would take strings that the expression forbids."""


def exact_pattern(pattern: str) -> str:
    """Returns the expression with negated classes that leave out control characters if they leave
    out a quotation mark or a backslash. Raises UnsupportedPatternError."""
    if ends_in_escape(pattern):
        raise UnsupportedPatternError(
            f"pattern: a backslash at the end escapes nothing, got {shown(pattern)}."
        )

    def narrow(found: re.Match[str]) -> str:
        text = found[0]
        if text == r"\P":
            raise UnsupportedPatternError(f"pattern: \\P is not supported, got {shown(pattern)}.")
        if found[1] is None:  # a character, or an unclosed class, which the library refuses
            return text
        body = text[2:-1] if text.startswith("[^") else text[1:-1]
        operation = next((one[1] for one in _OPERATION.finditer(body) if one[1]), None)
        if operation is not None:
            raise UnsupportedPatternError(
                f"pattern: {operation} in a class of characters is not supported, write "
                f"{''.join(f'{chr(92)}{one}' for one in operation)}; got {shown(pattern)}."
            )
        if not text.startswith("[^"):
            if _CONTROL.search(body):
                raise UnsupportedPatternError(
                    "pattern: control characters in a class of characters are not supported "
                    f"(\\n, \\r, \\t and \\s are), got {shown(pattern)}."
                )
            return text
        try:
            takes_both = all(re.fullmatch(text, one) for one in ('"', "\\"))
        except re.error:  # Python lacks a class that the library may have
            takes_both = False
        return text if takes_both else f"{text[:-1]}{_CONTROLS}]"

    return _CLASS.sub(narrow, pattern)


def without_controls(left_out: Collection[str]) -> str:
    """Returns the part to add to a negated class of these characters, each as `\\x{22}`."""
    return "" if {r"\x{22}", r"\x{5c}"}.isdisjoint(left_out) else _CONTROLS


def inexact_number(schema: Mapping[str, object]) -> tuple[str, int | float] | None:
    """Returns the first keyword of the schema, apart from inner schemas, whose number the library
    would change so that it takes other answers, and the number."""
    for key in ("const", "enum"):
        for number in _numbers(schema.get(key)):
            if not -_BEYOND < number < _BEYOND or float(number) != number:
                return key, number
    for key in (*_LOWER, *_UPPER):
        bound = schema.get(key)
        if not isinstance(bound, int):
            continue  # a float is read as it is
        within = max(-2 * _BEYOND, min(bound, 2 * _BEYOND))
        read = min(_BEYOND - 1, int(float(within)))
        if read < bound if key in _LOWER else read > bound:
            return key, bound
    return None


def _numbers(value: object) -> Iterator[int | float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value

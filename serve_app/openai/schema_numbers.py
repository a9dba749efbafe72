"""Numbers of JSON schemas that the grammar library would change.

It reads them as float64 and brings integers into int64: an identifier of 18 digits in an `enum`
would become another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

_BEYOND = 2**63
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")


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

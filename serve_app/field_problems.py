"""The problem of a field's value, in the words of a body or a file and not in those of pydantic or
msgspec."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_BY_TYPE = {"missing": "is required", "extra_forbidden": "is not a known field"}
# Applied to pydantic's sentence in this order.
_WORDS = (
    (r"^Value error, |, (unable to|got a number) .*$| after validation, not \d+$", ""),
    (r"^[A-Z]\w* should (be|have|match) ", r"must \1 "),
    (r"\ba valid (dictionary|mapping)\b.*$", "an object"),
    (r"\ba valid (list|tuple|set)\b", "an array"),
    (r"\ba valid (?=integer)", "an "),
    (r"\ba valid boolean\b", "true or false"),
    (r"\ba valid ", "a "),
    (r"^must be greater than or equal to ", "must be at least "),
    (r"^must be less than or equal to ", "must be at most "),
    (r"^must match pattern ", "must match the pattern "),
)
_MISSING = re.compile(r"Object missing required field `(\w+)`")
_WRONG = re.compile(r"Expected `([^`]+)`, got `([^`]+)`")
_PLACE = re.compile(r" - at `\$\.?([^`]*)`$")
_KINDS = {
    "str": "a string",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "object": "an object",
    "array": "an array",
}


def problem_of(error: Mapping[str, Any]) -> str:
    """Returns the end of a sentence that begins with the field. `error`: an entry of the `errors`
    of pydantic's ValidationError."""
    if (known := _BY_TYPE.get(error["type"])) is not None:
        return known
    words = str(error["msg"])
    for pattern, replacement in _WORDS:
        words = re.sub(pattern, replacement, words)
    return words


def decoding_problem(error: Exception) -> str:
    """Returns a sentence about a document that msgspec refuses, with the place of the value."""
    words = str(error)
    found = _PLACE.search(words)
    place = "" if found is None else found[1]
    if (missing := _MISSING.match(words)) is not None:
        return f"{'.'.join(filter(None, (place, missing[1])))}: is required"
    if (wrong := _WRONG.match(words)) is not None:
        expected, got = (
            " or ".join(_KINDS.get(kind, kind) for kind in kinds.split(" | "))
            for kinds in wrong.groups()
        )
        return f"{place or 'the document'}: must be {expected}, got {got}"
    return "it is not valid JSON"

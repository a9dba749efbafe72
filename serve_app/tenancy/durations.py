"""Durations as LiteLLM writes them: `30s`, `15m`, `12h`, `30d`, `2w`, `1mo` of 30 days."""

from __future__ import annotations

import re

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400, "mo": 30 * 86_400}
_DURATION = re.compile(r"([0-9]{1,9})(s|mo|m|h|d|w)")
MAX_S = 100 * 365 * 86_400


def seconds_of(text: str) -> float:
    """Returns a duration in seconds. Raises ValueError with the form that the text must have."""
    found = _DURATION.fullmatch(text)
    if found is None:
        raise ValueError("must be a number with s, m, h, d, w or mo, such as 30d")
    seconds = int(found[1]) * _UNITS_S[found[2]]
    if seconds > MAX_S:
        raise ValueError("must be 100 years at most")
    return float(seconds)

"""The sampling defaults that a base's generation_config.json sets, as vLLM's `--generation-config
auto` reads it: a field that a request leaves out takes the file's value.

A value that no request could have is ignored, with one line in the log: the file comes with the
model, and a base that has served with it goes on.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

from engine.admission import MIN_REPETITION_PENALTY

logger = logging.getLogger(__name__)

FILE = "generation_config.json"


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """None: as the API has it. The names are the file's."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None  # of a chat; a completion has 16, and a request its own


NO_DEFAULTS = GenerationDefaults()

# The bounds of the same fields of a request.
_IS_VALID: Mapping[str, Callable[[float], bool]] = {
    "temperature": lambda value: 0 <= value <= 2,
    "top_p": lambda value: 0 < value <= 1,
    "top_k": lambda value: -1 <= value < 2**31,
    "min_p": lambda value: 0 <= value <= 1,
    "repetition_penalty": lambda value: MIN_REPETITION_PENALTY <= value <= 2,
    "max_new_tokens": lambda value: 1 <= value < 2**31,
}
_INTEGERS = frozenset(("top_k", "max_new_tokens"))


def read_generation_defaults(files: Mapping[str, bytes], name: str) -> GenerationDefaults:
    """`files`: a base's text files; `name`: the base's, for the log."""
    try:
        config = json.loads(files.get(FILE, b"{}"))
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        logger.warning("%s: %s is ignored, it is no JSON object", name, FILE)
        return NO_DEFAULTS
    given = {field.name: config.get(field.name) for field in fields(GenerationDefaults)}
    wrong = {field for field, value in given.items() if not _is_right(field, value)}
    if wrong:
        logger.warning("%s: %s is ignored in %s", name, ", ".join(sorted(wrong)), FILE)
    return GenerationDefaults(**{k: v for k, v in given.items() if k not in wrong})


def _is_right(field: str, value: object) -> bool:
    if value is None:
        return True
    if isinstance(value, bool) or not isinstance(value, int if field in _INTEGERS else int | float):
        return False
    return _IS_VALID[field](value)  # NaN is in no range

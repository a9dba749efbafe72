"""The sampling defaults in a base's generation_config.json, as vLLM's `--generation-config auto`
reads it: the file's value applies where a request leaves a field out.

A value outside a request's bounds is ignored, with one line in the log: the file comes with the
model, and a base that has served with it so far must keep serving.
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
    """The fields of the file, under its names; None stands for the API's default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None  # for chats only; completions default to 16


NO_DEFAULTS = GenerationDefaults()

# The bounds of the same fields in a request.
_BOUNDS: Mapping[str, Callable[[float], bool]] = {
    "temperature": lambda value: 0 <= value <= 2,
    "top_p": lambda value: 0 < value <= 1,
    "top_k": lambda value: -1 <= value < 2**31,
    "min_p": lambda value: 0 <= value <= 1,
    "repetition_penalty": lambda value: MIN_REPETITION_PENALTY <= value <= 2,
    "max_new_tokens": lambda value: 1 <= value < 2**31,
}
_INTEGERS = frozenset(("top_k", "max_new_tokens"))


def read_generation_defaults(files: Mapping[str, bytes], name: str) -> GenerationDefaults:
    """Reads the defaults from a base's text `files`; `name` is the base's name, for the log."""
    try:
        config = json.loads(files.get(FILE, b"{}"))
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        logger.warning("%s: %s is ignored because it is not a JSON object", name, FILE)
        return NO_DEFAULTS
    given = {field.name: config.get(field.name) for field in fields(GenerationDefaults)}
    invalid = {field for field, value in given.items() if not _is_valid(field, value)}
    if invalid:
        logger.warning(
            "%s: invalid values of %s in %s are ignored", name, ", ".join(sorted(invalid)), FILE
        )
    return GenerationDefaults(**{k: v for k, v in given.items() if k not in invalid})


def _is_valid(field: str, value: object) -> bool:
    if value is None:
        return True
    if isinstance(value, bool) or not isinstance(value, int if field in _INTEGERS else int | float):
        return False
    return _BOUNDS[field](value)  # NaN is outside of every range

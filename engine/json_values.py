"""Checked values from a base's JSON files: an invalid value is refused with its key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from engine.errors import UnsupportedModelError

# Added tokens with templates make tokenizer_config.json the largest of them.
_MAX_JSON_BYTES = 16 * 1024 * 1024
MAX_DIMENSION = 2**24


def read_json(path: Path) -> dict[str, object] | None:
    """Returns None if the file does not exist."""
    if not path.is_file():
        return None
    if path.stat().st_size > _MAX_JSON_BYTES:
        raise UnsupportedModelError(f"{path.name} is larger than {_MAX_JSON_BYTES} bytes")
    try:
        values: object = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise UnsupportedModelError(f"{path.name} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise UnsupportedModelError(f"{path.name} is not a JSON object")
    return values


def refuse(key: str, value: object, reason: str) -> NoReturn:
    shown = json.dumps(value, default=str)
    shown = shown if len(shown) <= 200 else shown[:200] + "..."
    raise UnsupportedModelError(f"{key} is {shown}: {reason}")


def positive_int(
    raw: Mapping[str, object],
    key: str,
    default: int | None = None,
    least: int = 1,
    most: int = MAX_DIMENSION,
) -> int:
    value = raw.get(key)
    if value is None:
        value = default
    if type(value) is not int or not least <= value <= most:
        refuse(key, value, f"a whole number from {least} to {most} is needed")
    return value


def positive_number(raw: Mapping[str, object], key: str, default: float | None = None) -> float:
    value = raw.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
        refuse(key, value, "a positive number is needed")
    return float(value)


def optional_number(raw: Mapping[str, object], key: str) -> float | None:
    return None if raw.get(key) is None else positive_number(raw, key)


def flag(raw: Mapping[str, object], key: str, default: bool = False) -> bool:
    value = raw.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        refuse(key, value, "true or false is needed")
    return value

"""The header of a safetensors file, read with limits and checked against the file's size.

A file from anywhere is judged before its data are touched: after this, every tensor's type, shape
and bytes agree with each other and cover the file without holes or overlaps. Knows no adapters.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from lora.errors import AdapterError

_MAX_HEADER_BYTES = 10 * 1024 * 1024
_MAX_TENSORS = 65536
_MAX_DIMENSIONS = 8
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    dtype: str
    shape: tuple[int, ...]
    begin: int  # bytes after the header
    end: int


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Raises AdapterError with the reason; the file's name is all it says of the path."""
    name = path.name
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(8)
            length = int.from_bytes(head, "little")
            text = file.read(min(length, _MAX_HEADER_BYTES)) if len(head) == 8 else b""
    except OSError as error:
        raise AdapterError(f"{name} cannot be read: {error.strerror}") from None
    if (head + text).startswith(b"version "):
        raise AdapterError(f"{name} is a git-lfs pointer, not the file itself")
    if len(head) < 8:
        raise AdapterError(f"{name} has {size} bytes, too few for a safetensors file")
    if length > _MAX_HEADER_BYTES:
        raise AdapterError(
            f"{name}: its header claims {length} bytes, the limit is {_MAX_HEADER_BYTES}"
        )
    if len(text) < length:
        raise AdapterError(f"{name} is truncated: its header needs {length} bytes")
    entries = _parse(text, name)
    _check_layout(entries, size - 8 - length, name)
    return entries


def _parse(text: bytes, name: str) -> dict[str, TensorEntry]:
    try:
        header: object = json.loads(text)
    except (ValueError, RecursionError):
        raise AdapterError(f"{name}: its header is not valid JSON") from None
    if not isinstance(header, dict):
        raise AdapterError(f"{name}: its header is not a JSON object")
    header.pop("__metadata__", None)
    if len(header) > _MAX_TENSORS:
        raise AdapterError(f"{name} holds {len(header)} tensors, the limit is {_MAX_TENSORS}")
    return {key: _entry(key, value) for key, value in header.items()}


def _entry(key: str, value: object) -> TensorEntry:
    fields = value if isinstance(value, dict) else {}
    dtype = fields.get("dtype")
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        known = ", ".join(_ITEM_BYTES)
        raise AdapterError(f"tensor {key} has type {dtype!r}, supported are {known}")
    shape = _sizes(fields.get("shape"))
    if shape is None or len(shape) > _MAX_DIMENSIONS:
        raise AdapterError(f"tensor {key} has no valid shape")
    offsets = _sizes(fields.get("data_offsets"))
    if offsets is None or len(offsets) != 2:
        raise AdapterError(f"tensor {key} has no valid data_offsets")
    begin, end = offsets
    needed = math.prod(shape) * _ITEM_BYTES[dtype]
    if end - begin != needed:
        raise AdapterError(
            f"tensor {key} of shape {list(shape)} and type {dtype} needs {needed} bytes, its "
            f"offsets give {end - begin}"
        )
    return TensorEntry(dtype, shape, begin, end)


def _sizes(value: object) -> tuple[int, ...] | None:
    if isinstance(value, list) and all(type(v) is int and 0 <= v < 2**48 for v in value):
        return tuple(value)
    return None


def _check_layout(entries: dict[str, TensorEntry], data_bytes: int, name: str) -> None:
    position = 0
    for key, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position:
            word = "overlap another tensor's" if entry.begin < position else "leave a hole"
            raise AdapterError(f"{name}: the offsets of tensor {key} {word}")
        position = entry.end
    if position > data_bytes:
        raise AdapterError(
            f"{name} is truncated: its tensors need {position} bytes, it holds {data_bytes}"
        )
    if position < data_bytes:
        raise AdapterError(f"{name} has {data_bytes - position} bytes that belong to no tensor")

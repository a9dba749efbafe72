"""The header of a safetensors file, read with limits and checked against the file's size; and its
tensors.

A file of any origin is checked before its data are touched: afterwards every tensor's type, shape
and bytes agree with each other and cover the file without holes or overlaps. The file stays open,
so that later reads are of the checked file. Free of adapters.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from io import FileIO

import torch

from lora.errors import AdapterError
from lora.untrusted import parse_object, read_up_to, shown, shown_value

# No other thread runs during the parse: 20 to 40 ms for 2 MiB. A base of 126 layers, all of them
# adapted, needs 0.3 MiB.
_MAX_HEADER_BYTES = 2 * 1024 * 1024
_MAX_TENSORS = 16384
_MAX_DIMENSIONS = 8
_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    dtype: str
    shape: tuple[int, ...]
    begin: int  # bytes after the header
    end: int


@dataclass(frozen=True, slots=True)
class TensorFile:
    """An open file and its header. The function that opened the file closes it."""

    name: str
    file: FileIO
    entries: Mapping[str, TensorEntry]
    data_start: int

    def read(self, key: str) -> torch.Tensor:
        """Reads into memory of its own: if a mapped file shrinks later, reading it kills the
        process."""
        entry = self.entries[key]
        data = bytearray(entry.end - entry.begin)
        buffer = memoryview(data)
        self.file.seek(self.data_start + entry.begin)
        while buffer:
            count = self.file.readinto(buffer)
            if not count:
                raise AdapterError(f"{self.name} became shorter while it was read")
            buffer = buffer[count:]
        return torch.frombuffer(data, dtype=_TYPES[entry.dtype]).view(entry.shape)


def read_header(file: FileIO, name: str) -> TensorFile:
    """Reads and checks the header. Raises AdapterError with the reason, in which the file is called
    `name`."""
    size = os.fstat(file.fileno()).st_size
    head = read_up_to(file, 8)
    length = int.from_bytes(head, "little")
    text = read_up_to(file, min(length, _MAX_HEADER_BYTES)) if len(head) == 8 else b""
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
    return TensorFile(name, file, entries, 8 + length)


def _parse(text: bytes, name: str) -> dict[str, TensorEntry]:
    header = parse_object(text, f"{name}: its header")
    notes = header.pop("__metadata__", {})
    if not isinstance(notes, dict) or not all(isinstance(note, str) for note in notes.values()):
        raise AdapterError(f"{name}: the __metadata__ of its header is not an object of texts")
    if len(header) > _MAX_TENSORS:
        raise AdapterError(f"{name} holds {len(header)} tensors, the limit is {_MAX_TENSORS}")
    return {key: _entry(key, value) for key, value in header.items()}


def _entry(key: str, value: object) -> TensorEntry:
    fields = value if isinstance(value, dict) else {}
    dtype = fields.get("dtype")
    if not isinstance(dtype, str) or dtype not in _TYPES:
        known = ", ".join(_TYPES)
        raise AdapterError(
            f"tensor {shown(key)} has type {shown_value(dtype)}, supported are {known}"
        )
    shape = _sizes(fields.get("shape"))
    if shape is None or len(shape) > _MAX_DIMENSIONS:
        raise AdapterError(f"tensor {shown(key)} has no valid shape")
    offsets = _sizes(fields.get("data_offsets"))
    if offsets is None or len(offsets) != 2:
        raise AdapterError(f"tensor {shown(key)} has no valid data_offsets")
    begin, end = offsets
    needed = math.prod(shape) * _TYPES[dtype].itemsize
    if end - begin != needed:
        raise AdapterError(
            f"tensor {shown(key)} of shape {list(shape)} and type {dtype} needs {needed} bytes, "
            f"its offsets give {end - begin}"
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
            raise AdapterError(f"{name}: the offsets of tensor {shown(key)} {word}")
        position = entry.end
    if position > data_bytes:
        raise AdapterError(
            f"{name} is truncated: its tensors need {position} bytes, it holds {data_bytes}"
        )
    if position < data_bytes:
        raise AdapterError(f"{name} has {data_bytes - position} bytes that belong to no tensor")

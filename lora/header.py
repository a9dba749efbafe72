"""The header of a safetensors file, read with limits and checked against the file's size; and its
tensors.

A file of any origin is checked before its data are touched: afterwards every tensor's type, shape
and bytes agree with each other and cover the file without holes or overlaps. The file stays open,
so that later reads are of the checked file. Free of adapters.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from io import FileIO

import torch

from lora.convert import in_turns, spread
from lora.errors import AdapterError
from lora.pinned_memory import map_memory, register
from lora.untrusted import parse_object, read_up_to, shown, shown_value

logger = logging.getLogger(__name__)

# No other thread runs during the parse: 20 to 40 ms for 2 MiB. A base of 126 layers, all of them
# adapted, needs 0.3 MiB.
_MAX_HEADER_BYTES = 2 * 1024 * 1024
_MAX_TENSORS = 16384
_MAX_DIMENSIONS = 8
_CHUNK_BYTES = 4 * 1024 * 1024  # read and checked at a time: it stays in the processor's cache
_MAX_KEPT_BYTES = 512 * 1024 * 1024  # of a buffer between two files
_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
FILE_TYPES = tuple(_TYPES.values())  # of an adapter's tensors


@dataclass(frozen=True, slots=True)
class TensorEntry:
    dtype: str
    shape: tuple[int, ...]
    begin: int  # bytes after the header
    end: int


class ReadBuffer:
    """Memory for the tensors of one file at a time, kept for the next file: to read 84 MB into new
    memory lasts 48 ms, into memory in use 7 ms. One thread uses it at a time."""

    def __init__(self, num_bytes: int = 0, *, is_pinned: bool = False) -> None:
        """`num_bytes`: the expected need of the first files. `is_pinned`: the memory is
        page-locked, so that a CUDA device reads it."""
        self.is_pinned = is_pinned
        self._memory = self._make(min(num_bytes, _MAX_KEPT_BYTES))

    def take(self, num_bytes: int) -> torch.Tensor:
        """Returns [num_bytes] uint8 of any content, at the start of a page, which the next call
        returns again. Memory beyond 512 MB is not kept, and never page-locked. A failure to lock
        clears `is_pinned`."""
        if num_bytes <= self._memory.numel():
            return self._memory[:num_bytes]
        if num_bytes > _MAX_KEPT_BYTES:
            return map_memory(num_bytes)
        self._memory = self._make(num_bytes)
        return self._memory

    def keeps(self, num_bytes: int) -> bool:
        """Returns True if `take` returns memory that stays in this buffer."""
        return num_bytes <= self._memory.numel()

    def _make(self, num_bytes: int) -> torch.Tensor:
        memory = map_memory(num_bytes).zero_()
        if self.is_pinned and num_bytes:
            try:
                register(memory)
            except RuntimeError as error:  # a limit of the system
                self.is_pinned = False
                logger.warning("adapters are read without page-locked memory: %s", error)
        return memory


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Adjacent bytes of the file, and their place in the buffer."""

    begin: int  # bytes after the header
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class BufferLayout:
    """The places of a file's tensors in a buffer."""

    starts: Mapping[str, int]  # bytes, in the order of the file
    chunks: tuple[_Chunk, ...]  # to read at a time
    num_bytes: int
    dtype: torch.dtype | None  # of all tensors; None: there are several, or none


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
        data = torch.empty(entry.end - entry.begin, dtype=torch.uint8)
        self._read_into(data, entry.begin)
        return data.view(_TYPES[entry.dtype]).view(entry.shape)

    def read_all(
        self, keys: Iterable[str], buffer: ReadBuffer
    ) -> tuple[dict[str, torch.Tensor], float]:
        """Reads tensors into the buffer, which holds them until its next use.

        Also returns a bound of the magnitude of all their numbers: infinite if one of them is not
        finite, or if they have several types, and each tensor has to be looked at.
        """
        layout = self.lay_out(keys)
        data = buffer.take(layout.num_bytes)
        bounds = spread(lambda chunk: self._read_chunk(chunk, data, layout.dtype), layout.chunks)
        typed = {
            name: data[: layout.num_bytes // dtype.itemsize * dtype.itemsize].view(dtype)
            for name, dtype in _TYPES.items()
        }
        tensors = {
            key: _view(typed, self.entries[key], start)
            for key, start in in_turns(layout.starts.items())
        }
        return tensors, max(bounds, default=0.0)

    def lay_out(self, keys: Iterable[str]) -> BufferLayout:
        """Returns the places at which `read_all` puts tensors."""
        ordered = sorted(keys, key=lambda key: self.entries[key].begin)
        starts: dict[str, int] = {}
        runs: list[_Chunk] = []
        end = 0
        for key in ordered:
            entry = self.entries[key]
            itemsize = _TYPES[entry.dtype].itemsize
            start = -(-end // itemsize) * itemsize
            starts[key], size = start, entry.end - entry.begin
            last = runs[-1] if runs else None
            if last and (last.begin + last.size, last.start + last.size) == (entry.begin, start):
                runs[-1] = _Chunk(last.begin, last.start, last.size + size)
            else:
                runs.append(_Chunk(entry.begin, start, size))
            end = start + size
        types = {self.entries[key].dtype for key in ordered}
        dtype = _TYPES[types.pop()] if len(types) == 1 else None
        return BufferLayout(starts, tuple(_split(runs)), end, dtype)

    def fill(self, data: torch.Tensor, layout: BufferLayout) -> None:
        """Reads all chunks into data [bytes] uint8, without a look at the numbers."""
        spread(
            lambda chunk: self._read_into(
                data[chunk.start : chunk.start + chunk.size], chunk.begin
            ),
            layout.chunks,
        )

    def _read_chunk(self, chunk: _Chunk, data: torch.Tensor, dtype: torch.dtype | None) -> float:
        """Returns the largest magnitude; infinite if a number is not finite or `dtype` is None."""
        part = data[chunk.start : chunk.start + chunk.size]
        self._read_into(part, chunk.begin)
        if dtype is None or not chunk.size:
            return math.inf if dtype is None else 0.0
        low, high = part.view(dtype).aminmax()  # 5 ms for 42 M numbers; NaN is in both
        largest = max(-float(low), float(high))
        return largest if math.isfinite(float(low)) and math.isfinite(largest) else math.inf

    def _read_into(self, target: torch.Tensor, begin: int) -> None:
        """Fills target [bytes] uint8. Any thread may call it: the file's position stays."""
        buffer, position = target.numpy().data, self.data_start + begin
        while buffer:
            count = os.preadv(self.file.fileno(), [buffer], position)
            if not count:
                raise AdapterError(f"{self.name} became shorter while it was read")
            buffer, position = buffer[count:], position + count


def _view(typed: Mapping[str, torch.Tensor], entry: TensorEntry, start: int) -> torch.Tensor:
    """Returns the tensor at a place of the buffer, of which `typed` has a view in each type."""
    whole = typed[entry.dtype]
    strides = [math.prod(entry.shape[axis + 1 :]) for axis in range(len(entry.shape))]
    place = whole.storage_offset() + start // whole.itemsize
    return whole.as_strided(entry.shape, strides, place)


def read_header(file: FileIO, name: str) -> TensorFile:
    """Reads and checks the header. Raises AdapterError with the reason, in which the file is called
    `name`."""
    text, size = read_header_text(file, name)
    entries = _parse(text, name)
    _check_layout(entries, size - 8 - len(text), name)
    return TensorFile(name, file, entries, 8 + len(text))


def read_header_text(file: FileIO, name: str) -> tuple[bytes, int]:
    """Returns the header unparsed, and the size of the whole file in bytes. Raises AdapterError if
    the header is not complete."""
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
    return text, size


def _split(runs: Iterable[_Chunk]) -> list[_Chunk]:
    return [
        _Chunk(run.begin + done, run.start + done, min(_CHUNK_BYTES, run.size - done))
        for run in runs
        for done in range(0, max(run.size, 1), _CHUNK_BYTES)
    ]


def _parse(text: bytes, name: str) -> dict[str, TensorEntry]:
    header = parse_object(text, f"{name}: its header")
    notes = header.pop("__metadata__", {})
    if not isinstance(notes, dict) or not all(isinstance(note, str) for note in notes.values()):
        raise AdapterError(f"{name}: the __metadata__ of its header is not an object of texts")
    if len(header) > _MAX_TENSORS:
        raise AdapterError(f"{name} holds {len(header)} tensors, the limit is {_MAX_TENSORS}")
    return {key: _entry(key, value, name) for key, value in in_turns(header.items())}


def _entry(key: str, value: object, name: str) -> TensorEntry:
    where = f"{name}: tensor {shown(key)}"
    fields = value if isinstance(value, dict) else {}
    dtype = fields.get("dtype")
    if not isinstance(dtype, str) or dtype not in _TYPES:
        known = ", ".join(_TYPES)
        raise AdapterError(f"{where} has type {shown_value(dtype)}, supported are {known}")
    shape = _sizes(fields.get("shape"))
    if shape is None or len(shape) > _MAX_DIMENSIONS:
        raise AdapterError(f"{where} has no valid shape")
    offsets = _sizes(fields.get("data_offsets"))
    if offsets is None or len(offsets) != 2:
        raise AdapterError(f"{where} has no valid data_offsets")
    begin, end = offsets
    needed = math.prod(shape) * _TYPES[dtype].itemsize
    if end - begin != needed:
        raise AdapterError(
            f"{where} of shape {list(shape)} and type {dtype} needs {needed} bytes, "
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

"""The header of a GGUF file, walked before gguf's reader opens it.

The reader trusts every count: an array of 2^40 bytes in a file of 100 makes it append empty views
until memory is full, and a file that was cut off ends in an error of NumPy. Here each count and
length is compared with the bytes that are left. Form: ggml's docs/gguf.md, versions 2 and 3.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from engine.errors import UnsupportedModelError

_MAX_ITEMS = 2**16  # keys, or tensors; the largest models have some 2,000
_MAX_ELEMENTS = 2**22  # of all arrays; Gemma 3's tokens, scores, types and merges are 1.3 million
_MAX_DIMS = 4
_MAX_NAME = 2**16  # bytes
_SIZES = {
    GGUFValueType.UINT8: 1,
    GGUFValueType.INT8: 1,
    GGUFValueType.BOOL: 1,
    GGUFValueType.UINT16: 2,
    GGUFValueType.INT16: 2,
    GGUFValueType.UINT32: 4,
    GGUFValueType.INT32: 4,
    GGUFValueType.FLOAT32: 4,
    GGUFValueType.UINT64: 8,
    GGUFValueType.INT64: 8,
    GGUFValueType.FLOAT64: 8,
}
_ALIGNMENT = "general.alignment"


def check_header(path: Path) -> None:
    """Raises UnsupportedModelError, with the key or the tensor, for a file that is no GGUF, that is
    cut off, or whose counts are absurd, and OSError for one that cannot be opened."""
    with path.open("rb") as file:
        if not path.stat().st_size:  # which cannot be mapped
            raise UnsupportedModelError("the file is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            _Walk(data).check()


class _Walk:
    """A position in the file that only moves forward, and the name of the item that is read."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0
        self._what = "its beginning"
        self._num_elements = 0
        self._alignment = 32

    def check(self) -> None:
        if self._data[:4] != b"GGUF":
            raise UnsupportedModelError("the file does not begin with GGUF")
        self._at = 4
        version = self._number("I")
        if version not in (2, 3):
            raise UnsupportedModelError(f"the version of GGUF is {version}, 2 and 3 are read")
        num_tensors = self._count("tensors", _MAX_ITEMS)
        num_keys = self._count("keys", _MAX_ITEMS)
        self._check_keys(num_keys)
        ends = self._tensor_ends(num_tensors)
        begin = -(-self._at // self._alignment) * self._alignment
        for name, end in ends.items():
            if begin + end > len(self._data):
                raise UnsupportedModelError(
                    f"tensor {name} ends at byte {begin + end}, the file has {len(self._data)}: "
                    "it is cut off"
                )

    def _check_keys(self, num_keys: int) -> None:
        seen: set[str] = set()
        for _ in range(num_keys):
            self._what = f"the key after {len(seen)} others"
            key = self._name()
            if key in seen:
                raise UnsupportedModelError(f"the key {key} is in the file twice")
            seen.add(key)
            self._what = key
            kind = self._number("I")
            if key == _ALIGNMENT and kind == GGUFValueType.UINT32:
                (self._alignment,) = struct.unpack_from("<I", self._data, self._skip(4))
                if self._alignment < 1 or self._alignment & (self._alignment - 1):
                    raise UnsupportedModelError(
                        f"{_ALIGNMENT} is {self._alignment}: a power of two is needed"
                    )
            else:
                self._skip_value(kind)

    def _skip_value(self, kind: int) -> None:
        if kind != GGUFValueType.ARRAY:
            self._skip_items(kind, 1)
            return
        kind = self._number("I")
        count = self._count(f"elements of {self._what}", _MAX_ELEMENTS)
        self._num_elements += count
        if self._num_elements > _MAX_ELEMENTS:
            raise UnsupportedModelError(
                f"the arrays up to {self._what} have {self._num_elements} elements, at most "
                f"{_MAX_ELEMENTS} are read"
            )
        self._skip_items(kind, count)

    def _skip_items(self, kind: int, count: int) -> None:
        if kind == GGUFValueType.STRING:
            for _ in range(count):
                self._skip(self._number("Q"))
        elif kind in _SIZES:
            self._skip(_SIZES[GGUFValueType(kind)] * count)
        else:
            raise UnsupportedModelError(f"{self._what} has type {kind}, which is not read")

    def _tensor_ends(self, num_tensors: int) -> dict[str, int]:
        """Returns the end of each tensor, in bytes from the beginning of all."""
        ends: dict[str, int] = {}
        for _ in range(num_tensors):
            self._what = f"the tensor after {len(ends)} others"
            name = self._name()
            if name in ends:
                raise UnsupportedModelError(f"tensor {name} is in the file twice")
            self._what = f"tensor {name}"
            num_dims = self._number("I")
            if not 1 <= num_dims <= _MAX_DIMS:
                raise UnsupportedModelError(f"tensor {name} has {num_dims} dimensions")
            elements = math.prod(self._number("Q") for _ in range(num_dims))
            kind = self._number("I")
            try:
                block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
            except (ValueError, KeyError):
                raise UnsupportedModelError(
                    f"tensor {name} has type {kind}, which is unknown"
                ) from None
            ends[name] = self._number("Q") + elements * size // block
        return ends

    def _count(self, of_what: str, most: int) -> int:
        count = self._number("Q")
        if count > most:
            raise UnsupportedModelError(
                f"the number of {of_what} is {count}, at most {most} are read"
            )
        return count

    def _number(self, form: str) -> int:
        value: int
        (value,) = struct.unpack_from(f"<{form}", self._data, self._skip(struct.calcsize(form)))
        return value

    def _name(self) -> str:
        size = self._number("Q")
        begin = self._skip(size)
        if size > _MAX_NAME:
            raise UnsupportedModelError(f"{self._what} has a name of {size} bytes")
        try:
            return self._data[begin : begin + size].decode("utf-8")
        except UnicodeDecodeError as error:
            raise UnsupportedModelError(f"{self._what} has no name: {error}") from None

    def _skip(self, size: int) -> int:
        """Returns the position before the bytes that are skipped."""
        begin = self._at
        if size > len(self._data) - begin:
            raise UnsupportedModelError(
                f"{self._what} at byte {begin} takes {size} more, the file has {len(self._data)}: "
                "it is cut off"
            )
        self._at += size
        return begin

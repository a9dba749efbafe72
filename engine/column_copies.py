"""Copies of columns of page-locked host memory to the same columns of device memory.

Torch copies whole rows: columns it would first gather on the host, which waits for them. A copy of
CUDA's driver takes the distance between rows, and returns at once.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import NamedTuple

import torch

_UNIFIED = 4  # CU_MEMORYTYPE_UNIFIED: the address says which memory it is in


class Columns(NamedTuple):
    pitch: int  # bytes from a row to the next
    start: int
    width: int


class _Memcpy2D(ctypes.Structure):
    """CUDA_MEMCPY2D_v2 of cuda.h."""

    _fields_ = (
        ("src_x", ctypes.c_size_t),
        ("src_y", ctypes.c_size_t),
        ("src_type", ctypes.c_int),
        ("src_host", ctypes.c_void_p),
        ("src_device", ctypes.c_uint64),
        ("src_array", ctypes.c_void_p),
        ("src_pitch", ctypes.c_size_t),
        ("dst_x", ctypes.c_size_t),
        ("dst_y", ctypes.c_size_t),
        ("dst_type", ctypes.c_int),
        ("dst_host", ctypes.c_void_p),
        ("dst_device", ctypes.c_uint64),
        ("dst_array", ctypes.c_void_p),
        ("dst_pitch", ctypes.c_size_t),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


def copy_columns(source: torch.Tensor, to: torch.Tensor, columns: Columns, stream: int) -> None:
    """Begins the copy on a stream of CUDA, by its handle. `source` and `to`: contiguous uint8
    tensors of equal size, one page-locked and one on the current device, both seen as rows of
    `columns.pitch` bytes. Raises RuntimeError if the driver refuses it."""
    copy = _Memcpy2D(
        src_x=columns.start,
        src_type=_UNIFIED,
        src_device=source.data_ptr(),
        src_pitch=columns.pitch,
        dst_x=columns.start,
        dst_type=_UNIFIED,
        dst_device=to.data_ptr(),
        dst_pitch=columns.pitch,
        width=columns.width,
        height=source.numel() // columns.pitch,
    )
    result = _driver().cuMemcpy2DAsync_v2(ctypes.byref(copy), ctypes.c_void_p(stream))
    if result:
        raise RuntimeError(f"cuMemcpy2DAsync failed with CUresult {result}: {columns}")


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")

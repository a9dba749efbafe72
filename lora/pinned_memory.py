"""Page-locked host memory in reusable buffers: a CUDA device copies from it without the host.

Ordinary memory, touched and then registered: 5 ms for 84 MB, and a step launched meanwhile waits 4
ms; allocated page-locked: 48 ms, and the step waits 30. So buffers are kept: the host tier fills up
sooner or later, and from then on each adapter takes the place of another. Until then spare buffers
are made ahead of the adapters.
"""

from __future__ import annotations

import logging
import mmap
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial

import torch

logger = logging.getLogger(__name__)

_PAGE_BYTES = 4096
_HUGE_PAGE_BYTES = 2 * 1024 * 1024
_MAX_WASTE = 1.25  # how much larger a reused buffer may be than the request
_NUM_SPARES = 2  # adapters that are read at a time


class PinnedMemory:
    """A cache of page-locked buffers. Any thread may call it."""

    def __init__(self, bytes_to_keep: int, spare_bytes: int = 0) -> None:
        """Unused buffers return to the system once the total exceeds `bytes_to_keep` and two
        buffers of `spare_bytes`, which are made here and, once taken, again in the background."""
        self._spare_bytes = spare_bytes
        self._bytes_to_keep = bytes_to_keep + _NUM_SPARES * spare_bytes
        self._lock = threading.RLock()  # a tensor may die while this thread holds it
        # By address, longest unused first. A tensor may die, and its buffer come back, in the
        # middle of any line here: hence code reads a copy, and a popped buffer may be gone.
        self._unused: dict[int, torch.Tensor] = {}
        self.num_bytes = 0  # locked, in use or not
        self._is_making = False  # spare buffers
        weakref.finalize(self, _unlock_all, self._unused.values()).atexit = False
        self._make_spares()

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Returns [num_bytes] uint8 of any content. The memory can be used again when the tensor
        itself (slices of it do not count) is gone."""
        with self._lock:
            buffer = self._find(num_bytes)
            if buffer is None:
                self._trim(self._bytes_to_keep - num_bytes)
                self.num_bytes += _locked_bytes(num_bytes)
            must_make = not self._is_making and self._lacks_spare()
            self._is_making |= must_make
        if must_make:
            threading.Thread(target=self._make_spares, name="spare-buffers", daemon=True).start()
        if buffer is None:
            buffer = self._make(num_bytes)
        tensor = buffer[:num_bytes]
        weakref.finalize(tensor, self._take_back, buffer).atexit = False
        return tensor

    def _make(self, num_bytes: int) -> torch.Tensor:
        """Makes a buffer that is counted already."""
        try:
            return _lock_pages(num_bytes)
        except BaseException:
            with self._lock:
                self.num_bytes -= _locked_bytes(num_bytes)
            raise

    def _lacks_spare(self) -> bool:
        """Returns whether a spare buffer is missing for which there is room."""
        size = _locked_bytes(self._spare_bytes)
        if not size or self.num_bytes + size > self._bytes_to_keep:
            return False
        unused = [buffer.numel() for buffer in self._unused.copy().values()]
        return sum(size <= found <= size * _MAX_WASTE for found in unused) < _NUM_SPARES

    def _make_spares(self) -> None:
        try:
            while True:
                with self._lock:
                    if not self._lacks_spare():
                        return
                    self.num_bytes += _locked_bytes(self._spare_bytes)
                self._take_back(self._make(self._spare_bytes))
        except (RuntimeError, OSError, MemoryError) as error:
            logger.warning("no spare buffer of page-locked memory: %s", error)
        finally:
            self._is_making = False

    def _find(self, num_bytes: int) -> torch.Tensor | None:
        while True:
            sizes = [(buffer.numel(), address) for address, buffer in self._unused.copy().items()]
            fitting = [one for one in sizes if num_bytes <= one[0] <= num_bytes * _MAX_WASTE]
            if not fitting:
                return None
            best = self._unused.pop(min(fitting)[1], None)
            if best is not None:  # otherwise it went back to the system meanwhile
                return best

    def _take_back(self, buffer: torch.Tensor) -> None:
        with self._lock:
            self._unused[buffer.data_ptr()] = buffer
            self._trim(self._bytes_to_keep)

    def _trim(self, limit: int) -> None:
        while self.num_bytes > limit:
            oldest = next(iter(self._unused.copy()), None)
            if oldest is None:
                return
            buffer = self._unused.pop(oldest, None)
            if buffer is not None:
                size = buffer.numel()
                self.num_bytes -= size
                _unlock_all([buffer])


def map_memory(num_bytes: int) -> torch.Tensor:
    """Returns [num_bytes] uint8 zeros at the start of a page, in huge pages where the system has
    them: touching and locking memory costs as much per page, whatever its size."""
    align = _HUGE_PAGE_BYTES if num_bytes >= _HUGE_PAGE_BYTES else _PAGE_BYTES
    size = -(-num_bytes // align) * align + align
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if align == _HUGE_PAGE_BYTES:
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % align
    return whole[start : start + num_bytes]


def _locked_bytes(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES


def register(memory: torch.Tensor) -> None:
    """Locks the pages of a contiguous uint8 tensor that begins at a page, e.g. of memory that
    processes share, until the tensor (slices of it do not count) is gone: no copy from it may be
    under way then."""
    whole = memory.as_strided((_locked_bytes(memory.numel()),), (1,))
    _register(whole)
    weakref.finalize(memory, _unlock_all, [whole]).atexit = False


def _lock_pages(num_bytes: int) -> torch.Tensor:
    buffer = map_memory(_locked_bytes(num_bytes)).zero_()
    _register(buffer)
    return buffer


def _register(buffer: torch.Tensor) -> None:
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(cudart.cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0))


def _unlock_all(buffers: Iterable[torch.Tensor]) -> None:
    for buffer in buffers:
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(cudart.cudaHostUnregister(buffer.data_ptr()))


def allocator(limit: int, spare_bytes: int, device: torch.device) -> Callable[[int], torch.Tensor]:
    """Returns the function that allocates host memory for copies to the device, [bytes] uint8 of
    any content. A CUDA device copies from page-locked memory on its own; a CPU needs none of
    that."""
    if device.type == "cuda":
        return PinnedMemory(limit, spare_bytes).allocate
    return partial(torch.empty, dtype=torch.uint8)

"""Launches of small Triton kernels without Triton's own inspection of every argument.

`kernel[grid](...)` determines on each call for which types, alignments and constants it was
compiled: about ten microseconds of Python, longer than most of these kernels run. Here a kernel has
pointers and constants only, so types and constants are the whole key, and the compiled kernel is
launched at once. Pointers that are not aligned to 16 bytes use Triton's own path. Also the two
halves of programmatic dependent launch. Free of ops.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.backend import IS_INTERPRETED

if not IS_INTERPRETED:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

Grid = tuple[int, int, int]
OVERLAPS = not IS_INTERPRETED  # programmatic dependent launch: the interpreter has none


@triton.jit
def start_dependents(OVERLAPPED: tl.constexpr):
    """Lets the next kernel of the stream start: it waits by itself for this kernel's writes."""
    if OVERLAPPED:
        gdc_launch_dependents()


@triton.jit
def wait_for_inputs(OVERLAPPED: tl.constexpr):
    """Waits until the outputs of earlier kernels are visible. Before it, only memory that no kernel
    of a step writes may be read.

    Every program calls it; otherwise the next kernel but one could start before the last but one
    ends.
    """
    if OVERLAPPED:
        gdc_wait()


@triton.jit
def start_overlapped(OVERLAPPED: tl.constexpr):
    start_dependents(OVERLAPPED)
    wait_for_inputs(OVERLAPPED)


class Launcher:
    """One kernel: its arguments are tensors, then metadata tensors (whose parameters must be in
    `do_not_specialize_on_alignment`), then constants, in the order of its parameters."""

    __slots__ = ("_compiled", "_kernel", "_options")

    def __init__(self, kernel: Any, **options: object) -> None:
        self._kernel = kernel
        self._options = {} if IS_INTERPRETED else options
        self._compiled: dict[tuple[object, ...], Any] = {}

    def __call__(
        self,
        grid: Grid,
        tensors: tuple[torch.Tensor, ...],
        metadata: tuple[torch.Tensor, ...],
        constants: tuple[object, ...],
        num_warps: int,
    ) -> None:
        if 0 in grid:
            return
        pointers = [tensor.data_ptr() for tensor in tensors]
        low_bits = 0
        for pointer in pointers:
            low_bits |= pointer
        types = [tensor.dtype for tensor in tensors]
        if metadata:
            pointers += [tensor.data_ptr() for tensor in metadata]
            types += [tensor.dtype for tensor in metadata]
        key = (tensors[0].get_device(), num_warps, constants, *types)
        compiled = None if low_bits & 15 else self._compiled.get(key)
        if compiled is not None:
            compiled[grid](*pointers, *constants)
            return
        compiled = self._kernel[grid](
            *tensors, *metadata, *constants, num_warps=num_warps, **self._options
        )
        if not (low_bits & 15 or IS_INTERPRETED):
            self._compiled[key] = compiled

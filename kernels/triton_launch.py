"""Launches of Triton kernels without Triton's own inspection of every argument.

`kernel[grid](...)` determines on each call for which types, alignments and constants it was
compiled: ten microseconds of Python, longer than most small kernels run, and a hundred with
descriptors. The kernel of a `Launcher` has pointers and constants only, so types and constants are
the whole key, and the compiled kernel is launched at once. Pointers that are not aligned to 16
bytes use `launch`, which takes any arguments and finds their kernel by a longer key. Also the two
halves of programmatic dependent launch. Free of ops.

Every kernel is launched here, by a `Launcher` or by `launch`, so that `recorded_calls` sees which
binaries a step needs: a launch on the meta device is recorded and executes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.backend import IS_INTERPRETED
from kernels.kernel_call import KernelCall, binary_key, constants_of, describe_call

if not IS_INTERPRETED:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

Grid = tuple[int, int, int]
OVERLAPS = not IS_INTERPRETED  # programmatic dependent launch: the interpreter has none
# The values of a kernel's OVERLAPPED: 0 without overlap, 1 with it, and 2 for a kernel that also
# runs beside the one launched before it, its sibling. Both read the outputs of the same earlier
# kernels and write different memory. The sibling starts its dependents after it has waited, so
# that the second need not wait; the second waits for it at the end, so that a kernel that waits
# for the second finds the memory of both. All that the two write is allocated before the sibling
# is launched: the allocator lends memory in the order of launches.
BESIDE_SIBLING = 2 if OVERLAPS else 0
_BESIDE = tl.constexpr(2)

_records: list[set[KernelCall]] = []  # of the calls of `recorded_calls` in progress
_compiled: dict[tuple[object, ...], Any] = {}  # of `launch`


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
    if OVERLAPPED == _BESIDE:
        # The sibling has waited, which empties the first-level cache of a multiprocessor. This
        # kernel may run on another one.
        tl.inline_asm_elementwise(
            "fence.acq_rel.gpu; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
    elif OVERLAPPED:
        gdc_wait()


@triton.jit
def wait_for_sibling(OVERLAPPED: tl.constexpr):
    """Waits until the sibling has ended, at the end of a kernel that may have one."""
    if OVERLAPPED == _BESIDE:
        gdc_wait()


@triton.jit
def start_overlapped(OVERLAPPED: tl.constexpr):
    start_dependents(OVERLAPPED)
    wait_for_inputs(OVERLAPPED)


def fix_cache_key(kernel: Any) -> None:
    """Computes the hash by which Triton names the kernel's cache entries, inner functions first.

    Left to itself, Triton hashes a function before those that it calls. The constants that they
    read are then part of its hash only if another kernel had called them earlier in the process:
    the hash depends on the order of the launches, and a process does not find what another one has
    compiled (Triton 3.6 and 3.7).
    """
    if IS_INTERPRETED or kernel.hash is not None:
        return
    for name in kernel.fn.__code__.co_names:
        inner = kernel.fn.__globals__.get(name)
        if isinstance(inner, triton.runtime.jit.JITCallable):
            fix_cache_key(inner)
    assert kernel.cache_key


@contextmanager
def recorded_calls() -> Iterator[set[KernelCall]]:
    """Yields the set to which launches are added: all on the meta device and in the interpreter,
    on a device the launches that go through Triton's own inspection, the first of each kind
    among them."""
    calls: set[KernelCall] = set()
    _records.append(calls)
    try:
        yield calls
    finally:
        _records.remove(calls)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: object, **options: object) -> Any:
    """Launches a kernel, by Triton's own path if calls are recorded or the binary is not known yet;
    returns the compiled kernel. The first argument is a tensor. The constants follow by name, in
    the order of the parameters, before the compiler's options. On the meta device nothing is
    launched."""
    first = arguments[0]
    assert isinstance(first, torch.Tensor)
    key = None
    if not (_records or first.is_meta or IS_INTERPRETED):
        options_key = tuple(options.items())
        key = (id(kernel), first.get_device(), options_key, binary_key(kernel, arguments))
        compiled = _compiled.get(key)
        if compiled is not None:
            function = kernel.fn
            names = constants_of(function.__module__, function.__name__, len(arguments))
            compiled[(*grid, 1, 1)[:3]](*arguments, *(options[name] for name in names))
            return compiled
    if _records:
        call = describe_call(kernel, arguments, options)
        for calls in _records:
            calls.add(call)
    if first.is_meta:
        return None
    fix_cache_key(kernel)
    compiled = kernel[grid](*arguments, **options)
    if key is not None:
        _compiled[key] = compiled
    return compiled


class Launcher:
    """One kernel: its arguments are tensors, then metadata tensors (whose parameters must be in
    `do_not_specialize_on_alignment`), then constants, in the order of its parameters."""

    __slots__ = ("_compiled", "_described", "_kernel", "_options")

    def __init__(self, kernel: Any, **options: object) -> None:
        self._kernel = kernel
        self._options = {} if IS_INTERPRETED else options
        self._compiled: dict[tuple[object, ...], Any] = {}
        self._described: dict[tuple[object, ...], KernelCall] = {}  # on the meta device

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
        if tensors[0].is_meta:
            self._describe(key, (*tensors, *metadata, *constants), num_warps)
            return
        compiled = launch(
            self._kernel,
            grid,
            *tensors,
            *metadata,
            *constants,
            num_warps=num_warps,
            **self._options,
        )
        if compiled is not None and not (low_bits & 15 or IS_INTERPRETED):
            self._compiled[key] = compiled

    def _describe(
        self, key: tuple[object, ...], arguments: tuple[object, ...], num_warps: int
    ) -> None:
        """Records the call. Tensors on the meta device have no address, so the key is all."""
        call = self._described.get(key)
        if call is None:
            options = {"num_warps": num_warps, **self._options}
            call = self._described[key] = describe_call(self._kernel, arguments, options)
        for calls in _records:
            calls.add(call)

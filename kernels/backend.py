"""The implementation of an op for a tensor: Triton on CUDA or in its interpreter, otherwise torch.

Triton is optional (the extra `gpu`): on a machine without it every op is its torch reference. Ops
of tensors on the meta device choose as on the device that `traced_for` names; their launches are
recorded, not executed. Free of ops.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None
IS_INTERPRETED = False
if HAS_TRITON:
    import triton

    # TRITON_INTERPRET=1, as triton read it: its kernels are built for one or the other.
    IS_INTERPRETED = bool(triton.knobs.runtime.interpret)

Capability = tuple[int, int]  # of a CUDA device: (9, 0) is Hopper

_allows_triton = True
_traced: Capability | None = None


def allow_triton(allowed: bool) -> None:
    """Sets the choice for the process, which runs one engine. False: `backend: reference`."""
    global _allows_triton
    _allows_triton = allowed


@contextmanager
def reference_only() -> Iterator[None]:
    """Runs every op as its torch reference for a while, whatever was allowed before."""
    before = _allows_triton
    allow_triton(False)
    try:
        yield
    finally:
        allow_triton(before)


@contextmanager
def traced_for(capability: Capability) -> Iterator[None]:
    """Lets ops of meta tensors choose their kernels as on a device of this capability, whatever
    was allowed before."""
    global _traced
    before = _traced, _allows_triton
    _traced = capability
    allow_triton(True)
    try:
        yield
    finally:
        _traced = before[0]
        allow_triton(before[1])


def uses_triton(tensor: torch.Tensor) -> bool:
    if not (HAS_TRITON and _allows_triton):
        return False
    return tensor.is_cuda or IS_INTERPRETED or (_traced is not None and tensor.is_meta)


def is_hopper(tensor: torch.Tensor) -> bool:
    """Returns True if the kernels for compute capability 9.x can run where the tensor is."""
    if tensor.is_cuda:
        return torch.cuda.get_device_capability(tensor.device)[0] == 9
    return _traced is not None and _traced[0] == 9 and tensor.is_meta and not IS_INTERPRETED


@functools.cache
def num_sms(device: torch.device) -> int:
    """Returns the number of multiprocessors; 1 for the meta device, where no grid is used."""
    if device.type == "meta":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)

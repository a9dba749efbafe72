"""The implementation of an op for a tensor: Triton on CUDA or in its interpreter, otherwise torch.

Triton is optional (the extra `gpu`): on a machine without it every op is its torch reference. Free
of ops.
"""

from __future__ import annotations

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

_allows_triton = True


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


def uses_triton(tensor: torch.Tensor) -> bool:
    return HAS_TRITON and _allows_triton and (tensor.is_cuda or IS_INTERPRETED)

"""Faults of a device, which end its engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine.errors import EngineDeadError


@contextmanager
def device_faults() -> Iterator[None]:
    """Turns a fault of the device into EngineDeadError. It is permanent: every later call fails as
    well, and torch, cuBLAS or Triton, whichever meets it first, raises its own error. Out of memory
    is no such fault."""
    try:
        yield
    except RuntimeError as error:
        if _is_device_lost():
            raise EngineDeadError(f"the device failed: {str(error)[:200]}") from error
        raise


def _is_device_lost() -> bool:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False

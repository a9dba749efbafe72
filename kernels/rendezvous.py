"""The start of exchanges: ranks that name the same file find each other."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from kernels.collective import TIMEOUT_S, Collective, Gloo
from kernels.cuda_collective import open_exchange

_CPU = torch.device("cpu")
_C10D: Any = distributed  # torch's stubs lack the members used here


def meet(
    path: Path,
    rank: int,
    size: int,
    device: torch.device = _CPU,
    max_bytes: int = 0,
    row_bytes: int = 0,
    timeout_s: float = TIMEOUT_S,
) -> Collective:
    """Joins the ranks that name the same file, which none of them has made before. `max_bytes`: of
    a tensor that CUDA devices exchange through memory that they share; `row_bytes`: of the rows
    that kernels exchange by themselves."""
    store = _C10D.FileStore(str(path), size)
    store.set_timeout(timedelta(seconds=timeout_s))
    if device.type == "cuda":
        return open_exchange(store, rank, size, device, max_bytes, row_bytes, timeout_s)
    return Gloo(store, rank, size, timeout_s)

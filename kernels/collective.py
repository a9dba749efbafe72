"""The exchanges of the ranks that compute one model together: a sum, columns side by side, and the
first rank's numbers.

Every rank gets the same bits. Backends: `SOLO`, one rank, whose callers exchange nothing; gloo,
over the CPU, the reference, which adds the parts in the order of the ranks, so that a row's bits do
not depend on the rows beside it; `kernels.cuda_collective`, between CUDA devices. Every rank makes
the same calls in the same order; on a CPU a call that cannot end raises RuntimeError. Uses tensors
only.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import distributed

from kernels.lora_plan import MAX_RANK_PAGES, PAGE_ROWS

# A rank that waits longer for another gives up. Steps that hang end sooner: their watchers see it.
TIMEOUT_S = 60.0
_C10D: Any = distributed  # torch's stubs lack the following names

MAX_BRIDGE_ROWS = 64  # of steps whose kernels exchange bridges of adapters
MAX_BRIDGE_PAGES = MAX_RANK_PAGES
_BRIDGE_BYTES = 4 * MAX_BRIDGE_ROWS * MAX_BRIDGE_PAGES * PAGE_ROWS
# The bits of a number that no rank has sent yet, as an integer: all are set, in every type.
MISSING = -1


@dataclass(frozen=True, slots=True)
class RowMemory:
    """Memory of all ranks through which kernels exchange rows by themselves. Each rank's begins
    with [size, max_rows, H], the parts of all ranks; then come bridges, [size, MAX_BRIDGE_PAGES,
    MAX_BRIDGE_ROWS, PAGE_ROWS] float32. Between two exchanges every number is `MISSING`. The
    addresses are multiples of 16 bytes."""

    ranks: torch.Tensor  # [size + 1] int64 on the device: addresses, then this rank's number
    max_rows: int

    @classmethod
    def num_bytes(cls, size: int, row_bytes: int) -> int:
        """Returns the bytes of each rank."""
        return size * (max_shared_rows(size) * row_bytes + _BRIDGE_BYTES)

    @property
    def sizes(self) -> tuple[int, int]:
        """The number of ranks, and `max_rows`."""
        return len(self.ranks) - 1, self.max_rows

    def bridge_start(self, row_bytes: int) -> int:
        """Returns the bytes of all parts, behind which the bridges begin."""
        size, rows = self.sizes
        return size * rows * row_bytes


class Collective(Protocol):
    rank: int
    size: int  # number of ranks; 1: no call is made

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the sum of all ranks' x [T, H], valid until the next sum; x may be overwritten.
        Of two ranks it is rounded once. Where `row_memory` returns memory for some x, a call with
        no rows waits for the other ranks, too."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Returns all ranks' x [T, C] side by side, [T, size * C]."""
        ...

    def row_memory(self, x: torch.Tensor, kind: int) -> RowMemory | None:
        """Returns the memory for the rows of x [T, H], one of two; None: they are exchanged by
        `all_reduce`. Between two exchanges of rows of one kind is one of the other, or another
        call."""
        ...

    def broadcast_(self, x: torch.Tensor) -> None:
        """Overwrites x, which is contiguous, with the first rank's."""
        ...

    def abort(self) -> None:
        """Lets go of the other ranks, which may be gone. No call follows."""
        ...


def max_shared_rows(size: int) -> int:
    """Returns the most rows that a kernel of so many ranks exchanges: all of its programs are on
    the device at once, and each sends its row to every rank."""
    return 512 // size


class Solo:
    """One rank alone."""

    rank = 0
    size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def row_memory(self, x: torch.Tensor, kind: int) -> RowMemory | None:
        return None

    def broadcast_(self, x: torch.Tensor) -> None:
        pass

    def abort(self) -> None:
        pass


SOLO = Solo()


class Gloo:
    """Ranks on one host, over its loopback device."""

    def __init__(
        self,
        store: Any,  # a torch.distributed.Store
        rank: int,
        size: int,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Returns once all ranks are there. Raises RuntimeError after `timeout_s`."""
        self.rank = rank
        self.size = size
        options = _C10D.ProcessGroupGloo._Options()
        options._devices = [_C10D.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=timeout_s)
        self._group = _C10D.ProcessGroupGloo(store, rank, size, options)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        parts = self._exchange(x)
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part
        return total.to(x.dtype)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._exchange(x), dim=-1)

    def row_memory(self, x: torch.Tensor, kind: int) -> RowMemory | None:
        return None

    def broadcast_(self, x: torch.Tensor) -> None:
        if x.numel():
            self._group.broadcast(x, 0).wait()

    def abort(self) -> None:
        """Does nothing: the connections end with the processes."""

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Returns the tensors of all ranks, in their order."""
        parts = [
            torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)
        ]
        if x.numel():
            self._group.allgather([parts], [x.contiguous()]).wait()
        return parts


class Traced:
    """Stands for several ranks where launches are recorded on meta tensors: it exchanges nothing
    and has the shapes of all."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_empty((x.shape[0], self.size * x.shape[1]))

    def row_memory(self, x: torch.Tensor, kind: int) -> RowMemory | None:
        max_rows = max_shared_rows(self.size)
        if len(x) > max_rows:
            return None
        return RowMemory(x.new_empty(self.size + 1, dtype=torch.int64), max_rows)

    def broadcast_(self, x: torch.Tensor) -> None:
        pass

    def abort(self) -> None:
        pass

"""The numbers of an adapter's file as rank rows of a pool: transposed, scaled and rounded once.

The bits are those of `(B.float().T * scale)` copied into the pool's type. Work on many tensors goes
to a few threads that compute alone: an OpenMP team would wait for its slowest worker at each
tensor, and on busy cores each wait lasts milliseconds (84 MB on 2 cores with a load of 6: 22 s
instead of 0.2). Free of files, pages and adapters.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")

# The other cores belong to the engine, and to the processes that stream its tokens.
_BATCH = 16  # matrices per call
_TURN = 64  # tensors whose names and shapes are checked between two pauses: 0.3 ms
_PAUSE_S = 1e-4
_NUM_THREADS = max(1, min(4, len(os.sched_getaffinity(0)) // 4))


def in_turns(items: Iterable[T]) -> Iterator[T]:
    """Yields the items, with pauses for the engine's thread: a thread that computes in the
    interpreter alone keeps it for 5 ms at a time, which is a whole step."""
    for count, item in enumerate(items, 1):
        if count % _TURN == 0:
            time.sleep(_PAUSE_S)
        yield item


def spread(work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Calls `work` for each item, in a few threads that end with this call. Returns the results in
    any order; raises an error of `work`."""
    count = min(_NUM_THREADS, len(items))
    if count <= 1:
        return [work(item) for item in items]
    own = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(count, initializer=compute_alone) as threads:
            shares = [items[first::count] for first in range(count)]
            found = list(threads.map(lambda share: [work(item) for item in share], shares))
    finally:
        torch.set_num_threads(own)  # also the number of threads that begin later
    return [result for share in found for result in share]


def compute_alone() -> None:
    """Has the operations of the current thread run without OpenMP workers. Threads that first use
    torch later take over the number, until another thread sets its own."""
    torch.set_num_threads(1)


def fits(numbers: torch.Tensor, scale: float, dtype: torch.dtype) -> bool:
    """Returns whether no number, times the scale in float32, is beyond the largest of `dtype`; NaN
    never fits."""
    if not numbers.numel():
        return True
    largest = torch.finfo(dtype).max
    low, high = (numbers.float() * scale).aminmax()  # a tenth of the time of isfinite
    return bool(low >= -largest and high <= largest)


@dataclass(frozen=True, slots=True)
class RowsCopy:
    """Numbers of one matrix on their way into rows; the rows are zero beyond the last number."""

    rows: torch.Tensor  # [r, width], each row contiguous
    numbers: torch.Tensor  # [r, width or less] of any strides and type
    scale: float = 1.0

    @property
    def target(self) -> torch.Tensor:
        """The rows as far as there are numbers; a view."""
        width = self.numbers.shape[1]
        return self.rows if width == self.rows.shape[1] else self.rows[:, :width]


def copy_rows(copies: Sequence[RowsCopy]) -> None:
    """Writes the numbers, times their scale, as rows; they fit into the rows' type.

    Few calls for many matrices: each call takes the interpreter once, and the engine's thread needs
    it, too. 84 MB next to 32 streams of an H200: 27 ms, with calls for each matrix 100.
    """
    spread(_copy, [copies[first : first + _BATCH] for first in range(0, len(copies), _BATCH)])


@torch.inference_mode()  # a thread has a mode of its own, and some rows are made in this one
def _copy(copies: Sequence[RowsCopy]) -> None:
    scaled = [copy for copy in copies if copy.scale != 1.0]
    plain = [copy for copy in copies if copy.scale == 1.0]
    numbers = [copy.numbers for copy in plain]
    if scaled:
        # Half types are scaled as they lie in the file: it rounds as float32 and a cast do.
        exact = [
            c.numbers if c.numbers.dtype in (torch.float32, c.rows.dtype) else c.numbers.float()
            for c in scaled
        ]
        numbers += torch._foreach_mul(exact, [copy.scale for copy in scaled])
    # Three dimensions avoid torch's copy for transposed matrices of one type: it lasts twice as
    # long.
    torch._foreach_copy_(
        [copy.target.unsqueeze(0) for copy in (*plain, *scaled)],
        [number.unsqueeze(0) for number in numbers],
    )
    for copy in copies:
        if copy.numbers.shape[1] < copy.rows.shape[1]:
            copy.rows[:, copy.numbers.shape[1] :].zero_()

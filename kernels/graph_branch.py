"""A branch of a CUDA graph: kernels that run beside those of the stream that is captured.

A shrink and the base's product read the same x and write different tensors; one after the other,
the shrink of a decode step is mostly latency. In a graph the order between them is left open: a
side stream waits for the current one, and before the next op the current one for the side stream.
Tensors that the branch writes are allocated before it begins and live until it is joined, all in
the order of the current stream, so that the allocator lends their memory to no kernel beside it.
Free of ops.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Branch:
    """Begins where it is made. Tensors on the meta device have no streams.

    The kernels beside the branch are captured before those on it: their programs then start first,
    and the programs of the branch fill the rest. The other way round the product of a layer waited
    for the shrink, and the branch gained nothing (H100 and H200).
    """

    def __init__(self, x: torch.Tensor) -> None:
        self._side = _side_stream(x.device) if x.is_cuda else None
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream(x.device))

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Puts launches on the branch."""
        if self._side is None:
            yield
            return
        with torch.cuda.stream(self._side):
            yield

    def join(self) -> None:
        """Lets later kernels of the current stream wait for the branch."""
        if self._side is not None:
            torch.cuda.current_stream(self._side.device).wait_stream(self._side)


def can_branch(x: torch.Tensor) -> bool:
    """Returns True while a graph is captured on x's device, and for tensors on the meta device,
    which stand for both."""
    if not x.is_cuda:
        return x.is_meta
    _side_stream(x.device)  # made by the run before the capture
    return torch.cuda.is_current_stream_capturing()


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

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
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class BranchOptions:
    """The form of branches. Only benchmarks change it, before they capture."""

    is_used: bool = True
    overlaps: bool = True  # the kernels behind a fork or join: programmatic dependent launch
    is_first: bool = True  # the branch is captured before the kernels beside it
    priority: int = 0  # of the side stream; below 0: its programs start first


options = BranchOptions()


class Branch:
    """Begins where it is made. Tensors on the meta device have no streams."""

    def __init__(self, x: torch.Tensor) -> None:
        self._device = x.device
        self.is_first = options.is_first
        if self._device.type == "cuda":
            side = _side_stream(self._device, options.priority)
            side.wait_stream(torch.cuda.current_stream(self._device))

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Puts launches on the branch."""
        _mark_edge()
        if self._device.type == "meta":
            yield
            return
        with torch.cuda.stream(_side_stream(self._device, options.priority)):
            yield

    def join(self) -> None:
        """Lets later kernels of the current stream wait for the branch."""
        _mark_edge()
        if self._device.type == "cuda":
            side = _side_stream(self._device, options.priority)
            torch.cuda.current_stream(self._device).wait_stream(side)


def can_branch(x: torch.Tensor) -> bool:
    """Returns True while a graph is captured on x's device, and for tensors on the meta device,
    which stand for both."""
    if not options.is_used:
        return False
    if not x.is_cuda:
        return x.is_meta
    _side_stream(x.device, options.priority)  # made by the run before the capture
    return torch.cuda.is_current_stream_capturing()


@functools.cache
def _side_stream(device: torch.device, priority: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority)  # type: ignore[no-untyped-call]


def _mark_edge() -> None:
    if not options.overlaps:
        from kernels.triton_launch import serialize_next

        serialize_next()

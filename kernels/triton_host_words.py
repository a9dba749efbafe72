"""The kernel of `host_words`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton_launch import launch

_BLOCK = 1024  # words of a program: two loads of 16 bytes for each thread of four warps


def copy_words(device: torch.Tensor, host: torch.Tensor, *, to_host: bool) -> None:
    """`device` and `host`: [n] int32, contiguous; `host` is page-locked."""
    count = device.numel()
    assert count == host.numel()
    assert device.dtype == host.dtype == torch.int32
    if count:
        grid = (triton.cdiv(count, _BLOCK),)
        launch(_copy_words_kernel, grid, device, host, count, TO_HOST=to_host, BLOCK=_BLOCK)


@triton.jit(do_not_specialize=["count"])
def _copy_words_kernel(device_ptr, host_ptr, count, TO_HOST: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # A mask that is the same for four words lets them be one load; the last ones are alone.
    _copy(device_ptr, host_ptr, at, at // 4 < count // 4, TO_HOST)
    at = count // 4 * 4 + tl.arange(0, 4)
    _copy(device_ptr, host_ptr, at, (at < count) & (tl.program_id(0) == 0), TO_HOST)


@triton.jit
def _copy(device_ptr, host_ptr, at, exists, TO_HOST: tl.constexpr):
    if TO_HOST:
        tl.store(host_ptr + at, tl.load(device_ptr + at, exists), exists)
    else:  # not from a cache: the host has written the words since the last copy
        tl.store(device_ptr + at, tl.load(host_ptr + at, exists, volatile=True), exists)

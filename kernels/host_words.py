"""Copies of some thousand numbers between a device and page-locked host memory, by a kernel.

CUDA's copy engines take all copies of one direction in their order, whatever their streams: the
4 KB of a step's inputs would wait for 500 MB of KV blocks before them (10 ms on an H200), and its
tokens for blocks on their way to the host. A kernel reads and writes the host's memory itself.
"""

from __future__ import annotations

import torch

from kernels.backend import uses_triton


def copy_to_device(host: torch.Tensor, device: torch.Tensor) -> None:
    """Copies [n] int32. The call returns at once: the host's memory must not change before the
    device has come to the next work of the current stream."""
    if not uses_triton(device):
        device.copy_(host, non_blocking=True)
        return
    from kernels.triton_host_words import copy_words

    copy_words(device, host, to_host=False)


def copy_to_host(device: torch.Tensor, host: torch.Tensor) -> None:
    """Copies [n] int32. The call returns at once; the host may read after an event of the current
    stream that follows."""
    if not uses_triton(device):
        host.copy_(device, non_blocking=True)
        return
    from kernels.triton_host_words import copy_words

    copy_words(device, host, to_host=True)

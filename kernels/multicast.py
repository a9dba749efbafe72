"""The switches of multicast in NVLink's switches, which stays off: sums would have other bits, and
not every host lets processes bind memory to it. Free of torch: they are set before its import."""

from __future__ import annotations

import os

NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}


def disable_multicast() -> None:
    """Sets the environment of this process and of those that it starts; before any exchange."""
    os.environ.update(NO_MULTICAST)

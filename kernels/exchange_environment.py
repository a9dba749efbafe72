"""The environment of exchanges between CUDA devices. Free of torch: it is set before its import.

Multicast in NVLink's switches stays off: sums would have other bits, and not every host lets
processes bind memory to it. NCCL's monitor, which reads the store of the start again and again,
stays off, too: a rank that hangs is noticed by its group.
"""

from __future__ import annotations

import os

EXCHANGE_ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}


def set_environment() -> None:
    """Sets the environment of this process and of its children; before any exchange."""
    os.environ.update(EXCHANGE_ENVIRONMENT)

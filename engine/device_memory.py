"""Reads of a device's memory from torch and the driver, before, while and after it fills, and the
errors of a device.

Out of memory becomes an error with the purpose of the allocation, the memory present and the
setting to change. The arithmetic of the shares is `memory_plan`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from engine.config import EngineConfig
from engine.errors import EngineDeadError, EngineMemoryError, UnsupportedModelError
from engine.host_memory import available_bytes, total_bytes
from engine.memory_plan import (
    GIB,
    check_asked,
    default_adapter_host_bytes,
    default_adapter_pool_bytes,
)
from lora.errors import AdapterError
from lora.page_image import PageLayout
from lora.sites import Site

_CPU_POOL_BYTES = 256 * 1024**2
# RuntimeErrors of Triton and CUDA, of torch's allocator on a CPU, of cuBLAS for its workspace.
_NO_MEMORY = ("out of memory", "can't allocate memory", "ALLOC_FAILED")


def look_at_empty_device(device: torch.device) -> tuple[int, int]:
    """Returns the bytes of a device, and those used before this process has allocated any: by other
    processes, and by the driver for this process."""
    return torch.cuda.mem_get_info(device)[1], outside_bytes(device)


def check_asked_memory(config: EngineConfig, device: torch.device) -> None:
    """Raises EngineMemoryError, before anything is loaded, if a configured size cannot fit."""
    on_device = {
        "kv_cache_bytes": None if config.num_blocks is not None else config.kv_cache_bytes,
        "adapter_pool_bytes": config.adapter_pool_bytes,
    }
    speculates = config.speculation != "off"
    on_host = {
        "adapter_host_bytes": config.adapter_host_bytes,
        "kv_host_bytes": config.kv_host_bytes or None,
        "suffix_cache_bytes": config.suffix_cache_bytes if speculates else None,
    }
    if device.type == "cuda":
        total = int(torch.cuda.mem_get_info(device)[1])
        check_asked(on_device, total, "the device")
    else:
        ranks = config.tensor_parallel_size  # each has its own, on the same host
        on_host |= {key: size and size * ranks for key, size in on_device.items()}
    check_asked(on_host, total_bytes(), "this machine")


def allocated_bytes(device: torch.device) -> int:
    return int(torch.cuda.memory_allocated(device))


def peak_bytes(device: torch.device, step: Callable[[], object]) -> int:
    """Returns the most memory that one call holds at a time, beyond earlier allocations, including
    memory that libraries and kernels reserve at their first use."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before, outside = allocated_bytes(device), outside_bytes(device)
    step()
    torch.cuda.synchronize(device)
    peak = int(torch.cuda.max_memory_allocated(device)) - before
    outside = max(0, outside_bytes(device) - outside)
    torch.cuda.empty_cache()
    return peak + outside


@contextmanager
def explain_out_of_memory(what: str, settings: Sequence[str]) -> Iterator[None]:
    """Turns out of memory into an EngineMemoryError. `settings` make `what` smaller, the most
    useful first."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise EngineMemoryError(_explanation(what, settings, error)) from error


def is_out_of_memory(error: Exception) -> bool:
    """Returns True if the error means that device or host memory is missing, as torch, cuBLAS or
    Triton report it."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)


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


def page_layout(config: EngineConfig, sites: Sequence[Site], dtype: torch.dtype) -> PageLayout:
    """Returns the layout of this configuration's adapters. Raises UnsupportedModelError if
    `lora_dtype` does not suit the sites; `engine.rank` has it do so before anything is loaded."""
    is_int8 = config.lora_dtype == "int8"
    try:
        return PageLayout(sites, dtype, has_affine=config.affine_adapters, is_int8=is_int8)
    except AdapterError as error:
        size = config.tensor_parallel_size
        where = f" on each of {size} ranks" if size > 1 else ""
        raise UnsupportedModelError(f"lora_dtype is {config.lora_dtype}: {error}{where}") from None


def adapter_budgets(
    config: EngineConfig,
    sites: Sequence[Site],
    dtype: torch.dtype,
    device: torch.device,
    weights: int,  # bytes on the device
) -> tuple[int, int]:
    """Returns the configured bytes on the device and on the host, or defaults from the memory of
    this machine."""
    pool = config.adapter_pool_bytes
    if pool is None and device.type == "cpu":
        pool = _CPU_POOL_BYTES
    elif pool is None:
        share = int(torch.cuda.mem_get_info(device)[1] * config.gpu_memory_utilization)
        page_bytes = page_layout(config, sites, dtype).page_bytes
        pool = default_adapter_pool_bytes(share - weights, page_bytes)
    host = config.adapter_host_bytes
    if host is None:
        host = default_adapter_host_bytes(pool_bytes=pool, memory_bytes=total_bytes())
    return pool, host


def outside_bytes(device: torch.device) -> int:
    """Returns the bytes in use on the device that torch's allocator has not reserved."""
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free - torch.cuda.memory_reserved(device))


def _explanation(what: str, settings: Sequence[str], error: Exception) -> str:
    rows = [("free on the host", available_bytes())]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        free, total = torch.cuda.mem_get_info()
        held = torch.cuda.memory_reserved()
        rows = [("device", total), ("held by this engine", held), ("free", free), *rows]
    table = "\n".join(f"  {name:<20}{size / GIB:>10.3f} GiB" for name, size in rows)
    # Torch's first sentences give the requested size; the others describe its allocator.
    asked = ". ".join(str(error).split(". ")[:2]) or type(error).__name__
    return f"out of memory while {what}: {asked}\n{table}\nchange {', '.join(settings)}"

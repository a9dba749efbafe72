"""The compute devices of this machine as torch reports them, in values without torch."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.backend import Capability
from kernels.e4m3 import FIRST_CAPABILITY

_DRIVER_FILE = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class CudaDevice:
    name: str
    memory_bytes: int
    capability: tuple[int, int]

    @property
    def has_fp8(self) -> bool:
        return self.capability >= FIRST_CAPABILITY


@dataclass(frozen=True, slots=True)
class Devices:
    torch_version: str
    cuda_build: str | None  # the CUDA that torch was built for; None: a CPU build
    driver: str | None  # NVIDIA's kernel driver; None: not loaded
    cuda: tuple[CudaDevice, ...]
    cuda_error: str | None  # why torch cannot use CUDA though it was built for it
    has_triton: bool
    num_threads: int  # of torch on the CPU


def describe_devices() -> Devices:
    devices, error = _cuda_devices()
    return Devices(
        torch_version=torch.__version__,
        cuda_build=torch.version.cuda,
        driver=_driver_version(),
        cuda=devices,
        cuda_error=error,
        has_triton=importlib.util.find_spec("triton") is not None,
        num_threads=torch.get_num_threads(),
    )


def lacking_capability(capability: Capability, first: Capability) -> str | None:
    """Returns why a device without the first of these compute capabilities does not suffice."""
    if capability >= first:
        return None
    found, wanted = (".".join(map(str, one)) for one in (capability, first))
    return f"it needs a device of compute capability {wanted} or higher, this one has {found}"


def _cuda_devices() -> tuple[tuple[CudaDevice, ...], str | None]:
    if torch.version.cuda is None:
        return (), None
    try:
        torch.cuda.current_device()  # its error has the reason, which is_available() lacks
        found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    except (RuntimeError, AssertionError) as error:
        return (), str(error).splitlines()[0]
    return tuple(CudaDevice(p.name, p.total_memory, (p.major, p.minor)) for p in found), None


def _driver_version() -> str | None:
    if not _DRIVER_FILE.is_file():
        return None
    found = re.search(r"Module\D+(\d+(?:\.\d+)+)", _DRIVER_FILE.read_text())
    return found[1] if found else "unknown"

"""The compute devices of this machine as torch reports them, in values without torch."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import torch

from kernels.backend import Capability
from kernels.e4m3 import FIRST_CAPABILITY

_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_NVIDIA_SMI_S = 20.0  # it initialises all devices of the machine


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


@dataclass(frozen=True, slots=True)
class DeviceLink:
    """The connection of two CUDA devices, by their numbers in torch."""

    first: int
    second: int
    kind: str | None  # in the words of `nvidia-smi topo -m`: NV18, PIX, SYS; None: unknown
    is_direct: bool  # each reads the other's memory


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


def describe_links() -> tuple[DeviceLink, ...]:
    """Returns the connections of all pairs of CUDA devices that torch can use."""
    devices, _ = _cuda_devices()
    count = len(devices)
    if count < 2:
        return ()
    identities = [f"GPU-{torch.cuda.get_device_properties(i).uuid}" for i in range(count)]
    numbers = parse_numbers(nvidia_smi("--query-gpu=index,uuid", "--format=csv,noheader"))
    kinds = parse_topology(nvidia_smi("topo", "-m"))
    return tuple(
        DeviceLink(
            i,
            j,
            kinds.get((numbers.get(identities[i], -1), numbers.get(identities[j], -1))),
            torch.cuda.can_device_access_peer(i, j) and torch.cuda.can_device_access_peer(j, i),
        )
        for i, j in combinations(range(count), 2)
    )


def parse_numbers(output: str) -> dict[str, int]:
    """Returns nvidia-smi's number of each device, by its UUID: CUDA_VISIBLE_DEVICES and CUDA's own
    order give torch other numbers."""
    pairs = (line.split(",", 1) for line in output.splitlines() if "," in line)
    return {uuid.strip(): int(number) for number, uuid in pairs if number.strip().isdecimal()}


def parse_topology(output: str) -> dict[tuple[int, int], str]:
    """Returns the kind of each connection in the matrix of `nvidia-smi topo -m`."""
    rows = [re.sub(r"\x1b\[[0-9;]*m", "", line).split("\t") for line in output.splitlines()]
    rows = [[cell.strip() for cell in row] for row in rows]
    header = next((row for row in rows if row[0] == "" and "GPU0" in row), [])
    kinds: dict[tuple[int, int], str] = {}
    for row in rows:
        if not (source := re.fullmatch(r"GPU(\d+)", row[0])):
            continue
        for name, kind in zip(header[1:], row[1:], strict=False):
            if target := re.fullmatch(r"GPU(\d+)", name):
                kinds[int(source[1]), int(target[1])] = kind
    return kinds


def nvidia_smi(*arguments: str) -> str:
    """Returns its output; empty if there is none, as in a container without the tool."""
    command = ["nvidia-smi", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_NVIDIA_SMI_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace") if done.returncode == 0 else ""


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

"""The kernels by which ranks exchange rows, compiled without a device."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from kernels.backend import HAS_TRITON, traced_for
from kernels.collective import Traced, max_shared_rows
from kernels.exchange_norm import all_reduce_add_rms_norm

if TYPE_CHECKING:
    from kernels.kernel_call import KernelCall

pytestmark = [
    pytest.mark.skipif(not HAS_TRITON, reason="needs triton"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # Triton on its next version's defaults
]
_HOPPER = (9, 0)
_MULTIPROCESSORS = 132  # of an H100: each with 65,536 registers, for 64 warps and 32 programs


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("hidden", [4096, 5120, 8192])
def test_all_rows_of_an_exchange_are_on_the_device_at_once(
    hidden: int, size: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    """A program that waits would otherwise keep out one that another rank waits for."""
    most = max_shared_rows(size)
    for rows in {128, most}:
        if rows <= most:
            assert _programs_at_once(_call(rows, hidden, size, dtype), tmp_path) >= rows


def _call(rows: int, hidden: int, size: int, dtype: torch.dtype) -> KernelCall:
    from kernels.triton_launch import recorded_calls

    x = torch.empty(rows, hidden, dtype=dtype, device="meta")
    with traced_for(_HOPPER), recorded_calls() as calls:
        all_reduce_add_rms_norm(Traced(size), x, x, x[0], 1e-6, 1.0, 0)
    (call,) = (one for one in calls if one.module == "kernels.triton_exchange_norm")
    return call


def _programs_at_once(call: KernelCall, folder: Path) -> int:
    import triton

    from kernels.kernel_compiler import compile_call, targeted

    with targeted(_HOPPER):
        compiled = compile_call(call)
    binary = folder / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(binary)]
    found = re.search(r"REG:(\d+)", subprocess.check_output(command, text=True))
    assert found is not None
    warps = int(compiled.metadata.num_warps)
    registers = -(-int(found[1]) // 8) * 8 * 32 * warps
    return _MULTIPROCESSORS * min(65536 // registers, 64 // warps, 32)

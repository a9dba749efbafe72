"""The Triton kernel of `silu_mul`: a program processes a stretch of one row. The bits are torch's.

torch's exponential and its exactly rounded quotient instead of the fast variants; memory latency
hides them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.backend import IS_INTERPRETED
from kernels.triton_launch import OVERLAPS, Launcher, start_overlapped

if not IS_INTERPRETED:
    from triton.language.extra.cuda import libdevice

BLOCK = 1024
NUM_WARPS = 4


@triton.jit
def _silu_mul_kernel(
    x_ptr,
    out_ptr,
    STRIDE_X: tl.constexpr,
    WIDTH: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    start_overlapped(OVERLAPPED)
    gate = tl.load(x_ptr + row * STRIDE_X + columns, mask=inside, other=0.0)
    up = tl.load(x_ptr + row * STRIDE_X + WIDTH + columns, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    if EXACT:  # noqa: SIM108  one branch is not compiled
        silu = tl.div_rn(wide, 1.0 + libdevice.exp(-wide))
    else:
        silu = wide / (1.0 + tl.exp(-wide))
    out = silu.to(gate.dtype).to(tl.float32) * up.to(tl.float32)
    tl.store(out_ptr + row * WIDTH + columns, out.to(gate.dtype), mask=inside)


_launch = Launcher(_silu_mul_kernel, launch_pdl=OVERLAPS)


def launch_silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1
    assert rows < 65536
    out = gate_up.new_empty((rows, width))
    _launch(
        (-(-width // BLOCK), rows, 1),
        (gate_up, out),
        (),
        (gate_up.stride(0), width, not IS_INTERPRETED, BLOCK, OVERLAPS),
        NUM_WARPS,
    )
    return out

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
def gated(gate, up, GELU: tl.constexpr, EXACT: tl.constexpr):
    """Computes `silu_mul`: torch's exponential and quotient, or its tanh, rounded before the
    product."""
    wide = gate.to(tl.float32)
    if GELU:
        inner = 0.7978845608028654 * (wide + 0.044715 * wide * wide * wide)  # sqrt(2 / pi)
        if EXACT:
            tanh = libdevice.tanh(inner)
        else:
            tanh = 1.0 - 2.0 / (tl.exp(tl.minimum(2.0 * inner, 80.0)) + 1.0)
        active = 0.5 * wide * (1.0 + tanh)
    elif EXACT:
        active = tl.div_rn(wide, 1.0 + libdevice.exp(-wide))
    else:
        active = wide / (1.0 + tl.exp(-wide))
    return (active.to(gate.dtype).to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def _silu_mul_kernel(
    x_ptr,
    out_ptr,
    STRIDE_X: tl.constexpr,
    WIDTH: tl.constexpr,
    GELU: tl.constexpr,
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
    out = gated(gate, up, GELU, EXACT)
    tl.store(out_ptr + row * WIDTH + columns, out, mask=inside)


_launch = Launcher(_silu_mul_kernel, launch_pdl=OVERLAPS)


def launch_silu_mul(gate_up: torch.Tensor, is_gelu: bool) -> torch.Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1
    assert rows < 65536
    out = gate_up.new_empty((rows, width))
    _launch(
        (-(-width // BLOCK), rows, 1),
        (gate_up, out),
        (),
        (
            gate_up.stride(0),
            width,
            is_gelu,
            not IS_INTERPRETED,
            BLOCK,
            OVERLAPS,
        ),
        NUM_WARPS,
    )
    return out

"""The Triton kernel of `all_reduce_add_rms_norm`: a program sends its row to every rank, waits for
theirs, adds them up and normalises the sum.

    program of a row --its part, then a signal--> the same program on every other rank
    parts of all ranks, in their order --sum--> + residual --> norm

A program waits for the programs of its row alone, by a word that the sender sets and the receiver
clears. All programs of a launch have to be on the device at once, or one that waits could keep out
one that is waited for: `MAX_ROWS` of them are.

The memory of a row is written again by the next exchange but one, of the other kind: ranks that
send it have the signals of the exchange between, which the receiver sends after it has read this.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton_launch import OVERLAPS, Launcher, start_overlapped
from kernels.triton_rms_norm import norm_row, scale_row, shape_of


@triton.jit
def _exchange_norm_kernel(
    x_ptr,  # [T, HIDDEN], this rank's part
    residual_ptr,  # [T, HIDDEN], becomes SCALE * the sum of the parts + residual
    weight_ptr,
    out_ptr,
    ranks_ptr,  # [SIZE + 1] int64: the addresses of the ranks' memory, the number of this rank
    STRIDE_X: tl.constexpr,
    STRIDE_RESIDUAL: tl.constexpr,
    HIDDEN: tl.constexpr,
    EPS: tl.constexpr,
    SCALE: tl.constexpr,
    SIZE: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    PARTS_BYTES: tl.constexpr = SIZE * MAX_ROWS * HIDDEN * dtype.primitive_bitwidth // 8
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)  # no kernel of a step writes it
    rank = tl.load(ranks_ptr + SIZE)
    place = rank * MAX_ROWS + row
    start_overlapped(OVERLAPPED)
    x = tl.load(x_ptr + row.to(tl.int64) * STRIDE_X + columns, mask=inside, other=0.0)
    for peer in tl.static_range(SIZE):
        parts = tl.multiple_of(tl.load(ranks_ptr + peer).to(tl.pointer_type(dtype)), 16)
        tl.store(parts + place * HIDDEN + columns, x, mask=inside)
    tl.debug_barrier()  # the signal comes after the stores of all threads
    for peer in tl.static_range(SIZE):
        signals = (tl.load(ranks_ptr + peer) + PARTS_BYTES).to(tl.pointer_type(tl.int32))
        if peer != rank:
            tl.atomic_xchg(signals + place, 1, sem="release", scope="sys")
    there = residual_ptr + row.to(tl.int64) * STRIDE_RESIDUAL + columns
    residual = tl.load(there, mask=inside, other=0.0)
    own = tl.load(ranks_ptr + rank)
    parts = tl.multiple_of(own.to(tl.pointer_type(dtype)), 16)
    signals = (own + PARTS_BYTES).to(tl.pointer_type(tl.int32))
    total = tl.zeros([BLOCK], tl.float32)
    for peer in tl.static_range(SIZE):
        place = peer * MAX_ROWS + row
        if peer != rank:
            while tl.atomic_cas(signals + place, 1, 0, sem="acquire", scope="sys") == 0:
                pass
        # Past the first cache, which may hold the row of an earlier exchange.
        part = tl.load(
            parts + place.to(tl.int64) * HIDDEN + columns,
            mask=inside,
            other=0.0,
            cache_modifier=".cg",
        )
        total += part.to(tl.float32)
    x = scale_row(total.to(dtype), SCALE)
    x = (x.to(tl.float32) + residual.to(tl.float32)).to(dtype)
    tl.store(there, x, mask=inside)
    tl.store(
        out_ptr + row.to(tl.int64) * HIDDEN + columns, norm_row(x, weight, HIDDEN, EPS), inside
    )


_launch = Launcher(_exchange_norm_kernel, launch_pdl=OVERLAPS)


def launch_exchange_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    scale: float,
    ranks: torch.Tensor,
    max_rows: int,
) -> torch.Tensor:
    """Returns the normed sum [T, H]; the residual is the sum. `ranks`: [size + 1] int64 on the
    device: addresses of memory for `max_rows` rows of each rank, in the type of x, and as many
    words of int32, zero at first; then this rank's number."""
    rows, hidden = x.shape
    assert x.stride(1) == 1
    assert rows <= max_rows
    out = x.new_empty(x.shape)
    block, num_warps = shape_of(hidden)
    _launch(
        (rows, 1, 1),
        (x, residual, weight, out, ranks),
        (),
        (
            x.stride(0),
            residual.stride(0),
            hidden,
            eps,
            scale,
            len(ranks) - 1,
            max_rows,
            block,
            OVERLAPS,
        ),
        num_warps,
    )
    return out

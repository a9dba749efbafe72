"""The Triton kernel of `all_reduce_add_rms_norm`: a program sends its row to every rank, waits for
theirs, adds them up and normalises the sum.

    program of a row --its part, then a signal--> the same program on every other rank
    parts of all ranks, in their order --sum--> + residual --> norm

A program waits for the programs of its row alone, by a word that the sender sets and the receiver
clears. All programs of a launch have to be on the device at once, or one that waits could keep out
one that is waited for: `collective.max_shared_rows` of them are.

The memory of a row is written again by the next exchange but one, of the other kind: ranks that
send it have the signals of the exchange between, which the receiver sends after it has read this.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.collective import RowMemory
from kernels.triton_launch import OVERLAPS, Launcher, start_overlapped
from kernels.triton_rms_norm import add_and_norm, shape_of


@triton.jit
def send_row(x, columns, row, ranks_ptr, HIDDEN: tl.constexpr, SIZE: tl.constexpr, ROWS):
    """Writes x [columns] to the memory of every rank, this one's included."""
    place = tl.load(ranks_ptr + SIZE) * ROWS + row
    for peer in tl.static_range(SIZE):
        parts = tl.load(ranks_ptr + peer).to(tl.pointer_type(x.dtype))
        parts = tl.multiple_of(parts, 16)
        tl.store(parts + place * HIDDEN + columns, x, mask=columns < HIDDEN)


@triton.jit
def send_signal(row, ranks_ptr, PARTS_BYTES: tl.constexpr, SIZE: tl.constexpr, ROWS):
    """Lets the program of this row on each other rank read what all threads have sent."""
    tl.debug_barrier()
    rank = tl.load(ranks_ptr + SIZE)
    for peer in tl.static_range(SIZE):
        signals = (tl.load(ranks_ptr + peer) + PARTS_BYTES).to(tl.pointer_type(tl.int32))
        if peer != rank:
            tl.atomic_xchg(signals + rank * ROWS + row, 1, sem="release", scope="sys")


@triton.jit
def receive_sum(
    columns, row, ranks_ptr, dtype: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr,
    PARTS_BYTES: tl.constexpr, SIZE: tl.constexpr, ROWS,
):  # fmt: skip
    """Waits for the parts of all ranks and returns their sum [columns], rounded once."""
    rank = tl.load(ranks_ptr + SIZE)
    own = tl.load(ranks_ptr + rank)
    parts = tl.multiple_of(own.to(tl.pointer_type(dtype)), 16)
    signals = (own + PARTS_BYTES).to(tl.pointer_type(tl.int32))
    total = tl.zeros([BLOCK], tl.float32)
    for peer in tl.static_range(SIZE):
        place = peer * ROWS + row
        if peer != rank:
            while tl.atomic_cas(signals + place, 1, 0, sem="acquire", scope="sys") == 0:
                pass
        # Past the first cache, which may hold the row of an earlier exchange.
        there = parts + place.to(tl.int64) * HIDDEN + columns
        part = tl.load(there, mask=columns < HIDDEN, other=0.0, cache_modifier=".cg")
        total += part.to(tl.float32)
    return total.to(dtype)


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
    PARTS_BYTES: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)  # no kernel of a step writes it
    start_overlapped(OVERLAPPED)
    x = tl.load(x_ptr + row.to(tl.int64) * STRIDE_X + columns, mask=inside, other=0.0)
    send_row(x, columns, row, ranks_ptr, HIDDEN, SIZE, ROWS)
    send_signal(row, ranks_ptr, PARTS_BYTES, SIZE, ROWS)
    there = residual_ptr + row.to(tl.int64) * STRIDE_RESIDUAL + columns
    residual = tl.load(there, mask=inside, other=0.0)
    x = receive_sum(columns, row, ranks_ptr, x.dtype, HIDDEN, BLOCK, PARTS_BYTES, SIZE, ROWS)
    normed = add_and_norm(x, residual, there, weight, inside, HIDDEN, EPS, SCALE)
    tl.store(out_ptr + row.to(tl.int64) * HIDDEN + columns, normed, mask=inside)


_launch = Launcher(_exchange_norm_kernel, launch_pdl=OVERLAPS)


def launch_exchange_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    scale: float,
    memory: RowMemory,
) -> torch.Tensor:
    """Returns the normed sum [T, H]; the residual is the sum."""
    rows, hidden = x.shape
    assert x.stride(1) == 1
    assert rows <= memory.max_rows
    out = x.new_empty(x.shape)
    block, num_warps = shape_of(hidden)
    _launch(
        (rows, 1, 1),
        (x, residual, weight, out, memory.ranks),
        (),
        (
            x.stride(0),
            residual.stride(0),
            hidden,
            eps,
            scale,
            *memory.layout(hidden * x.itemsize),
            block,
            OVERLAPS,
        ),
        num_warps,
    )
    return out

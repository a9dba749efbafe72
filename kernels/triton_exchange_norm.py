"""The Triton kernel of `all_reduce_add_rms_norm`: a program sends its row to every other rank,
waits for theirs, adds them up and normalises the sum.

    program of a row --its part--> the same program on every other rank
    parts of all ranks, in their order --sum--> + residual --> norm

Memory that no number has reached yet holds `MISSING` bits, a NaN that no sender sends, and a
program reads its row until none are left: no signal follows the numbers, for which a sender would
have to wait until these have arrived (the Lamport exchange of TensorRT-LLM, which has -0 there).
All programs of a launch have to be on the device at once, or a program that waits could keep out
the one for which another waits: `collective.max_shared_rows` of them are.

A receiver puts `MISSING` back. The memory of a row is written again by the next exchange but one,
of the other kind: a rank that sends it has received the exchange between, whose kernel the receiver
has started after the one that put them back had ended.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.collective import MISSING, RowMemory
from kernels.triton_launch import OVERLAPS, Launcher, start_dependents, wait_for_inputs
from kernels.triton_rms_norm import add_and_norm, shape_of

_MISSING = tl.constexpr(MISSING)


@triton.jit
def find_ranks(ranks_ptr, SIZE: tl.constexpr):
    """Returns this rank's number, the address of its memory, and the addresses of all."""
    rank = tl.load(ranks_ptr + SIZE)
    addresses = ()
    for peer in tl.static_range(SIZE):
        addresses = addresses + (tl.load(ranks_ptr + peer),)  # noqa: RUF005  Triton has no *
    return rank, tl.load(ranks_ptr + rank), addresses


@triton.jit
def _bits(x):
    INTEGER: tl.constexpr = tl.int32 if x.dtype.primitive_bitwidth == 32 else tl.int16
    return x.to(INTEGER, bitcast=True)


@triton.jit
def missing(x):
    """Returns 1 for each number that has not come, else 0.

    The decision to read again has to be the same in all warps, and each warp sees the numbers that
    it has read: the maximum of a tensor whose numbers are spread over all warps, as `shape_of` has
    them, is the same. A tensor of up to 32 numbers is read by every warp for itself, and so is its
    maximum.
    """
    return (_bits(x) == _MISSING).to(tl.int32)


@triton.jit
def clear(at, TYPE: tl.constexpr, mask):
    """Marks numbers as not there."""
    INTEGER: tl.constexpr = tl.int32 if TYPE.primitive_bitwidth == 32 else tl.int16
    tl.store(at, tl.full(mask.shape, _MISSING, INTEGER).to(TYPE, bitcast=True), mask=mask)


@triton.jit
def sendable(x):
    """Returns x; a NaN that would be read as missing is another one."""
    bits = _bits(x)
    nan = tl.full(x.shape, (1 << (x.dtype.primitive_bitwidth - 1)) - 1, bits.dtype)
    return tl.where(bits == _MISSING, nan, bits).to(x.dtype, bitcast=True)


@triton.jit
def send_row(x, columns, row, rank, addresses, HIDDEN: tl.constexpr, SIZE: tl.constexpr, ROWS):
    """Writes x [columns] to the memory of every other rank."""
    x = sendable(x)
    place = (rank * ROWS + row) * HIDDEN + columns
    for peer in tl.static_range(SIZE):
        if peer != rank:
            parts = addresses[peer].to(tl.pointer_type(x.dtype))
            tl.store(tl.multiple_of(parts, 16) + place, x, mask=columns < HIDDEN)


@triton.jit
def parts_at(own, peer, columns, row, dtype: tl.constexpr, HIDDEN: tl.constexpr, ROWS):
    """Returns the addresses of a peer's part of the row in this rank's memory."""
    parts = tl.multiple_of(own.to(tl.pointer_type(dtype)), 16)
    return parts + (peer * ROWS + row) * HIDDEN + columns


@triton.jit
def _receive_sum(
    x, columns, row, rank, own, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr, ROWS
):  # fmt: skip
    """Returns the sum [columns] of this rank's x and the parts of all others, rounded once."""
    inside = columns < HIDDEN
    total = tl.zeros([BLOCK], tl.float32)
    for peer in tl.static_range(SIZE):
        part = x
        if peer != rank:
            at = parts_at(own, peer, columns, row, x.dtype, HIDDEN, ROWS)
            part = tl.load(at, mask=inside, other=0.0, volatile=True)
            while tl.max(missing(part)) != 0:
                part = tl.load(at, mask=inside, other=0.0, volatile=True)
            clear(at, x.dtype, inside)
        total += part.to(tl.float32)
    return total.to(x.dtype)


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
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    start_dependents(OVERLAPPED)
    # No kernel of a step writes these.
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    rank, own, addresses = find_ranks(ranks_ptr, SIZE)
    wait_for_inputs(OVERLAPPED)
    x = tl.load(x_ptr + row.to(tl.int64) * STRIDE_X + columns, mask=inside, other=0.0)
    send_row(x, columns, row, rank, addresses, HIDDEN, SIZE, ROWS)
    there = residual_ptr + row.to(tl.int64) * STRIDE_RESIDUAL + columns
    residual = tl.load(there, mask=inside, other=0.0)
    x = _receive_sum(x, columns, row, rank, own, HIDDEN, BLOCK, SIZE, ROWS)
    normed = add_and_norm(x, residual, there, weight, inside, HIDDEN, EPS, SCALE)
    tl.store(out_ptr + row.to(tl.int64) * HIDDEN + columns, normed, mask=inside)


_launch = Launcher(_exchange_norm_kernel, launch_pdl=OVERLAPS)
# Of an H100's 132 multiprocessors one program on each is enough for few rows. With no more than so
# many registers, two of 512 threads are on each.
_launch_pairs = Launcher(_exchange_norm_kernel, launch_pdl=OVERLAPS, maxnreg=64)
_MAX_SINGLE_ROWS = 128


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
    launch = _launch_pairs if rows > _MAX_SINGLE_ROWS and num_warps > 8 else _launch
    launch(
        (rows, 1, 1),
        (x, residual, weight, out, memory.ranks),
        (),
        (
            x.stride(0),
            residual.stride(0),
            hidden,
            eps,
            scale,
            *memory.sizes,
            block,
            OVERLAPS,
        ),
        num_warps,
    )
    return out

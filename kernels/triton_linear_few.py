"""The Triton kernel of `linear` for few rows: a program multiplies some rows of the weight with all
tokens; the shrink's pages are more rows of that kind, processed by the first programs.

A product of so few tokens is a walk over the weight. The tensor cores' tall side is the weight, the
tokens their narrow side. Programs do not split K; where there are few of them, their warps do: each
walks every SPLITth block of columns, as one batch of a dot, and the sums meet at the end. The split
depends on the weight's shape alone (`walk_of`), so a token's bits depend neither on the number of
tokens nor on adapters, its own included. The number of tokens and the lengths of the shrink are no
constants: one binary serves all steps of few rows.

No kernel writes the weights, so a program requests the first bytes of its rows into the
second-level cache before it waits for x: memory stays busy while the small kernels between two
products run.

Of Llama-3-8B on an H200 (2026-11-21), microseconds alone and with the shrink of one rank-16 adapter
for one token, cuBLAS and a shrink kernel after it in brackets: qkv 14.9 and 15.6 (17.3, 20.0), o
10.8 and 10.8 (13.9, 15.2), gate_up 56.6 and 56.6 (62.7, 65.2), down 30.3 and 30.4 (32.8, 34.6).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.backend import IS_INTERPRETED
from kernels.few_rows import FEW_ROWS
from kernels.lora_plan import PAGE_ROWS, Bridge, LoraPlan
from kernels.lora_rows import SiteRows
from kernels.triton_launch import OVERLAPS, Launcher, start_dependents, wait_for_inputs
from kernels.triton_lora_tiles import PAGE, find_strip, page_dot, read_unit, strip_at

BLOCK_N = 16
NARROW = 8192  # rows of a weight, up to here so few programs that one has two warps
# Of K, of a program of the shrink, in multiples of a block: short where few programs shrink.
CHUNK, SHORT_CHUNK, SHORT_TOKENS = 1024, 512, 2
WIDE = 8192  # from here on K is cut into chunks of twice the length


class Walk(NamedTuple):
    """The way in which a program walks its rows of the weight."""

    block_k: int  # columns of a warp at a time
    stages: int  # of them, at a time
    split: int  # warps, each with blocks of its own; split * block_k <= SHORT_CHUNK
    prefetch: int  # bytes of a row that are requested before x is there; 0 or a multiple of 128


@functools.cache
def walk_of(height: int, width: int) -> Walk:
    """Returns the walk of a weight [height, width]."""
    if height <= NARROW:
        return Walk(256, 4, 2, 2048)
    return Walk(256, 4, 1, 1024)


@triton.jit
def _prefetch(at, stride, height, length, ROWS: tl.constexpr, SPLIT: tl.constexpr):
    """Requests the first `length` bytes of ROWS rows into the second-level cache, `stride` elements
    apart; beyond `height` the last row again. Each thread has one address: fewer of them would be
    requested several times."""
    PIECES: tl.constexpr = 32 * SPLIT // ROWS
    lanes = tl.arange(0, ROWS * PIECES)
    row = tl.maximum(tl.minimum(lanes // PIECES, height - 1), 0)
    size = length // (16 * PIECES) * 16
    # Rounded down to a multiple of 16, which the instruction asks for.
    address = (at + row * stride).to(tl.int64, bitcast=True) // 16 * 16 + lanes % PIECES * size
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;",
        "=r,l,r",
        [address, size + 0 * lanes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _walk(
    w_at, x_at, height, live, columns, left, walked,
    IS_EVEN: tl.constexpr, IS_FULL: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Returns [BLOCK_N, ROWS]: `height` rows of a weight times those of x, over `walked` of the
    `left` remaining columns. IS_EVEN: whole blocks of them. IS_FULL: all rows exist."""
    acc = tl.zeros([SPLIT, BLOCK_N, ROWS], dtype=tl.float32)
    exists = (tl.arange(0, BLOCK_N) < height)[None, :, None]
    for k in tl.range(0, walked, SPLIT * BLOCK_K, num_stages=STAGES):
        x_mask = live[None, None, :]
        if not IS_EVEN:
            x_mask = x_mask & (columns < left - k)[:, :, None]
        x = tl.load(x_at + k, mask=x_mask, other=0.0)  # [SPLIT, BLOCK_K, ROWS]
        if IS_EVEN and IS_FULL:
            w = tl.load(w_at + k)  # [SPLIT, BLOCK_N, BLOCK_K]
        elif IS_EVEN:
            w = tl.load(w_at + k, mask=exists, other=0.0)
        else:
            w = tl.load(w_at + k, mask=exists & (columns < left - k)[:, None, :], other=0.0)
        acc = page_dot(w, x, acc, UPCAST)
    return tl.sum(acc, axis=0)


@triton.jit(
    do_not_specialize=["num_tokens", "shrinks", "chunk"],
    do_not_specialize_on_alignment=["header_ptr", "units_ptr", "entries_ptr"],
)
def _linear_few_kernel(
    x_ptr,  # [T, K]
    w_ptr,  # [N, K]
    bias_ptr,  # [N]
    y_ptr,  # [T, N]
    heap_ptr,
    planes_ptr,  # [chunks, slices, rank pages, rows of small tiles, PAGE]
    header_ptr,
    units_ptr,
    entries_ptr,  # of A, [pages, slices], STRIDE apart
    num_tokens,
    shrinks,  # programs along the units, for each slice and chunk
    chunk,  # columns of x that a program of the shrink walks
    K: tl.constexpr,
    N: tl.constexpr,
    STRIDE_X: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_LORA: tl.constexpr,
    STRIDE: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    UPCAST: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    start_dependents(OVERLAPPED)
    IS_EVEN: tl.constexpr = K % (SPLIT * BLOCK_K) == 0
    ELEMENT: tl.constexpr = w_ptr.dtype.element_ty.primitive_bitwidth // 8
    program = tl.program_id(0)
    offsets = tl.arange(0, ROWS)
    # A warp walks every SPLITth block of columns.
    columns = tl.arange(0, SPLIT)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    base = program
    if HAS_LORA:
        num_chunks = tl.cdiv(K, chunk)
        base = program - shrinks * NUM_SLICES * num_chunks
    if base >= 0:
        lanes = tl.arange(0, BLOCK_N)
        first = base * BLOCK_N
        names = first + lanes
        live = offsets < num_tokens
        row_at = w_ptr + first.to(tl.int64) * K
        w_at = row_at + lanes[None, :, None] * K + columns[:, None, :]
        x_at = x_ptr + offsets[None, None, :] * STRIDE_X + columns[:, :, None]
        if PREFETCH:
            row_bytes: tl.constexpr = K * ELEMENT
            length: tl.constexpr = PREFETCH if row_bytes > PREFETCH else row_bytes
            _prefetch(row_at, K, N - first, length, BLOCK_N, SPLIT)
        wait_for_inputs(OVERLAPPED)
        acc = _walk(
            w_at, x_at, N - first, live, columns, K, K, IS_EVEN, N % BLOCK_N == 0, ROWS, BLOCK_N,
            BLOCK_K, SPLIT, STAGES, UPCAST,
        )  # fmt: skip
        if HAS_BIAS:
            acc += tl.load(bias_ptr + names, mask=names < N, other=0.0).to(tl.float32)[:, None]
        y_at = y_ptr + offsets[None, :] * N + names[:, None]
        mask = live[None, :] & (names < N)[:, None]
        tl.store(y_at, acc.to(y_ptr.dtype.element_ty), mask=mask)
    elif HAS_LORA:
        part = program % NUM_SLICES
        plane = program // NUM_SLICES % num_chunks
        unit = program // (NUM_SLICES * num_chunks)
        count = tl.load(header_ptr + 1)
        num_rows = tl.load(header_ptr + 3)
        rank_pages = tl.load(header_ptr + 5)
        row, rows, page, index, at_bridge = read_unit(units_ptr, unit, True)
        ranks = tl.arange(0, PAGE)
        begin = tl.multiple_of(plane * chunk, BLOCK_K)
        entries_ptr += part
        entry = find_strip(entries_ptr, page, unit < count, STRIDE)
        a_columns = ranks[None, :, None] * K + (begin + columns[:, None, :])
        x_at = x_ptr + offsets[None, None, :] * STRIDE_X + (begin + columns[:, :, None])
        walked = tl.minimum(chunk, K - begin)
        if PREFETCH:  # noqa: SIM102  a constant and a value of the device
            if (entry != 0) & (walked >= BLOCK_K):
                a_at, height = strip_at(heap_ptr, entry)
                length = tl.minimum(walked * ELEMENT, PREFETCH)
                _prefetch(a_at + begin, K, height, length, PAGE, SPLIT)
        wait_for_inputs(OVERLAPPED)
        while unit < count:
            # An adapter that lacks the module: no column is walked, no row written.
            live = offsets < tl.where(entry != 0, rows, 0)
            a_at, height = strip_at(heap_ptr, entry)
            acc = _walk(
                a_at + a_columns, x_at + row * STRIDE_X, height, live, columns, walked,
                tl.where(entry != 0, walked, 0), IS_EVEN, False, ROWS, PAGE, BLOCK_K, SPLIT,
                STAGES, UPCAST,
            )  # fmt: skip
            block = (plane * NUM_SLICES + part) * rank_pages + index
            there = planes_ptr + (block * num_rows + at_bridge) * PAGE
            at = there + offsets[None, :] * PAGE + ranks[:, None]
            tl.store(at, acc, mask=live[None, :])
            unit += shrinks
            row, rows, page, index, at_bridge = read_unit(units_ptr, unit, unit < count)
            entry = find_strip(entries_ptr, page, unit < count, STRIDE)


_launch = Launcher(_linear_few_kernel, launch_pdl=OVERLAPS)


def launch_linear_few(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    y = x.new_empty((x.shape[0], weight.shape[0]))
    _start(x, weight, bias, y, 0, (x.shape[0], 0, 0), (x, y, x, x, x), (False, 0, 1))
    return y


def launch_linear_shrink_few(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    site: SiteRows,
    plan: LoraPlan,
) -> tuple[torch.Tensor, Bridge]:
    num_slices, (num_tokens, width) = site.num_slices, x.shape
    chunk = SHORT_CHUNK if num_tokens <= SHORT_TOKENS else CHUNK
    if width > WIDE:
        chunk *= 2
    num_chunks = -(-width // chunk)
    shape = (num_chunks, num_slices, plan.max_rank_pages, plan.max_small_rows, PAGE_ROWS)
    planes = torch.empty(shape, dtype=torch.float32, device=x.device)
    y = x.new_empty((num_tokens, weight.shape[0]))
    shrinks = min(plan.max_units, num_tokens)  # an adapter with more pages: they take turns
    _start(
        x, weight, bias, y, shrinks * num_slices * num_chunks, (num_tokens, shrinks, chunk),
        (site.heap, planes, plan.header, plan.units, site.a_entries),
        (True, site.stride, num_slices),
    )  # fmt: skip
    return y, Bridge(planes, None)


def _start(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    more_programs: int,
    lengths: tuple[int, int, int],  # tokens, programs along the units, chunk
    lora: tuple[torch.Tensor, ...],  # heap, bridge, header, units, entries
    constants: tuple[bool, int, int],  # has LoRA, entries of a page, slices
) -> None:
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    height, width = weight.shape
    block_k, stages, split, prefetch = walk_of(height, width)
    assert lengths[2] % (block_k * split) == 0
    _launch(
        (more_programs + -(-height // BLOCK_N), 1, 1),
        (x, weight, weight if bias is None else bias, y, *lora[:2]),
        lora[2:],
        (
            *lengths,
            width,
            height,
            x.stride(0),
            bias is not None,
            *constants,
            FEW_ROWS,
            BLOCK_N,
            block_k,
            split,
            stages,
            prefetch if OVERLAPS and width >= block_k else 0,
            IS_INTERPRETED,
            OVERLAPS,
        ),
        split,
    )

"""The Triton kernel of `linear` for few rows: a program multiplies some rows of the weight with all
tokens; the shrink's pages are more rows of that kind, processed by the first programs.

A product of so few tokens is a walk over the weight. The tensor cores' tall side is the weight, the
tokens their narrow side. Programs do not split K, their two warps do: each walks every second block
of columns, as one batch of a dot, and the sums meet at the end. So a token's bits depend neither on
the number of tokens nor on adapters, its own included. The number of tokens and the lengths of the
shrink are no constants: one binary serves all steps of few rows.

The walk of one Llama-3-8B layer without attention on an H200 (2026-11-24), microseconds with no
adapter and one of rank 16 for one token: 117.1 and 124.4; one warp with blocks of 256 columns in 4
stages 124.6 and 130.6. Requesting the weight's first bytes into the second-level cache before x is
there gained nothing: 0 to 12 more with 512 to 4,096 bytes a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.backend import IS_INTERPRETED
from kernels.few_rows import FEW_ROWS
from kernels.lora_plan import PAGE_ROWS, Bridge, LoraPlan
from kernels.lora_rows import SiteRows
from kernels.triton_launch import OVERLAPS, Launcher, start_dependents, wait_for_inputs
from kernels.triton_lora_tiles import (
    PAGE,
    a_at,
    find_strip,
    load_scales,
    page_dot,
    read_unit,
)

BLOCK_N = 16
BLOCK_K = 128  # columns of a warp at a time
STAGES = 6  # of them, at a time
SPLIT = 2  # warps, each with blocks of its own; SPLIT * BLOCK_K <= SHORT_CHUNK
# Of K, of a program of the shrink, in multiples of a block: short where few programs shrink.
CHUNK, SHORT_CHUNK, SHORT_TOKENS = 1024, 512, 2
WIDE = 8192  # from here on K is cut into chunks of twice the length


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
        acc = page_dot(w, x, acc, x.dtype, UPCAST)
    return tl.sum(acc, axis=0)


@triton.jit
def shrink_unit(
    x_ptr, heap_ptr, planes_ptr, header_ptr, units_ptr, entries_ptr, program, shrinks, chunk,
    num_chunks, K: tl.constexpr, STRIDE_X: tl.constexpr, STRIDE: tl.constexpr,
    NUM_SLICES: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
    STAGES: tl.constexpr, UPCAST: tl.constexpr, OVERLAPPED: tl.constexpr,
):  # fmt: skip
    """Shrinks every `shrinks`th unit of the plan over a chunk of x's columns: a slice's pages of an
    adapter, times its tokens."""
    IS_EVEN: tl.constexpr = K % (SPLIT * BLOCK_K) == 0
    offsets = tl.arange(0, ROWS)
    # A warp walks every SPLITth block of columns.
    columns = tl.arange(0, SPLIT)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    part = program % NUM_SLICES
    plane = program // NUM_SLICES % num_chunks
    unit = program // (NUM_SLICES * num_chunks)
    count = tl.load(header_ptr + 1)
    num_rows = tl.load(header_ptr + 3)
    rank_pages = tl.load(header_ptr + 5)
    row, rows, page, index, at_bridge, weight = read_unit(units_ptr, unit, True)
    ranks = tl.arange(0, PAGE)
    begin = tl.multiple_of(plane * chunk, BLOCK_K)
    entries_ptr += part
    entry = find_strip(entries_ptr, page, unit < count, STRIDE)
    a_columns = ranks[None, :, None] * K + (begin + columns[:, None, :])
    x_at = x_ptr + offsets[None, None, :] * STRIDE_X + (begin + columns[:, :, None])
    walked = tl.minimum(chunk, K - begin)
    wait_for_inputs(OVERLAPPED)
    while unit < count:
        # An adapter that lacks the module: no column is walked, no row written.
        live = offsets < tl.where(entry != 0, rows, 0)
        numbers_at, height = a_at(heap_ptr, entry)
        acc = _walk(
            numbers_at + a_columns, x_at + row * STRIDE_X, height, live, columns, walked,
            tl.where(entry != 0, walked, 0), IS_EVEN, False, ROWS, PAGE, BLOCK_K, SPLIT,
            STAGES, UPCAST,
        )  # fmt: skip
        if heap_ptr.dtype.element_ty == tl.int8:
            acc *= load_scales(heap_ptr, entry)[:, None]
        block = (plane * NUM_SLICES + part) * rank_pages + index
        there = planes_ptr + (block * num_rows + at_bridge) * PAGE
        at = there + offsets[None, :] * PAGE + ranks[:, None]
        tl.store(at, acc * weight, mask=live[None, :])
        unit += shrinks
        row, rows, page, index, at_bridge, weight = read_unit(units_ptr, unit, unit < count)
        entry = find_strip(entries_ptr, page, unit < count, STRIDE)


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
    UPCAST: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    start_dependents(OVERLAPPED)
    IS_EVEN: tl.constexpr = K % (SPLIT * BLOCK_K) == 0
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
        w_at = w_ptr + first.to(tl.int64) * K + lanes[None, :, None] * K + columns[:, None, :]
        x_at = x_ptr + offsets[None, None, :] * STRIDE_X + columns[:, :, None]
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
        shrink_unit(
            x_ptr, heap_ptr, planes_ptr, header_ptr, units_ptr, entries_ptr, program, shrinks,
            chunk, num_chunks, K, STRIDE_X, STRIDE, NUM_SLICES, ROWS, BLOCK_K, SPLIT, STAGES,
            UPCAST, OVERLAPPED,
        )  # fmt: skip


_launch = Launcher(_linear_few_kernel, launch_pdl=OVERLAPS)


class ShrinkBeside(NamedTuple):
    """The arguments of a product's launch for the programs of the shrink beside it."""

    num_programs: int
    lengths: tuple[int, int, int]  # tokens, programs along the units, columns of a chunk
    tensors: tuple[torch.Tensor, ...]  # heap, bridge, header, units, entries
    constants: tuple[bool, int, int]  # has LoRA, entries of a page, slices

    @property
    def bridge(self) -> Bridge:
        return Bridge(self.tensors[1], None)


def no_shrink(x: torch.Tensor, y: torch.Tensor) -> ShrinkBeside:
    """Returns arguments without programs, for a product y of x; their tensors are not read."""
    return ShrinkBeside(0, (x.shape[0], 0, 0), (x, y, x, x, x), (False, 0, 1))


def shrink_beside(x: torch.Tensor, site: SiteRows, plan: LoraPlan) -> ShrinkBeside:
    """Returns the arguments for the shrink of x [T, K], with a new bridge [chunks, slices, rank
    pages, rows, PAGE]."""
    num_tokens, width = x.shape
    chunk = SHORT_CHUNK if num_tokens <= SHORT_TOKENS else CHUNK
    if width > WIDE:
        chunk *= 2
    num_chunks = -(-width // chunk)
    shape = (num_chunks, site.num_slices, plan.max_rank_pages, plan.max_small_rows, PAGE_ROWS)
    planes = torch.empty(shape, dtype=torch.float32, device=x.device)
    shrinks = min(plan.max_units, num_tokens)  # of an adapter with more pages: they take turns
    return ShrinkBeside(
        shrinks * site.num_slices * num_chunks,
        (num_tokens, shrinks, chunk),
        (site.heap, planes, plan.header, plan.units, site.a_entries),
        (True, site.stride, site.num_slices),
    )


def launch_linear_few(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    shrink: ShrinkBeside | None = None,
) -> torch.Tensor:
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    height, width = weight.shape
    y = x.new_empty((x.shape[0], height))
    shrink = shrink or no_shrink(x, y)
    _launch(
        (shrink.num_programs + -(-height // BLOCK_N), 1, 1),
        (x, weight, weight if bias is None else bias, y, *shrink.tensors[:2]),
        shrink.tensors[2:],
        (
            *shrink.lengths,
            width,
            height,
            x.stride(0),
            bias is not None,
            *shrink.constants,
            FEW_ROWS,
            BLOCK_N,
            BLOCK_K,
            SPLIT,
            STAGES,
            IS_INTERPRETED,
            OVERLAPS,
        ),
        SPLIT,
    )
    return y

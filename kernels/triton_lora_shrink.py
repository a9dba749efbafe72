"""x A^T of adapters' rank rows, times the weights of their pages, for all slices of a site in one
launch per kind of tile.

Small tiles: a program processes one page of one tile, one slice and one chunk of K, in one piece.
Chunks are fixed by K alone and their sums (planes) are added in order by the reader, so a row's
bits depend neither on its neighbours nor on their number. Large tiles: a program processes 64 rows
and a longer chunk for all slices; the last to finish adds the planes in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.backend import IS_INTERPRETED
from kernels.lora_plan import COUNTERS, LARGE_ROWS, PAGE_ROWS, SMALL_ROWS, UNITS, Bridge, LoraPlan
from kernels.lora_rows import SiteRows
from kernels.triton_int8 import widen
from kernels.triton_launch import (
    BESIDE_SIBLING,
    OVERLAPS,
    Launcher,
    start_dependents,
    wait_for_inputs,
    wait_for_sibling,
)
from kernels.triton_lora_tiles import (
    COUNTERS_OF_TILE,
    PAGE,
    find_strip,
    load_a,
    load_scales,
    num_programs,
    page_dot,
    read_columns,
    read_tile,
    read_unit,
)

NUM_WARPS = 1
NUM_PROGRAMS = 1584  # a dozen of one warp each per multiprocessor of an H200
LARGE_PART = 64
LARGE_CHUNK = 1024
LARGE_STEP = 128  # of K, in the pipelined loop
# For A in int8, which a step has to widen: 2,048 tokens at q, k and v of Llama-3-8B take 17 us with
# 64, 28 with 128; in bfloat16 14 (H100).
INT8_LARGE_STEP = 64
LARGE_WARPS = 4
LARGE_STAGES = 4


@triton.jit(do_not_specialize_on_alignment=["header_ptr", "units_ptr", "entries_ptr"])
def _shrink_kernel(
    x_ptr,  # [T, K]
    heap_ptr,
    planes_ptr,
    header_ptr,
    units_ptr,
    entries_ptr,  # of A, [pages, slices], STRIDE apart
    K: tl.constexpr,
    STRIDE_X: tl.constexpr,
    STRIDE: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    COUNT: tl.constexpr,  # the field of the header that has the number of units
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    UPCAST: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    start_dependents(OVERLAPPED)
    IS_EVEN: tl.constexpr = K % CHUNK == 0
    chunk = tl.program_id(0)
    part = tl.program_id(1)
    unit = tl.program_id(2)
    count = tl.load(header_ptr + COUNT)
    num_rows = tl.load(header_ptr + 3)
    rank_pages = tl.load(header_ptr + 5)
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    a_columns = chunk * CHUNK + read_columns(heap_ptr, CHUNK)
    entries_ptr += part
    plane = chunk * NUM_SLICES + part
    row, rows, page, index, at_bridge, weight = read_unit(units_ptr, unit, True)
    entry = find_strip(entries_ptr, page, unit < count, STRIDE)
    a = load_a(heap_ptr, entry, a_columns, K, IS_EVEN)
    if heap_ptr.dtype.element_ty == tl.int8:
        scales = load_scales(heap_ptr, entry)
    wait_for_inputs(OVERLAPPED)
    offsets = tl.arange(0, ROWS)[None, :]
    lanes = tl.arange(0, PAGE)
    while unit < count:
        unit += tl.num_programs(2)
        next_row, next_rows, next_page, next_index, next_at, next_weight = read_unit(
            units_ptr, unit, unit < count
        )
        next_entry = find_strip(entries_ptr, next_page, unit < count, STRIDE)
        if entry != 0:
            mask = offsets < rows
            x_mask = mask
            if not IS_EVEN:
                x_mask = mask & (columns < K)[:, None]
            x_rows = (row + offsets).to(tl.int64) * STRIDE_X
            # [CHUNK, ROWS]
            x = tl.load(x_ptr + x_rows + columns[:, None], mask=x_mask, other=0.0)
            # The page is the tall side of the product, the rows its narrow one: an mma's 16 by 8.
            bridge = page_dot(a, x, tl.zeros([PAGE, ROWS], dtype=tl.float32), x.dtype, UPCAST)
            if heap_ptr.dtype.element_ty == tl.int8:
                bridge *= scales[:, None]
            block = plane.to(tl.int64) * rank_pages + index
            at = planes_ptr + (block * num_rows + at_bridge) * PAGE
            tl.store(at + offsets * PAGE + lanes[:, None], bridge * weight, mask=mask)
        row, rows, index, at_bridge, weight = next_row, next_rows, next_index, next_at, next_weight
        entry = next_entry
        a = load_a(heap_ptr, entry, a_columns, K, IS_EVEN)
        if heap_ptr.dtype.element_ty == tl.int8:
            scales = load_scales(heap_ptr, entry)
    wait_for_sibling(OVERLAPPED)


@triton.jit
def _add_planes(sums_ptr, planes_ptr, stride, at, mask, NUM_PLANES: tl.constexpr):
    # Written by other programs just now: not from this one's first-level cache.
    total = tl.load(planes_ptr + at, mask=mask, other=0.0, cache_modifier=".cg")
    for plane in tl.static_range(1, NUM_PLANES):
        total += tl.load(
            planes_ptr + at + plane * stride, mask=mask, other=0.0, cache_modifier=".cg"
        )
    tl.store(sums_ptr + at, total, mask=mask)


@triton.jit(
    do_not_specialize_on_alignment=[
        "header_ptr",
        "tiles_ptr",
        "pages_ptr",
        "weights_ptr",
        "counters_ptr",
        "entries_ptr",
    ]
)
def _shrink_large_kernel(
    x_ptr,
    heap_ptr,
    planes_ptr,
    sums_ptr,
    header_ptr,
    tiles_ptr,
    pages_ptr,
    weights_ptr,
    counters_ptr,
    entries_ptr,
    K: tl.constexpr,
    STRIDE_X: tl.constexpr,
    STRIDE: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    NUM_PLANES: tl.constexpr,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    UPCAST: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait_for_inputs(OVERLAPPED)
    start_dependents(OVERLAPPED)  # the sibling of small tiles, which does not wait
    chunk = tl.program_id(0)
    tile = tl.program_id(1)
    count = tl.load(header_ptr + 2) * PARTS
    num_rows = tl.load(header_ptr + 4)
    rank_pages = tl.load(header_ptr + 5)
    row, rows, num_pages, first, page, at_bridge = read_tile(tiles_ptr, tile, True, ROWS, PARTS)
    if (rows <= 0) | (tile >= count):
        return
    # The first page shows which slices the adapter has: others may have fewer pages, or none.
    owns = num_pages > 0
    entry_0 = find_strip(entries_ptr, page, owns, STRIDE)
    entry_1 = entry_0
    entry_2 = entry_0
    if NUM_SLICES > 1:
        entry_1 = find_strip(entries_ptr + 1, page, owns, STRIDE)
    if NUM_SLICES > 2:
        entry_2 = find_strip(entries_ptr + 2, page, owns, STRIDE)
    if (entry_0 | entry_1 | entry_2) == 0:
        return
    IS_EVEN: tl.constexpr = K % CHUNK == 0 and CHUNK % STEP == 0
    offsets = tl.arange(0, ROWS)
    lanes = tl.arange(0, PAGE)
    steps = tl.arange(0, STEP)
    a_steps = read_columns(heap_ptr, STEP)
    mask = (offsets < rows)[:, None]
    x_at = x_ptr + (row + offsets).to(tl.int64)[:, None] * STRIDE_X
    stride = NUM_SLICES * rank_pages.to(tl.int64) * num_rows * PAGE
    at = (at_bridge + offsets).to(tl.int64)[:, None] * PAGE + lanes[None, :]
    for i in range(num_pages):
        page = tl.load(pages_ptr + first + i)
        entry_0 = find_strip(entries_ptr, page, True, STRIDE)
        if NUM_SLICES > 1:
            entry_1 = find_strip(entries_ptr + 1, page, True, STRIDE)
        if NUM_SLICES > 2:
            entry_2 = find_strip(entries_ptr + 2, page, True, STRIDE)
        acc_0 = tl.zeros([ROWS, PAGE], dtype=tl.float32)
        acc_1 = tl.zeros([ROWS, PAGE], dtype=tl.float32)
        acc_2 = tl.zeros([ROWS, PAGE], dtype=tl.float32)
        for k in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, K), STEP):
            columns = k + steps
            x_mask = mask
            if not IS_EVEN:
                x_mask = mask & (columns < K)[None, :]
            x = tl.load(x_at + columns[None, :], mask=x_mask, other=0.0)
            a = load_a(heap_ptr, entry_0, k + a_steps, K, IS_EVEN)
            acc_0 = page_dot(x, tl.trans(widen(a, x.dtype)), acc_0, x.dtype, UPCAST)
            if NUM_SLICES > 1:
                a = load_a(heap_ptr, entry_1, k + a_steps, K, IS_EVEN)
                acc_1 = page_dot(x, tl.trans(widen(a, x.dtype)), acc_1, x.dtype, UPCAST)
            if NUM_SLICES > 2:
                a = load_a(heap_ptr, entry_2, k + a_steps, K, IS_EVEN)
                acc_2 = page_dot(x, tl.trans(widen(a, x.dtype)), acc_2, x.dtype, UPCAST)
        if heap_ptr.dtype.element_ty == tl.int8:
            acc_0 *= load_scales(heap_ptr, entry_0)[None, :]
            if NUM_SLICES > 1:
                acc_1 *= load_scales(heap_ptr, entry_1)[None, :]
            if NUM_SLICES > 2:
                acc_2 *= load_scales(heap_ptr, entry_2)[None, :]
        weight = tl.load(weights_ptr + first + i)
        page_stride = num_rows.to(tl.int64) * PAGE
        there = planes_ptr + chunk * stride + i * page_stride + at
        slice_stride = rank_pages * page_stride
        tl.store(there, acc_0 * weight, mask=mask & (entry_0 != 0))
        if NUM_SLICES > 1:
            tl.store(there + slice_stride, acc_1 * weight, mask=mask & (entry_1 != 0))
        if NUM_SLICES > 2:
            tl.store(there + 2 * slice_stride, acc_2 * weight, mask=mask & (entry_2 != 0))
    if NUM_PLANES > 1:
        tl.debug_barrier()
        counter = counters_ptr + tile // PARTS * COUNTERS_OF_TILE + tile % PARTS
        arrived = tl.atomic_add(counter, 1, sem="acq_rel")
        if arrived == NUM_PLANES - 1:
            tl.debug_barrier()
            for block in range(NUM_SLICES * num_pages):
                which = block // num_pages * rank_pages + block % num_pages
                here = which * (num_rows.to(tl.int64) * PAGE) + at
                _add_planes(sums_ptr, planes_ptr, stride, here, mask, NUM_PLANES)
            tl.store(counter, 0)  # reset for the next site


_launch = Launcher(_shrink_kernel, launch_pdl=OVERLAPS)
_launch_large = Launcher(_shrink_large_kernel, launch_pdl=OVERLAPS, num_stages=LARGE_STAGES)


def chunk_of(in_features: int) -> int:
    """Returns the chunk, by the site alone. Of 128 to 2048 the fastest on an H200, with the
    expand's time to add the planes included."""
    return 256 if in_features <= 8192 else 512


def shrink(x: torch.Tensor, site: SiteRows, plan: LoraPlan) -> Bridge:
    # Before the kernel of large tiles: the memory that it gives back is still written beside that
    # of small tiles.
    planes = new_planes(x, site, plan)
    if plan.max_large and plan.max_rank_pages:
        sums = _shrink_large(x, site, plan)
        shrink_small_(planes, x, site, plan, overlapped=BESIDE_SIBLING)
        return Bridge(planes, sums)
    shrink_small_(planes, x, site, plan)
    return Bridge(planes, None)


def new_planes(x: torch.Tensor, site: SiteRows, plan: LoraPlan) -> torch.Tensor:
    """Returns the planes of small tiles, to be filled by `shrink_small_`."""
    num_chunks = -(-site.in_features // chunk_of(site.in_features))
    shape = (num_chunks, site.num_slices, plan.max_rank_pages, plan.max_small_rows, PAGE_ROWS)
    return torch.empty(shape, dtype=torch.float32, device=x.device)


def shrink_small_(
    planes: torch.Tensor,
    x: torch.Tensor,
    site: SiteRows,
    plan: LoraPlan,
    count: int = UNITS,
    overlapped: int = OVERLAPS,
) -> None:
    """Fills the planes. `count`: the field of the header with the number of units. `overlapped`:
    OVERLAPPED of the kernel."""
    assert x.stride(1) == 1
    if not plan.max_units:
        return
    num_chunks, num_slices = planes.shape[:2]
    _launch(
        (
            num_chunks,
            num_slices,
            num_programs(plan.max_units, num_chunks * num_slices, NUM_PROGRAMS),
        ),
        (x, site.heap, planes),
        (plan.header, plan.units, site.a_entries),
        (
            site.in_features,
            x.stride(0),
            site.stride,
            num_slices,
            count,
            chunk_of(site.in_features),
            SMALL_ROWS,
            IS_INTERPRETED,
            overlapped,
        ),
        NUM_WARPS,
    )


def _shrink_large(x: torch.Tensor, site: SiteRows, plan: LoraPlan) -> torch.Tensor:
    num_slices, width = site.num_slices, site.in_features
    num_chunks = -(-width // LARGE_CHUNK)
    parts = LARGE_ROWS // LARGE_PART
    assert parts <= COUNTERS
    shape = (num_chunks, num_slices, plan.max_rank_pages, plan.max_large_rows, PAGE_ROWS)
    planes = torch.empty(shape, dtype=torch.float32, device=x.device)
    sums = planes.new_empty(shape[1:]) if num_chunks > 1 else planes[0]
    _launch_large(
        (num_chunks, plan.max_large * parts, 1),
        (x, site.heap, planes, sums),
        (plan.header, plan.large, plan.pages, plan.weights, plan.counters, site.a_entries),
        (
            width,
            x.stride(0),
            site.stride,
            num_slices,
            num_chunks,
            LARGE_CHUNK,
            INT8_LARGE_STEP if site.is_int8 else LARGE_STEP,
            LARGE_PART,
            parts,
            IS_INTERPRETED,
            OVERLAPS,
        ),
        LARGE_WARPS,
    )
    return sums

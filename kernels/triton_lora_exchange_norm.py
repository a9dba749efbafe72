"""The Triton kernel of `lora_all_reduce_add_rms_norm`: `triton_lora_add_rms_norm` over ranks. A
program sends its row of the bridge beside its row of the product.

Each rank has a part of A's columns, so the bridge is the sum of all ranks' bridges, and B, which is
whole on every rank, is applied once to that sum. In the memory of a rank the bridges of all ranks
are planes of one bridge.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.collective import MAX_BRIDGE_PAGES, MAX_BRIDGE_ROWS, RowMemory
from kernels.lora_plan import Bridge, LoraPlan
from kernels.lora_rows import SiteRows
from kernels.triton_exchange_norm import (
    clear,
    find_ranks,
    missing,
    parts_at,
    send_row,
    sendable,
)
from kernels.triton_launch import OVERLAPS, Launcher, start_dependents, wait_for_inputs
from kernels.triton_lora_rows import (
    LENGTHS,
    METADATA,
    load_bridge,
    max_tiles,
    read_planes,
    request_row,
    summed_delta,
)
from kernels.triton_lora_tiles import PAGE, add_row, find_strip, load_strip, read_columns
from kernels.triton_rms_norm import add_and_norm, shape_of

_PAGES = tl.constexpr(MAX_BRIDGE_PAGES)
_ROWS = tl.constexpr(MAX_BRIDGE_ROWS)


@triton.jit
def _bridge_at(address, rank, page, row, lanes, BRIDGE: tl.constexpr):
    """Returns the addresses of some `lanes` of a rank's bridge of a row and page, in the memory of
    another or its own."""
    bridges = tl.multiple_of((address + BRIDGE).to(tl.pointer_type(tl.float32)), 16)
    return bridges + ((rank * _PAGES + page) * _ROWS + row) * PAGE + lanes


@triton.jit
def _page_at(address, rank, page, row, BRIDGE: tl.constexpr):
    """Returns the addresses [PAGE] of a whole page, as `_bridge_at` does."""
    return _bridge_at(address, rank, page, row, tl.arange(0, PAGE), BRIDGE)


@triton.jit
def _send_page(h, page, row, rank, addresses, BRIDGE: tl.constexpr, SIZE: tl.constexpr):
    """Writes this rank's bridge h [PAGE] of a row and page to the memory of every other rank. Pages
    in which the module has no rows have any content."""
    h = sendable(h)
    for peer in tl.static_range(SIZE):
        if peer != rank:
            tl.store(_page_at(addresses[peer], rank, page, row, BRIDGE), h)


@triton.jit
def _receive_row(
    x, h, live, columns, row, rank, own, HIDDEN: tl.constexpr, BLOCK: tl.constexpr,
    SIZE: tl.constexpr, ROWS, BRIDGE: tl.constexpr,
):  # fmt: skip
    """Returns the sums of all ranks' parts [columns], rounded once, and of their bridges [PAGE] of
    the first page, of which x and h are this rank's. `live`: the row has a page. Waits for part and
    bridge at once: one after the other takes longer."""
    inside = columns < HIDDEN
    has_page = (tl.arange(0, PAGE) < PAGE) & live
    total = tl.zeros([BLOCK], tl.float32)
    bridge = tl.zeros([PAGE], tl.float32)
    for peer in tl.static_range(SIZE):
        part = x
        other = h
        if peer != rank:
            at = parts_at(own, peer, columns, row, x.dtype, HIDDEN, ROWS)
            h_at = _page_at(own, peer, 0, row, BRIDGE)
            part = tl.load(at, mask=inside, other=0.0, volatile=True)
            other = tl.load(h_at, mask=has_page, other=0.0, volatile=True)
            while tl.max(missing(part) | tl.max(missing(other))) != 0:
                part = tl.load(at, mask=inside, other=0.0, volatile=True)
                other = tl.load(h_at, mask=has_page, other=0.0, volatile=True)
            clear(at, x.dtype, inside)
            clear(h_at, tl.float32, has_page)
        total += part.to(tl.float32)
        bridge += other
    return total.to(x.dtype), bridge


@triton.jit
def _more_pages(
    num_pages, row, rank, own, BRIDGE: tl.constexpr, SIZE: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """Returns the addresses of the others' bridges of a row behind the first page, and the mask of
    those that exist."""
    places = tl.arange(0, PARTS * _PAGES * PAGE)
    peer = places // (_PAGES * PAGE)
    page = places // PAGE % _PAGES
    at = _bridge_at(own, peer, page, row, places % PAGE, BRIDGE)
    return at, (peer < SIZE) & (peer != rank) & (page > 0) & (page < num_pages)


@triton.jit
def _add_more_pages(
    delta, num_pages, first, planes_ptr, rank_pages, num_rows, num_planes, heap_ptr, entries_ptr,
    pages_ptr, b_columns, row, rank, own, TYPE: tl.constexpr, BRIDGE: tl.constexpr,
    SIZE: tl.constexpr, PARTS: tl.constexpr, PLANES: tl.constexpr, STRIDE: tl.constexpr,
    HIDDEN: tl.constexpr, IS_EVEN: tl.constexpr,
):  # fmt: skip
    """Returns the delta with those of the row's pages behind the first one."""
    at, mask = _more_pages(num_pages, row, rank, own, BRIDGE, SIZE, PARTS)
    count = 1
    while count != 0:
        count = tl.max(missing(tl.load(at, mask=mask, other=0.0, volatile=True)))
    for page in range(1, num_pages):
        planes = load_bridge(
            planes_ptr, page, rank_pages, row, True, num_rows, num_planes, PLANES
        )  # fmt: skip
        own_h = tl.sum(planes, axis=0)
        h = tl.zeros([PAGE], tl.float32)
        for peer in tl.static_range(SIZE):
            # Not in a branch: the compiler fails to lay out its result (Triton 3.6 and 3.7).
            is_other = (tl.arange(0, PAGE) < PAGE) & (peer != rank)
            other_at = _page_at(own, peer, page, row, BRIDGE)
            other = tl.load(other_at, mask=is_other, other=0.0, volatile=True)
            h += tl.where(is_other, other, own_h)
        entry = find_strip(entries_ptr, tl.load(pages_ptr + first + page), True, STRIDE)
        b = load_strip(heap_ptr, entry, b_columns, HIDDEN, IS_EVEN)
        delta += summed_delta(tl.where(entry != 0, h, 0.0), b, TYPE)
    tl.debug_barrier()  # every warp has read its bridges
    clear(at, tl.float32, mask)
    return delta


@triton.jit(do_not_specialize=LENGTHS, do_not_specialize_on_alignment=METADATA)
def _lora_exchange_norm_kernel(
    x_ptr,  # [T, HIDDEN], this rank's part
    residual_ptr,  # becomes SCALE * (the sum of the parts + delta) + residual
    weight_ptr,
    out_ptr,
    planes_ptr,
    heap_ptr,
    ranks_ptr,
    header_ptr,
    tiles_ptr,
    pages_ptr,
    entries_ptr,
    num_tiles,
    num_planes,
    PLANES: tl.constexpr,
    STRIDE_X: tl.constexpr,
    STRIDE_RESIDUAL: tl.constexpr,
    STRIDE: tl.constexpr,
    HIDDEN: tl.constexpr,
    EPS: tl.constexpr,
    SCALE: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BRIDGE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    start_dependents(OVERLAPPED)
    IS_EVEN: tl.constexpr = HIDDEN == BLOCK
    token = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    b_columns = read_columns(heap_ptr, BLOCK)
    inside = columns < HIDDEN
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    num_rows, rank_pages, num_pages, first, entry, affine, b = request_row(
        header_ptr, tiles_ptr, heap_ptr, entries_ptr, token, num_tiles, b_columns, HIDDEN, STRIDE,
        0, TILES, IS_EVEN,
    )  # fmt: skip
    rank, own, addresses = find_ranks(ranks_ptr, SIZE)
    wait_for_inputs(OVERLAPPED)
    row = token.to(tl.int64)
    x = tl.load(x_ptr + row * STRIDE_X + columns, mask=inside, other=0.0)
    has_pages = num_pages > 0
    planes = load_bridge(
        planes_ptr, 0, rank_pages, token, has_pages, num_rows, num_planes, PLANES
    )  # fmt: skip
    send_row(x, columns, token, rank, addresses, HIDDEN, SIZE, ROWS)
    h = tl.sum(planes, axis=0)
    if has_pages:
        _send_page(h, 0, token, rank, addresses, BRIDGE, SIZE)
        for page in range(1, num_pages):
            planes = load_bridge(
                planes_ptr, page, rank_pages, token, True, num_rows, num_planes, PLANES
            )  # fmt: skip
            own_h = tl.sum(planes, axis=0)
            _send_page(own_h, page, token, rank, addresses, BRIDGE, SIZE)
    there = residual_ptr + row * STRIDE_RESIDUAL + columns
    residual = tl.load(there, mask=inside, other=0.0)
    x, h = _receive_row(
        x, h, has_pages, columns, token, rank, own, HIDDEN, BLOCK, SIZE, ROWS, BRIDGE
    )  # fmt: skip
    if has_pages:
        delta = summed_delta(tl.where(entry != 0, h, 0.0), b, x.dtype)
        if num_pages > 1:
            delta = _add_more_pages(
                delta, num_pages, first, planes_ptr, rank_pages, num_rows, num_planes, heap_ptr,
                entries_ptr, pages_ptr, b_columns, token, rank, own, x.dtype, BRIDGE, SIZE, PARTS,
                PLANES, STRIDE, HIDDEN, IS_EVEN,
            )  # fmt: skip
        if entry != 0:
            x = add_row(x, delta, heap_ptr, affine, columns, HIDDEN, 0)
    normed = add_and_norm(x, residual, there, weight, inside, HIDDEN, EPS, SCALE)
    tl.store(out_ptr + row * HIDDEN + columns, normed, mask=inside)


_launch = Launcher(_lora_exchange_norm_kernel, launch_pdl=OVERLAPS)


def launch_lora_exchange_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    bridge: Bridge,
    site: SiteRows,
    plan: LoraPlan,
    scale: float,
    memory: RowMemory,
) -> torch.Tensor:
    """Returns the normed sum [T, H]; the residual is the sum. The adapters have no affine rows."""
    rows, hidden = x.shape
    assert x.stride(1) == 1
    assert rows <= MAX_BRIDGE_ROWS
    assert not site.affine
    out = x.new_empty(x.shape)
    block, num_warps = shape_of(hidden)
    size, _ = memory.sizes
    _launch(
        (rows, 1, 1),
        (x, residual, weight, out, bridge.planes, site.heap, memory.ranks),
        (plan.header, plan.small, plan.pages, site.b_entries),
        (
            plan.max_small,
            *read_planes(bridge),
            x.stride(0),
            residual.stride(0),
            site.stride,
            hidden,
            eps,
            scale,
            *memory.sizes,
            memory.bridge_start(hidden * x.itemsize),
            triton.next_power_of_2(size),
            block,
            max_tiles(rows),
            OVERLAPS,
        ),
        num_warps,
    )
    return out

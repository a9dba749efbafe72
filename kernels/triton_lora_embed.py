"""The Triton kernel of `lora_embed_`: a program processes some columns of up to 16 rows of one
adapter.

All rows of a program gather their columns of A at once, because a row waits for four loads one
after the other: its id, the id that was drawn, the piece's entry, the column. Tensor cores multiply
them by B; a column times its page's weight is rounded to B's type first. In a step whose adapters
lack the embedding the counts of the plan's header are zero, and programs end at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.backend import IS_INTERPRETED
from kernels.lora_plan import EMBEDDING_LARGE, EMBEDDING_SMALL, LARGE_ROWS, LoraPlan
from kernels.lora_rows import SiteRows
from kernels.triton_launch import OVERLAPS, Launcher, start_overlapped
from kernels.triton_lora_tiles import (
    PAGE,
    a_at,
    find_strip,
    load_strip,
    num_programs,
    page_dot,
    read_columns,
    read_tile,
    strip_at,
)

ROWS = 16  # the tall side of an mma: a small tile and padding, or a part of a large one
BLOCK = 256  # 128 registers of a thread in bfloat16; 512 columns take 224
NUM_WARPS = 4
NUM_PROGRAMS = 1056  # twice as many as an H200 holds at a time


@triton.jit
def _add_rows(
    y_ptr, heap_ptr, token_ids_ptr, sources_ptr, drawn_ptr, pages_ptr, weights_ptr, a_entries_ptr,
    b_entries_ptr, row, rows, num_pages, first, page, columns, b_columns,
    HIDDEN: tl.constexpr, PIECE: tl.constexpr, STRIDE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Adds the delta to rows of one adapter, if it has the embedding."""
    IS_EVEN: tl.constexpr = HIDDEN % BLOCK == 0
    # The first page shows whether the adapter has the site: later ones may be beyond its rank.
    if find_strip(b_entries_ptr, page, (num_pages > 0) & (rows > 0), STRIDE) != 0:
        offsets = tl.arange(0, ROWS)
        lanes = tl.arange(0, PAGE)
        live = offsets < rows
        given = tl.load(token_ids_ptr + row + offsets, mask=live, other=0)
        source = tl.load(sources_ptr + row + offsets, mask=live, other=-1)
        earlier = tl.load(drawn_ptr + source, mask=source >= 0, other=0)
        token = tl.where(source < 0, given, tl.maximum(earlier, 0))
        y_at = y_ptr + (row + offsets).to(tl.int64)[:, None] * HIDDEN + columns[None, :]
        mask = live[:, None]
        if not IS_EVEN:
            mask = mask & (columns < HIDDEN)[None, :]
        y = tl.load(y_at, mask=mask, other=0.0)
        delta = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
        for i in range(num_pages):
            weight = tl.load(weights_ptr + first + i)
            page_entries = tl.load(pages_ptr + first + i).to(tl.int64) * STRIDE
            b = load_strip(
                heap_ptr, tl.load(b_entries_ptr + page_entries), b_columns, HIDDEN, IS_EVEN
            )
            entry = tl.load(a_entries_ptr + page_entries + token // PIECE, mask=live, other=0)
            column_at, height = a_at(heap_ptr, entry)
            column_at += token % PIECE
            exists = lanes[None, :] < height[:, None]
            h = tl.load(column_at[:, None] + lanes[None, :] * PIECE, mask=exists, other=0)
            h = h.to(tl.float32)
            if heap_ptr.dtype.element_ty == tl.int8:
                scales_at, _ = strip_at(heap_ptr, entry)
                scales_at = scales_at.to(tl.pointer_type(tl.float32), bitcast=True)
                h *= tl.load(scales_at[:, None] + lanes[None, :], mask=exists, other=0.0)
            delta = page_dot(h * weight, b, delta, y.dtype, UPCAST)
        tl.store(y_at, (y.to(tl.float32) + delta).to(y.dtype), mask=mask)


@triton.jit(
    do_not_specialize_on_alignment=[
        "token_ids_ptr",
        "sources_ptr",
        "drawn_ptr",
        "header_ptr",
        "small_ptr",
        "large_ptr",
        "pages_ptr",
        "weights_ptr",
        "a_entries_ptr",
        "b_entries_ptr",
    ]
)
def _lora_embed_kernel(
    y_ptr,  # [T, HIDDEN]
    heap_ptr,
    token_ids_ptr,
    sources_ptr,
    drawn_ptr,
    header_ptr,
    small_ptr,
    large_ptr,
    pages_ptr,
    weights_ptr,
    a_entries_ptr,  # [pages, pieces], STRIDE apart
    b_entries_ptr,  # [pages, 1], STRIDE apart
    HIDDEN: tl.constexpr,
    PIECE: tl.constexpr,  # columns of a strip of A
    STRIDE: tl.constexpr,
    SMALL_COUNT: tl.constexpr,
    LARGE_COUNT: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    UPCAST: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    start_overlapped(OVERLAPPED)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_columns = tl.program_id(0) * BLOCK + read_columns(heap_ptr, BLOCK)
    num_small = tl.load(header_ptr + SMALL_COUNT)
    num_large = tl.load(header_ptr + LARGE_COUNT) * PARTS
    tile = tl.program_id(1)
    while tile < num_small:
        row, rows, num_pages, first, page, _ = read_tile(small_ptr, tile, True, ROWS, 1)
        _add_rows(
            y_ptr, heap_ptr, token_ids_ptr, sources_ptr, drawn_ptr, pages_ptr, weights_ptr,
            a_entries_ptr, b_entries_ptr, row, rows, num_pages, first, page, columns, b_columns,
            HIDDEN, PIECE, STRIDE, ROWS, BLOCK, UPCAST,
        )  # fmt: skip
        tile += tl.num_programs(1)
    tile -= num_small
    while tile < num_large:
        row, rows, num_pages, first, page, _ = read_tile(large_ptr, tile, True, ROWS, PARTS)
        _add_rows(
            y_ptr, heap_ptr, token_ids_ptr, sources_ptr, drawn_ptr, pages_ptr, weights_ptr,
            a_entries_ptr, b_entries_ptr, row, rows, num_pages, first, page, columns, b_columns,
            HIDDEN, PIECE, STRIDE, ROWS, BLOCK, UPCAST,
        )  # fmt: skip
        tile += tl.num_programs(1)


_launch = Launcher(_lora_embed_kernel, launch_pdl=OVERLAPS)


def launch_lora_embed_(
    y: torch.Tensor,
    token_ids: torch.Tensor,
    sources: torch.Tensor,
    drawn: torch.Tensor,
    site: SiteRows,
    plan: LoraPlan,
) -> None:
    assert y.is_contiguous()
    hidden, parts = y.shape[1], LARGE_ROWS // ROWS
    tiles = plan.max_small + plan.max_large * parts
    if not tiles:
        return
    block = min(BLOCK, max(16, 1 << (hidden - 1).bit_length()))
    blocks = -(-hidden // block)
    _launch(
        (blocks, num_programs(tiles, blocks, NUM_PROGRAMS), 1),
        (y, site.heap),
        (
            token_ids,
            sources,
            drawn,
            plan.header,
            plan.small,
            plan.large if plan.max_large else plan.small,
            plan.pages,
            plan.weights,
            site.a_entries,
            site.b_entries,
        ),
        (
            hidden,
            site.piece,
            site.stride,
            EMBEDDING_SMALL,
            EMBEDDING_LARGE,
            ROWS,
            parts,
            block,
            IS_INTERPRETED,
            OVERLAPS,
        ),
        NUM_WARPS,
    )

"""The Triton kernel of `scatter_page`: a program copies one tile of a strip, or writes its
zeros."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["page"])
def _scatter_page_kernel(
    image_ptr,  # int32 words
    table_ptr,  # the same address, as int64
    tiles_ptr,  # [tiles, 5] int64
    page,
    TILE_WORDS: tl.constexpr,
):
    tile_ptr = tiles_ptr + 5 * tl.program_id(0)
    source = tl.load(table_ptr + tl.load(tile_ptr))
    address = tl.load(tile_ptr + 1) + page * tl.load(tile_ptr + 2)
    offset = tl.load(tile_ptr + 3)
    count = tl.load(tile_ptr + 4)
    # 16 rows of 2 bytes or more: strips begin and end at multiples of 8 words. Stated to the
    # compiler, loads and stores are 16 bytes wide.
    words = tl.multiple_of(source + offset, 8) + tl.arange(0, TILE_WORDS)
    there = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 32) + tl.arange(0, TILE_WORDS)
    lanes = tl.arange(0, TILE_WORDS)
    num_read = tl.where(source > 0, count, 0)
    values = tl.load(image_ptr + words, mask=lanes < tl.multiple_of(num_read, 8), other=0)
    tl.store(there, values, mask=lanes < tl.multiple_of(count, 8))


def launch_scatter_page(
    image: torch.Tensor, tiles: torch.Tensor, page: int, tile_words: int
) -> None:
    _scatter_page_kernel[(tiles.shape[0],)](
        image.view(torch.int32),
        image.view(torch.int64),
        tiles,
        page,
        TILE_WORDS=tile_words,
        num_warps=4,
    )

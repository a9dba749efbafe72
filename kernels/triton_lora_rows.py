"""The shared parts of the adapters' Triton kernels for few rows: a row's adapter, bridge and delta.

With so few rows nothing hides latency: a program processes one row and some columns, and requests
everything that no kernel of a step writes (plan, pages of weights, positions, angles) before it
waits for the preceding kernel. A row's place in the bridge is its own number, because there are no
large tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.few_rows import FEW_ROWS
from kernels.lora_plan import TILE_FIELDS, Bridge
from kernels.triton_int8 import widen
from kernels.triton_lora_tiles import PAGE, add_row, find_affine, find_strip, load_strip

METADATA = ("header_ptr", "tiles_ptr", "pages_ptr", "entries_ptr")
LENGTHS = ("num_tiles", "num_planes")  # of the plan at most; of the bridge
MIN_TILES = 64  # looked at for more than few rows: one binary for most steps
MIN_PLANES = 16  # read of a bridge, masked: one binary for most shapes
_TILE = tl.constexpr(TILE_FIELDS)
_TILES = tl.constexpr(FEW_ROWS)


@triton.jit
def find_row(header_ptr, tiles_ptr, token, num_tiles, TILES: tl.constexpr = _TILES):
    """Returns the pages of the row's adapter (0: none), the offset in the page list, and the first
    page. No load waits for another load. TILES: the most small tiles that the step can have, which
    are no more than its rows."""
    count = tl.load(header_ptr)
    tiles = tl.arange(0, TILES)
    at = tiles_ptr + tiles * _TILE
    inside = tiles < num_tiles
    starts = tl.load(at, mask=inside, other=0)
    heights = tl.load(at + 1, mask=inside, other=0)
    num_pages = tl.load(at + 2, mask=inside, other=0)
    first = tl.load(at + 3, mask=inside, other=0)
    page = tl.load(at + 4, mask=inside, other=0)
    is_ours = (tiles < count) & (token >= starts) & (token - starts < heights)
    return (
        tl.sum(tl.where(is_ours, num_pages, 0), axis=0),
        tl.sum(tl.where(is_ours, first, 0), axis=0),
        tl.sum(tl.where(is_ours, page, 0), axis=0),
    )


@triton.jit
def load_bridge(planes_ptr, block, blocks, row, live, num_rows, num_planes, PLANES: tl.constexpr):
    """Returns [planes, PAGE] of a row and page, not yet summed. block = slice * rank pages +
    page."""
    planes = tl.arange(0, PLANES)
    at = ((planes * blocks + block) * num_rows + row)[:, None] * PAGE + tl.arange(0, PAGE)[None, :]
    mask = (planes < tl.where(live, num_planes, 0))[:, None]
    return tl.load(planes_ptr + at, mask=mask, other=0.0)


@triton.jit
def row_delta(planes, b, TYPE: tl.constexpr):
    """Returns [columns]: h B, of a bridge h that is still in planes."""
    return summed_delta(tl.sum(planes, axis=0), b, TYPE)


@triton.jit
def summed_delta(h, b, TYPE: tl.constexpr):
    """Returns [columns]: h B; the bridge h [PAGE] is rounded to the activations' TYPE."""
    h = h.to(TYPE).to(tl.float32)
    return tl.sum(h[:, None] * widen(b, tl.float32), axis=0)


@triton.jit
def more_delta(
    delta, i, heap_ptr, entries_ptr, pages_ptr, first, planes_ptr, block, blocks, token, num_rows,
    num_planes, columns, width, PLANES: tl.constexpr, STRIDE: tl.constexpr, IS_EVEN: tl.constexpr,
    TYPE: tl.constexpr,
):  # fmt: skip
    """Adds the delta of the adapter's page i, if this module has rows there."""
    entry = find_strip(entries_ptr, tl.load(pages_ptr + first + i), True, STRIDE)
    b = load_strip(heap_ptr, entry, columns, width, IS_EVEN)
    live = entry != 0
    h = load_bridge(planes_ptr, block + i, blocks, token, live, num_rows, num_planes, PLANES)
    return delta + row_delta(h, b, TYPE)


@triton.jit
def request_row(
    header_ptr, tiles_ptr, heap_ptr, entries_ptr, token, num_tiles, b_columns,
    WIDTH: tl.constexpr, STRIDE: tl.constexpr, AFFINE: tl.constexpr, TILES: tl.constexpr,
    IS_EVEN: tl.constexpr,
):  # fmt: skip
    """Loads inputs that no kernel of a step writes: the row's adapter and its first page of B, for
    a program that processes the row's columns of the only slice. b_columns: of `read_columns`."""
    num_rows = tl.load(header_ptr + 3)
    rank_pages = tl.load(header_ptr + 5)
    num_pages, first, page = find_row(header_ptr, tiles_ptr, token, num_tiles, TILES)
    entry = find_strip(entries_ptr, page, num_pages > 0, STRIDE)
    affine = find_affine(entries_ptr, page, num_pages > 0, STRIDE, AFFINE)
    b = load_strip(heap_ptr, entry, b_columns, WIDTH, IS_EVEN)
    return num_rows, rank_pages, num_pages, first, entry, affine, b


@triton.jit
def add_requested(
    x, h, b, entry, affine, num_pages, first, num_rows, rank_pages, heap_ptr, entries_ptr,
    pages_ptr, planes_ptr, token, num_planes, columns, b_columns,
    WIDTH: tl.constexpr, PLANES: tl.constexpr, STRIDE: tl.constexpr, AFFINE: tl.constexpr,
    IS_EVEN: tl.constexpr,
):  # fmt: skip
    """Adds the delta of the row of `request_row` to x [columns]. h: the bridge of the first
    page, of `load_bridge`."""
    if entry != 0:
        delta = row_delta(h, b, x.dtype)
        for i in range(1, num_pages):
            delta = more_delta(
                delta, i, heap_ptr, entries_ptr, pages_ptr, first, planes_ptr, 0, rank_pages, token,
                num_rows, num_planes, b_columns, WIDTH, PLANES, STRIDE, IS_EVEN, x.dtype,
            )  # fmt: skip
        x = add_row(x, delta, heap_ptr, affine, columns, WIDTH, AFFINE)
    return x


def max_tiles(rows: int) -> int:
    """Returns the small tiles that a program looks at, for a step of so many rows."""
    return FEW_ROWS if rows <= FEW_ROWS else max(MIN_TILES, triton.next_power_of_2(rows))


def read_planes(bridge: Bridge) -> tuple[int, int]:
    """Returns planes of the bridge, planes to read"""
    num_planes = bridge.planes.shape[0]
    return num_planes, max(MIN_PLANES, 1 << (num_planes - 1).bit_length())

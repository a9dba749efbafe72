"""The Triton kernel of `lora_rope_kv_write`: a program processes one head of small tiles.

A head's two halves are two products on tensor cores, whose sums begin at qkv. They are rounded to
the activations' type, then rotated as `rope_kv_write` does it, product by product. So rows without
an adapter have the bits of `rope_kv_write` for heads of 128; rows with one may differ from the
expand's by a rounding. For 64 and 80 the compiler may contract a rotation's products and sums
differently (a unit in the last place, seen on an H200), and with q_norm and k_norm the squares of a
head may add up in another order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.backend import IS_INTERPRETED
from kernels.lora_plan import SMALL_ROWS, Bridge, LoraPlan
from kernels.lora_rows import SiteRows
from kernels.rope_write import RopeWrite
from kernels.triton_e4m3 import to_cached
from kernels.triton_launch import (
    BESIDE_SIBLING,
    OVERLAPS,
    Launcher,
    start_dependents,
    wait_for_inputs,
    wait_for_sibling,
)
from kernels.triton_lora_heads import (
    is_partial,
    norm_heads,
    pick_heads,
    place_lanes,
    query_factor,
    turn_lanes,
)
from kernels.triton_lora_mma import (
    BLOCK_COLUMNS,
    BLOCK_ROWS,
    add_page,
    drop_rows,
    load_block,
    load_bridge_rows,
    rows_of_small,
    swap_columns,
)
from kernels.triton_lora_rope_large import launch_lora_rope_large
from kernels.triton_lora_tiles import (
    affine_at,
    find_affine,
    find_strip,
    num_programs,
    read_columns,
    read_tile,
)

NUM_WARPS = 1
WIDE_WARPS = 4  # heads of 256: one warp would spill 1 KB a thread, two 800 bytes, four nothing
MAX_REGISTERS = 168  # of a thread: twelve programs then fit a multiprocessor
NUM_PROGRAMS = 1584  # twelve per multiprocessor of an H200


@triton.jit
def _offsets(ROWS: tl.constexpr, LANES: tl.constexpr):
    """Returns the row offsets of half a head, [ROWS * LANES / 32]: those of its first 32 columns,
    then those of its next. In this shape a thread has eight of each 32 columns, as `swap_columns`
    leaves them."""
    return tl.arange(0, ROWS * (LANES // 32)) % ROWS


@triton.jit
def _spread(
    at, live, ROWS: tl.constexpr, HALF: tl.constexpr, LANES: tl.constexpr, TURNING: tl.constexpr,
    SECOND: tl.constexpr,
):  # fmt: skip
    """Returns the addresses and the mask of the first or second half of the pairs of heads that
    begin at `at`, [ROWS * LANES / 32, 32]."""
    lane = tl.arange(0, ROWS * (LANES // 32))[:, None] // ROWS * 32 + tl.arange(0, 32)[None, :]
    place, gap = place_lanes(lane, HALF, TURNING)
    if is_partial(HALF, TURNING):
        if SECOND:
            place += gap
    elif SECOND:
        at += gap
    return at[:, None] + place, live[:, None] & (lane < HALF)


@triton.jit
def _load_half(
    at, live, ROWS: tl.constexpr, HALF: tl.constexpr, LANES: tl.constexpr, TURNING: tl.constexpr,
    SECOND: tl.constexpr,
):  # fmt: skip
    """Returns [ROWS, LANES]: half of the head at each row's address."""
    spread, mask = _spread(at, live, ROWS, HALF, LANES, TURNING, SECOND)
    parts = tl.reshape(tl.load(spread, mask=mask, other=0.0), [LANES // 32, ROWS, 32])
    return drop_rows(tl.reshape(tl.permute(parts, [1, 0, 2]), [ROWS, LANES]), ROWS)


@triton.jit
def _store_half(
    at, x, live, ROWS: tl.constexpr, HALF: tl.constexpr, LANES: tl.constexpr, TURNING: tl.constexpr,
    SECOND: tl.constexpr,
):  # fmt: skip
    spread, mask = _spread(at, live, ROWS, HALF, LANES, TURNING, SECOND)
    parts = tl.permute(tl.reshape(x, [ROWS, LANES // 32, 32]), [1, 0, 2])
    tl.store(spread, tl.reshape(parts, [ROWS * (LANES // 32), 32]), mask=mask)


@triton.jit
def _scale_rows(x, factors, ROWS: tl.constexpr, LANES: tl.constexpr):
    """Multiplies the rows of x [ROWS, LANES] by their factors in the order of `_offsets`."""
    wide = tl.broadcast_to(factors[:, None], [ROWS * (LANES // 32), 32])
    wide = tl.permute(tl.reshape(wide, [LANES // 32, ROWS, 32]), [1, 0, 2])
    return (x.to(tl.float32) * tl.reshape(wide, [ROWS, LANES])).to(x.dtype)


@triton.jit
def _affine_half(
    x, heap_ptr, entry, begin, width, ROWS: tl.constexpr, HALF: tl.constexpr, LANES: tl.constexpr,
    TURNING: tl.constexpr, TYPE: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    """Returns x + gain x + offset for x [ROWS, LANES] float32, half of the head that begins at the
    slice's column `begin`. The affine rows are read once for each row of x: a read for all would
    pass through shared memory."""
    at, rows = affine_at(heap_ptr, entry, TYPE)
    offsets = _offsets(ROWS, LANES)
    live = rows_of_small(offsets, ROWS)
    gain_at = at + begin + 0 * offsets
    gain = _load_half(gain_at, live & (rows > 0), ROWS, HALF, LANES, TURNING, SECOND)
    offset = _load_half(gain_at + width, live & (rows > 1), ROWS, HALF, LANES, TURNING, SECOND)
    return x + (x * gain.to(tl.float32) + offset.to(tl.float32))


@triton.jit
def _request_tile(
    tiles_ptr, tile, is_inside, is_live, heap_ptr, entries_ptr, cos_sin_ptr, positions_ptr,
    slots_ptr, part, low_columns, gap, width, STRIDE: tl.constexpr, AFFINE: tl.constexpr,
    HALF: tl.constexpr, TURNING: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
    LANES: tl.constexpr, IS_EVEN: tl.constexpr,
):  # fmt: skip
    """Loads, as no kernel of a step writes them, a tile, its first page of B, angles and slots.
    is_inside: of the table; is_live: below the number of tiles."""
    row, rows, num_pages, first, page, at_bridge = read_tile(tiles_ptr, tile, is_inside, TILE, 1)
    rows = tl.where(is_live, rows, 0)
    num_pages = tl.where(is_live, num_pages, 0)
    entry = find_strip(entries_ptr, page, num_pages > 0, STRIDE)
    affine = find_affine(entries_ptr, page, num_pages > 0, STRIDE, AFFINE)
    low_b = load_block(heap_ptr, entry, low_columns, width, LANES, IS_EVEN)
    high_b = load_block(heap_ptr, entry, low_columns + gap, width, LANES, IS_EVEN)
    offsets = _offsets(ROWS, LANES)
    token = row + offsets
    live = rows_of_small(offsets, rows)
    position = tl.load(positions_ptr + token, mask=live, other=0).to(tl.int64)
    slot = tl.load(slots_ptr + token, mask=live, other=-1).to(tl.int64)
    # Not read where no dimension turns.
    table = cos_sin_ptr + position * (2 * TURNING)
    cos = _load_half(table, live & (part != 2), ROWS, TURNING, LANES, TURNING, False)
    sin = _load_half(table, live & (part != 2), ROWS, TURNING, LANES, TURNING, True)
    return row, rows, num_pages, first, at_bridge, entry, affine, low_b, high_b, slot, cos, sin


@triton.jit
def _add_delta(
    low, high, h, low_b, high_b, affine, heap_ptr, entries_ptr, pages_ptr, planes_ptr, num_pages,
    first, at_bridge, rows, num_rows, block, blocks, begin, low_columns, gap, width,
    STRIDE: tl.constexpr, AFFINE: tl.constexpr, HALF: tl.constexpr, TURNING: tl.constexpr,
    NUM_PLANES: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Returns both halves of a head with the adapter's part: h times B of its first page, which is
    loaded, and of its further pages, and the affine rows."""
    low_sum, high_sum = low.to(tl.float32), high.to(tl.float32)
    if AFFINE:  # noqa: SIM102  this condition is the compiler's
        if affine != 0:
            low_sum = _affine_half(
                low_sum, heap_ptr, affine, begin, width, ROWS, HALF, LANES, TURNING, low.dtype,
                False,
            )  # fmt: skip
            high_sum = _affine_half(
                high_sum, heap_ptr, affine, begin, width, ROWS, HALF, LANES, TURNING, low.dtype,
                True,
            )  # fmt: skip
    low_sum = swap_columns(low_sum, ROWS, LANES)
    high_sum = swap_columns(high_sum, ROWS, LANES)
    low_sum = drop_rows(add_page(low_sum, h, low_b, ROWS, LANES, low.dtype, not EXACT), ROWS)
    high_sum = drop_rows(add_page(high_sum, h, high_b, ROWS, LANES, low.dtype, not EXACT), ROWS)
    for i in range(1, num_pages):
        more = find_strip(entries_ptr, tl.load(pages_ptr + first + i), True, STRIDE)
        more_low = load_block(heap_ptr, more, low_columns, width, LANES, LANES == HALF)
        more_high = load_block(heap_ptr, more, low_columns + gap, width, LANES, LANES == HALF)
        # Beyond the rank of this module the bridge holds arbitrary values.
        more_h = load_bridge_rows(
            planes_ptr, block + i, blocks, at_bridge, tl.where(more != 0, rows, 0), num_rows,
            NUM_PLANES, ROWS,
        )  # fmt: skip
        low_sum = add_page(low_sum, more_h, more_low, ROWS, LANES, low.dtype, not EXACT)
        high_sum = add_page(high_sum, more_h, more_high, ROWS, LANES, low.dtype, not EXACT)
        low_sum, high_sum = drop_rows(low_sum, ROWS), drop_rows(high_sum, ROWS)
    low = swap_columns(low_sum, ROWS, LANES).to(low.dtype)
    high = swap_columns(high_sum, ROWS, LANES).to(high.dtype)
    return low, high


@triton.jit(
    do_not_specialize_on_alignment=[
        "header_ptr",
        "tiles_ptr",
        "pages_ptr",
        "entries_ptr",
        "positions_ptr",
        "slots_ptr",
    ]
)
def _lora_rope_kernel(
    qkv_ptr,  # [T, (Hq + 2 * Hkv) * D]
    planes_ptr,
    heap_ptr,
    cos_sin_ptr,  # [max_positions, 2, TURNING]
    k_cache_ptr,  # [slots, Hkv, D]
    v_cache_ptr,
    q_norm_ptr,
    k_norm_ptr,
    q_ptr,  # [T, Hq, D]
    header_ptr,
    tiles_ptr,
    pages_ptr,
    entries_ptr,
    positions_ptr,
    slots_ptr,
    STRIDE_QKV: tl.constexpr,
    STRIDE: tl.constexpr,
    AFFINE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    TURNING: tl.constexpr,
    Q_BETA: tl.constexpr,
    Q_LENGTH: tl.constexpr,
    HAS_NORM: tl.constexpr,
    EPS: tl.constexpr,
    NUM_PLANES: tl.constexpr,
    TILE: tl.constexpr,  # rows of a tile, at most
    ROWS: tl.constexpr,  # of an mma
    LANES: tl.constexpr,  # for half a head
    EXACT: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    start_dependents(OVERLAPPED)
    IS_EVEN: tl.constexpr = LANES == HALF
    part, heads, head, before = pick_heads(tl.program_id(0), NUM_HEADS, NUM_KV_HEADS, 1)
    entries_ptr += part
    lane = tl.arange(0, LANES)
    exists = (lane < HALF)[None, :]
    width = heads * (2 * HALF)
    # Lanes that are in no half read B of its neighbour: their sums are used nowhere.
    place, gap = place_lanes(read_columns(heap_ptr, LANES), HALF, TURNING)
    low_columns = head * (2 * HALF) + place
    offsets = _offsets(ROWS, LANES)
    count = tl.load(header_ptr)
    num_rows = tl.load(header_ptr + 3)
    rank_pages = tl.load(header_ptr + 5)
    tile = tl.program_id(1)
    row, rows, num_pages, first, at_bridge, entry, affine, low_b, high_b, slot, cos, sin = (
        _request_tile(
            tiles_ptr, tile, True, tile < count, heap_ptr, entries_ptr, cos_sin_ptr, positions_ptr,
            slots_ptr, part, low_columns, gap, width, STRIDE, AFFINE, HALF, TURNING, TILE, ROWS,
            LANES, IS_EVEN,
        )
    )  # fmt: skip
    if HAS_NORM:
        # For each row: a load for all would pass through shared memory.
        norm_ptr = tl.where(part == 0, q_norm_ptr, k_norm_ptr) + 0 * offsets
        low_weight = _load_half(norm_ptr, offsets < TILE, ROWS, HALF, LANES, TURNING, False)
        high_weight = _load_half(norm_ptr, offsets < TILE, ROWS, HALF, LANES, TURNING, True)
    wait_for_inputs(OVERLAPPED)
    block = part * rank_pages
    blocks = 3 * rank_pages
    cached: tl.constexpr = k_cache_ptr.dtype.element_ty
    cache_ptr = tl.where(part == 1, k_cache_ptr, v_cache_ptr)
    while tile < count:
        owns = entry != 0
        live = rows_of_small(offsets, rows)
        token = (row + offsets).to(tl.int64)
        x_at = qkv_ptr + token * STRIDE_QKV + (before + head) * (2 * HALF)
        h = load_bridge_rows(
            planes_ptr, block, blocks, at_bridge, tl.where(owns, rows, 0), num_rows, NUM_PLANES,
            ROWS,
        )  # fmt: skip
        low = _load_half(x_at, live, ROWS, HALF, LANES, TURNING, False)
        high = _load_half(x_at, live, ROWS, HALF, LANES, TURNING, True)
        if owns:  # a row without a delta keeps its bits, also those of -0
            low, high = _add_delta(
                low, high, h, low_b, high_b, affine, heap_ptr, entries_ptr, pages_ptr, planes_ptr,
                num_pages, first, at_bridge, rows, num_rows, block, blocks, head * (2 * HALF),
                low_columns, gap, width, STRIDE, AFFINE, HALF, TURNING, NUM_PLANES, ROWS, LANES,
                EXACT,
            )  # fmt: skip
        if part != 2:
            if HAS_NORM:
                if not IS_EVEN:
                    low = tl.where(exists, low, 0.0)
                    high = tl.where(exists, high, 0.0)
                low, high = norm_heads(low, high, low_weight, high_weight, 2 * HALF, EPS)
            if TURNING > 0:
                turns = (lane < TURNING)[None, :]
                low, high = turn_lanes(low, high, cos, sin, turns, HALF, TURNING, EXACT)
        if part == 0:
            q_at = q_ptr + (token * NUM_HEADS + head) * (2 * HALF)
            if Q_BETA != 0.0:
                position = tl.load(positions_ptr + token, mask=live, other=0)
                factor = query_factor(position, Q_BETA, Q_LENGTH)
                low = _scale_rows(low, factor, ROWS, LANES)
                high = _scale_rows(high, factor, ROWS, LANES)
            _store_half(q_at, low, live, ROWS, HALF, LANES, TURNING, False)
            _store_half(q_at, high, live, ROWS, HALF, LANES, TURNING, True)
        else:
            # A negative slot marks a padding row of a CUDA graph.
            kv_at = cache_ptr + (slot * NUM_KV_HEADS + head) * (2 * HALF)
            written = live & (slot >= 0)
            _store_half(kv_at, to_cached(low, cached), written, ROWS, HALF, LANES, TURNING, False)
            _store_half(kv_at, to_cached(high, cached), written, ROWS, HALF, LANES, TURNING, True)
        tile += tl.num_programs(1)
        row, rows, num_pages, first, at_bridge, entry, affine, low_b, high_b, slot, cos, sin = (
            _request_tile(
                tiles_ptr, tile, tile < count, tile < count, heap_ptr, entries_ptr, cos_sin_ptr,
                positions_ptr, slots_ptr, part, low_columns, gap, width, STRIDE, AFFINE, HALF,
                TURNING, TILE, ROWS, LANES, IS_EVEN,
            )
        )  # fmt: skip
    wait_for_sibling(OVERLAPPED)


_launch = Launcher(_lora_rope_kernel, launch_pdl=OVERLAPS, num_stages=1, maxnreg=MAX_REGISTERS)


def launch_lora_rope_kv_write(
    qkv: torch.Tensor,
    bridge: Bridge,
    site: SiteRows,
    plan: LoraPlan,
    write: RopeWrite,
) -> torch.Tensor:
    q = write.new_q(qkv)
    num_heads, num_kv_heads, half = write.num_heads, write.num_kv_heads, write.head_dim // 2
    tensors = (
        site.heap,
        write.cos_sin if write.cos_sin is not None else qkv,
        write.k_cache,
        write.v_cache,
        qkv if write.q_norm is None else write.q_norm,
        qkv if write.k_norm is None else write.k_norm,
        q,
    )
    constants = (
        qkv.stride(0),
        site.stride,
        site.affine,
        num_heads,
        num_kv_heads,
        half,
        *write.constants,
        write.has_norm,
        write.eps,
    )
    overlapped: int = OVERLAPS
    if plan.max_large:
        launch_lora_rope_large(qkv, bridge, site, plan, write, tensors, constants)
        overlapped = BESIDE_SIBLING
    if plan.max_small:
        blocks = num_heads + 2 * num_kv_heads
        _launch(
            (blocks, num_programs(plan.max_small, blocks, NUM_PROGRAMS), 1),
            (qkv, bridge.planes, *tensors),
            (plan.header, plan.small, plan.pages, site.b_entries, write.positions, write.slots),
            (
                *constants,
                bridge.planes.shape[0],
                SMALL_ROWS,
                BLOCK_ROWS,
                max(BLOCK_COLUMNS, 1 << (half - 1).bit_length()),
                not IS_INTERPRETED,
                overlapped,
            ),
            NUM_WARPS if half <= 64 else WIDE_WARPS,
        )
    return q

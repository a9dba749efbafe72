"""The kernel of `lora_silu_mul` for small tiles on Hopper, in Gluon: B waits in shared memory.

A unit of work is 64 columns of gate and up of a tile. Programs of one warp, as many as run at once,
each process a stretch of the units, and have the pages of B of the next unit in flight as
asynchronous copies, those of the first unit before they wait for the preceding kernel. The copies
take no registers: held in registers, the pages filled the register file, and a second wave of
programs began only when the first had ended. The sums are products on tensor cores. They then
change from the layout of an mma to one in which a row is in registers of its own, and the
activation is computed for as many rows as the tile has.

Microseconds of a layer of Llama 3 8B without attention, beside the Triton kernel's form (H200,
2026-11-27; rows x adapters): 32 x 1 147 and 153, 32 x 32 166 and 170, 64 x 32 171 and 174, 128 x 32
188 and 197, 256 x 32 257 and 270, 256 x 1 246 and 258. 128 columns or further pages in flight, or
programs that do not fit all at once, are slower.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from kernels.lora_plan import SMALL_ROWS, Bridge, LoraPlan
from kernels.lora_rows import SiteRows
from kernels.triton_launch import Launcher, start_dependents, wait_for_inputs, wait_for_sibling
from kernels.triton_lora_tiles import PAGE, add_delta, find_strip, read_tile, strip_at
from kernels.triton_silu_mul import gated

COLUMNS = 64
# Registers of a thread: three programs then fit a scheduler, twelve a multiprocessor. Two with 255
# are as fast. Programs that wait for room are a second wave: with 128 columns, of which 1,320 fit,
# 32 rows of 32 adapters take 16.7 us alone, and 21.6 in 1,584 programs.
MAX_REGISTERS = 168
NUM_PROGRAMS = 1584  # twelve per multiprocessor of an H200
_ROWS = gl.constexpr(SMALL_ROWS)
_HALVINGS = gl.constexpr(SMALL_ROWS.bit_length() - 1)  # of the rows of a tile, down to one


@gluon.constexpr_function
def _sum_layout():
    return gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])


@gluon.constexpr_function
def _h_layout():
    return gl.DotOperandLayout(0, _sum_layout(), 2)


@gluon.constexpr_function
def _b_layout():
    return gl.DotOperandLayout(1, _sum_layout(), 2)


@gluon.constexpr_function
def _copy_layout(columns):
    """Returns the layout in which a thread copies eight neighbouring columns, 16 bytes."""
    return gl.BlockedLayout([1, 8], [256 // columns, columns // 8], [1, 1], [1, 0])


@gluon.constexpr_function
def _row_layout(rows, columns):
    """Returns the layout in which a thread has two neighbouring columns of every row."""
    return gl.BlockedLayout([rows, columns // 32], [1, 32], [1, 1], [1, 0])


@gluon.jit
def _request_page(
    b_smem, heap_ptr, entry, first_column, WIDTH: gl.constexpr, COLUMNS: gl.constexpr
):
    """Begins to copy columns of a strip of B [rows, WIDTH]; zeros beyond its rows and columns."""
    layout: gl.constexpr = _copy_layout(COLUMNS)
    lanes = gl.arange(0, PAGE, gl.SliceLayout(1, layout))[:, None]
    columns = first_column + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))[None, :]
    at, rows = strip_at(heap_ptr, entry)
    mask = (lanes < rows) & (columns < WIDTH)
    async_copy.async_copy_global_to_shared(b_smem, at + lanes * WIDTH + columns, mask=mask)


@gluon.jit
def _request_unit(
    b_smem, stage, unit, end, tiles_ptr, entries_ptr, heap_ptr, WIDTH: gl.constexpr,
    STRIDE: gl.constexpr, BLOCKS: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """Begins to copy the first pages of a unit as one group; zeros if it is not before `end`."""
    tile = unit // BLOCKS
    _row, _rows, num_pages, _first, page, _at = read_tile(tiles_ptr, tile, unit < end, _ROWS, 1)
    gate_entry = find_strip(entries_ptr, page, num_pages > 0, STRIDE)
    up_entry = find_strip(entries_ptr + 1, page, num_pages > 0, STRIDE)
    first_column = unit % BLOCKS * COLUMNS
    _request_page(b_smem.index(2 * stage), heap_ptr, gate_entry, first_column, WIDTH, COLUMNS)
    _request_page(b_smem.index(2 * stage + 1), heap_ptr, up_entry, first_column, WIDTH, COLUMNS)
    async_copy.commit_group()


@gluon.jit
def _load_bridge(
    planes_ptr, block, num_blocks, row, rows, num_rows, NUM_PLANES: gl.constexpr,
    TYPE: gl.constexpr,
):  # fmt: skip
    """Returns the bridge of a tile as an operand [2 * ROWS, PAGE]: its planes added in order, zeros
    beyond `rows`. block = slice * rank pages + page, num_blocks = slices * rank pages."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [1, 1], [1, 0])
    offsets = gl.arange(0, _ROWS, gl.SliceLayout(1, layout))[:, None]
    lanes = gl.arange(0, PAGE, gl.SliceLayout(0, layout))[None, :]
    stride = num_blocks.to(gl.int64) * num_rows * PAGE
    at = planes_ptr + (block * num_rows.to(gl.int64) + row) * PAGE + offsets * PAGE + lanes
    mask = (offsets < rows) & (lanes < PAGE)
    total = gl.load(at, mask=mask, other=0.0)
    for plane in gl.static_range(1, NUM_PLANES):
        total += gl.load(at + plane * stride, mask=mask, other=0.0)
    h = total.to(TYPE)
    padded = gl.join(h, gl.zeros_like(h)).permute(2, 0, 1).reshape([2 * _ROWS, PAGE])
    return gl.convert_layout(padded, _h_layout())


@gluon.jit
def _new_sum(COLUMNS: gl.constexpr):
    return gl.zeros([2 * _ROWS, COLUMNS], gl.float32, _sum_layout())


@gluon.jit
def _add_page(total, h, b_smem):
    """Returns total + h b, with zeros in the rows that a small tile never has: constants, which
    take no register from page to page."""
    total = mma_v2(h, b_smem.load(_b_layout()), total)
    is_row = gl.arange(0, 2 * _ROWS, gl.SliceLayout(1, total.type.layout)) < _ROWS
    return gl.where(is_row[:, None], total, 0.0)


@gluon.jit
def _first_rows(x, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Returns the first half of the rows of x [2 * ROWS, COLUMNS], which are registers of each
    thread."""
    first, _second = x.reshape([2, ROWS, COLUMNS]).permute(1, 2, 0).split()
    return first


@gluon.jit
def _finish(
    gate, up, gate_delta, up_delta, adds_gate, adds_up, gate_affine, up_affine, heap_ptr, out_at,
    rows, first_column, WIDTH: gl.constexpr, AFFINE: gl.constexpr, ROWS: gl.constexpr,
    COLUMNS: gl.constexpr, GELU: gl.constexpr,
):  # fmt: skip
    """Adds the deltas [ROWS, COLUMNS] and stores the activation of `rows` rows."""
    layout: gl.constexpr = _row_layout(ROWS, COLUMNS)
    gate = gl.convert_layout(gate, layout, assert_trivial=True)
    up = gl.convert_layout(up, layout, assert_trivial=True)
    gate_delta = gl.convert_layout(gate_delta, layout, assert_trivial=True)
    up_delta = gl.convert_layout(up_delta, layout, assert_trivial=True)
    offsets = gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
    columns = first_column + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    gate = add_delta(gate, gate_delta, adds_gate, heap_ptr, gate_affine, columns, WIDTH, AFFINE)
    up = add_delta(up, up_delta, adds_up, heap_ptr, up_affine, columns, WIDTH, AFFINE)
    mask = (offsets < rows) & (columns < WIDTH)[None, :]
    out_at += offsets * WIDTH + columns[None, :]
    gl.store(out_at, gated(gate, up, GELU, True), mask=mask)


@gluon.jit
def _load_rows(
    x_at, rows, first_column, STRIDE_X: gl.constexpr, WIDTH: gl.constexpr, COLUMNS: gl.constexpr
):
    """Returns columns of gate and up of the rows of a tile."""
    layout: gl.constexpr = _row_layout(_ROWS, COLUMNS)
    offsets = gl.arange(0, _ROWS, gl.SliceLayout(1, layout))[:, None]
    columns = first_column + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))[None, :]
    mask = (offsets < rows) & (columns < WIDTH)
    at = x_at + offsets * STRIDE_X + columns
    return gl.load(at, mask=mask, other=0.0), gl.load(at + WIDTH, mask=mask, other=0.0)


@gluon.jit
def _finish_tile(
    gate, up, gate_sum, up_sum, gate_entry, up_entry, gate_affine, up_affine, heap_ptr, out_at,
    rows, first_column, WIDTH: gl.constexpr, AFFINE: gl.constexpr, COLUMNS: gl.constexpr,
    GELU: gl.constexpr,
):  # fmt: skip
    """Adds the products to gate and up and stores the activation, of as few rows as the tile
    allows: the exponentials of a padding row cost as much as a row's."""
    layout: gl.constexpr = _row_layout(_ROWS, COLUMNS)
    gate_sum = gl.convert_layout(_first_rows(gate_sum, _ROWS, COLUMNS), layout)
    up_sum = gl.convert_layout(_first_rows(up_sum, _ROWS, COLUMNS), layout)
    adds_gate = gate_entry != 0
    adds_up = up_entry != 0
    for halvings in gl.static_range(_HALVINGS + 1):
        if (rows > (_ROWS >> halvings) // 2) & (rows <= _ROWS >> halvings):
            _finish(
                gate, up, gate_sum, up_sum, adds_gate, adds_up, gate_affine, up_affine, heap_ptr,
                out_at, rows, first_column, WIDTH, AFFINE, _ROWS >> halvings, COLUMNS, GELU,
            )  # fmt: skip
        if halvings < _HALVINGS:
            gate = _first_rows(gate, _ROWS >> halvings + 1, COLUMNS)
            up = _first_rows(up, _ROWS >> halvings + 1, COLUMNS)
            gate_sum = _first_rows(gate_sum, _ROWS >> halvings + 1, COLUMNS)
            up_sum = _first_rows(up_sum, _ROWS >> halvings + 1, COLUMNS)


@gluon.jit
def _sum_pages(
    gate_h, up_h, gate_b, up_b, num_pages, first, pages_ptr, entries_ptr, heap_ptr, planes_ptr,
    blocks, rank_pages, at_bridge, rows, num_rows, first_column, WIDTH: gl.constexpr,
    STRIDE: gl.constexpr, NUM_PLANES: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """Returns h B of gate and of up over several pages. The first ones have arrived in shared
    memory, and the others take their places."""
    gate_sum = _add_page(_new_sum(COLUMNS), gate_h, gate_b)
    up_sum = _add_page(_new_sum(COLUMNS), up_h, up_b)
    for i in range(1, num_pages):
        page = gl.load(pages_ptr + first + i)
        gate_entry = find_strip(entries_ptr, page, True, STRIDE)
        up_entry = find_strip(entries_ptr + 1, page, True, STRIDE)
        _request_page(gate_b, heap_ptr, gate_entry, first_column, WIDTH, COLUMNS)
        _request_page(up_b, heap_ptr, up_entry, first_column, WIDTH, COLUMNS)
        async_copy.commit_group()
        # Beyond the rank of this module the bridge holds arbitrary values.
        gate_h = _load_bridge(
            planes_ptr, i, blocks, at_bridge, gl.where(gate_entry != 0, rows, 0), num_rows,
            NUM_PLANES, gate_h.dtype,
        )  # fmt: skip
        up_h = _load_bridge(
            planes_ptr, rank_pages + i, blocks, at_bridge, gl.where(up_entry != 0, rows, 0),
            num_rows, NUM_PLANES, up_h.dtype,
        )  # fmt: skip
        async_copy.wait_group(0)
        gate_sum = _add_page(gate_sum, gate_h, gate_b)
        up_sum = _add_page(up_sum, up_h, up_b)
    return gate_sum, up_sum


@gluon.jit(do_not_specialize_on_alignment=["header_ptr", "tiles_ptr", "pages_ptr", "entries_ptr"])
def _lora_silu_mul_units_kernel(
    x_ptr,  # [T, 2 * WIDTH]
    planes_ptr,
    heap_ptr,
    out_ptr,  # [T, WIDTH]
    header_ptr,
    tiles_ptr,
    pages_ptr,
    entries_ptr,  # of B, [pages, 2], STRIDE apart
    WIDTH: gl.constexpr,
    STRIDE_X: gl.constexpr,
    STRIDE: gl.constexpr,
    AFFINE: gl.constexpr,
    NUM_PLANES: gl.constexpr,
    COLUMNS: gl.constexpr,
    GELU: gl.constexpr,
    OVERLAPPED: gl.constexpr,
):
    start_dependents(OVERLAPPED)
    TYPE: gl.constexpr = x_ptr.dtype.element_ty
    BLOCKS: gl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    b_smem = gl.allocate_shared_memory(TYPE, [4, PAGE, COLUMNS], swizzled)  # two units
    num_units = gl.load(header_ptr) * BLOCKS
    num_rows = gl.load(header_ptr + 3)
    rank_pages = gl.load(header_ptr + 5)
    blocks = 2 * rank_pages
    # No product of the two counts: it exceeds 2^31 from 3,027 tiles of 28,672 columns on.
    share = num_units // gl.num_programs(0)
    longer = num_units % gl.num_programs(0)  # programs with one unit more
    unit = gl.program_id(0) * share + gl.minimum(gl.program_id(0), longer)
    end = unit + share + (gl.program_id(0) < longer).to(gl.int32)
    _request_unit(
        b_smem, 0, unit, end, tiles_ptr, entries_ptr, heap_ptr, WIDTH, STRIDE, BLOCKS, COLUMNS
    )
    wait_for_inputs(OVERLAPPED)
    gate_h = gl.zeros([2 * _ROWS, PAGE], TYPE, _h_layout())
    up_h = gl.zeros([2 * _ROWS, PAGE], TYPE, _h_layout())
    turn = 0
    seen = -1
    while unit < end:
        _request_unit(
            b_smem, 1 - turn, unit + 1, end, tiles_ptr, entries_ptr, heap_ptr, WIDTH, STRIDE,
            BLOCKS, COLUMNS,
        )  # fmt: skip
        tile = unit // BLOCKS
        first_column = unit % BLOCKS * COLUMNS
        row, rows, num_pages, first, page, at_bridge = read_tile(tiles_ptr, tile, True, _ROWS, 1)
        owns = num_pages > 0
        gate_entry = find_strip(entries_ptr, page, owns, STRIDE)
        up_entry = find_strip(entries_ptr + 1, page, owns, STRIDE)
        gate_affine = gate_entry
        up_affine = up_entry
        if AFFINE:
            gate_affine = find_strip(entries_ptr + AFFINE, page, owns, STRIDE)
            up_affine = find_strip(entries_ptr + 1 + AFFINE, page, owns, STRIDE)
        if tile != seen:  # most units have the tile of the one before
            gate_h = _load_bridge(
                planes_ptr, 0, blocks, at_bridge, gl.where(gate_entry != 0, rows, 0), num_rows,
                NUM_PLANES, TYPE,
            )  # fmt: skip
            up_h = _load_bridge(
                planes_ptr, rank_pages, blocks, at_bridge, gl.where(up_entry != 0, rows, 0),
                num_rows, NUM_PLANES, TYPE,
            )  # fmt: skip
        seen = tile
        x_at = x_ptr + row.to(gl.int64) * STRIDE_X
        out_at = out_ptr + row.to(gl.int64) * WIDTH
        gate_b = b_smem.index(2 * turn)
        up_b = b_smem.index(2 * turn + 1)
        # Two ways to the end, so that no sum takes registers from page to page where there is one.
        if num_pages > 1:
            async_copy.wait_group(1)
            gate_sum, up_sum = _sum_pages(
                gate_h, up_h, gate_b, up_b, num_pages, first, pages_ptr, entries_ptr, heap_ptr,
                planes_ptr, blocks, rank_pages, at_bridge, rows, num_rows, first_column, WIDTH,
                STRIDE, NUM_PLANES, COLUMNS,
            )  # fmt: skip
            gate, up = _load_rows(x_at, rows, first_column, STRIDE_X, WIDTH, COLUMNS)
            _finish_tile(
                gate, up, gate_sum, up_sum, gate_entry, up_entry, gate_affine, up_affine, heap_ptr,
                out_at, rows, first_column, WIDTH, AFFINE, COLUMNS, GELU,
            )  # fmt: skip
        else:
            gate, up = _load_rows(x_at, rows, first_column, STRIDE_X, WIDTH, COLUMNS)
            async_copy.wait_group(1)
            gate_sum = _add_page(_new_sum(COLUMNS), gate_h, gate_b)
            up_sum = _add_page(_new_sum(COLUMNS), up_h, up_b)
            _finish_tile(
                gate, up, gate_sum, up_sum, gate_entry, up_entry, gate_affine, up_affine, heap_ptr,
                out_at, rows, first_column, WIDTH, AFFINE, COLUMNS, GELU,
            )  # fmt: skip
        turn = 1 - turn
        unit += 1
    wait_for_sibling(OVERLAPPED)


_launch = Launcher(_lora_silu_mul_units_kernel, launch_pdl=True, maxnreg=MAX_REGISTERS)


def launch_silu_mul_units(
    out: torch.Tensor,  # [T, I]
    gate_up: torch.Tensor,  # [T, 2 * I], in a type of 16 bits as the adapters
    bridge: Bridge,
    site: SiteRows,
    plan: LoraPlan,
    is_gelu: bool,
    overlapped: int,
) -> None:
    """Fills the rows of `out` that are in small tiles."""
    width = out.shape[1]
    _launch(
        (min(plan.max_small * -(-width // COLUMNS), NUM_PROGRAMS), 1, 1),
        (gate_up, bridge.planes, site.heap, out),
        (plan.header, plan.small, plan.pages, site.b_entries),
        (
            width,
            gate_up.stride(0),
            site.stride,
            site.affine,
            bridge.planes.shape[0],
            COLUMNS,
            is_gelu,
            overlapped,
        ),
        1,
    )

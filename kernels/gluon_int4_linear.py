"""The kernel of a 4-bit `linear` for up to 256 rows on Hopper, in Gluon.

A program has four warpgroups that multiply and a warp that fetches with the bulk copy engine. A
warpgroup unpacks 64 rows of the weight into registers, the left side of Hopper's wide product
(wgmma); up to 64 tokens lie in shared memory as its right side. The float32 sum of a group is
multiplied by the group's scale, so no weight is rounded. The warpgroups have 64 rows each, or share
rows and split K: between the halves of the bytes, and then also between pairs of groups; their sums
are added in shared memory. Where even that leaves multiprocessors idle and K is long, programs
split K, and a second launch adds the parts. All sums have an order that follows the shape of the
weight alone, so a row has the same bits among any number of rows.

On an H200 a wide product of 64 rows of the weight by 16, 32 and 64 tokens takes about 30, 36 and 57
cycles of a multiprocessor, of which the arithmetic is 8, 16 and 32: from 32 tokens on the kernel is
bound by it, with fewer by the bytes. mma of a warp (16 x 8) is slower from 32 tokens on. Copies by
cp.async instead of the bulk copy engine take a quarter longer: they need a fence before the
product, which waits for the copies ahead.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.gluon_attention import async_load, barrier
from kernels.int4 import Int4Rows
from kernels.triton_int4 import pointers, scales_of, unpacking
from kernels.triton_launch import OVERLAPS, launch, start_dependents, wait_for_inputs
from kernels.triton_split_sum import add_splits

MAX_TILE = 64  # tokens
_ROWS = gl.constexpr(64)  # of the weight, of a warpgroup
_WARPGROUPS = gl.constexpr(4)
_MULTIPROCESSORS = 132  # of an H100
_LEAST_COLUMNS = 4096  # of a program that has a part of K
_STAGE_BYTES = 160 * 1024  # of shared memory, of all stages; up to 48 KB are for sums
_MAX_STAGES = 4  # at 128 columns a group, more where a group has fewer
# Times by which a program with shared rows takes longer for a row: it reads the tokens more often.
_COST = {1: 1.0, 2: 1.1, 4: 1.25}

_LOW_BF16 = gl.constexpr(unpacking("bf16x2", (0,)))
_HIGH_BF16 = gl.constexpr(unpacking("bf16x2", (1,)))
_LOW_FP16 = gl.constexpr(unpacking("f16x2", (0,)))
_HIGH_FP16 = gl.constexpr(unpacking("f16x2", (1,)))
_OPERANDS = gl.constexpr("=&r,=&r,r,r,r")


@dataclass(frozen=True, slots=True)
class WideTile:
    """The division of a product's work. The bits of a row depend on it."""

    shares: int  # 1, 2, 4: warpgroups that share 64 rows of the weight, each with its part of K
    splits: int  # parts of K that are different programs


@gluon.constexpr_function
def _sum_layout(tokens):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tokens, 16])


@gluon.constexpr_function
def _word_layout(piece):
    """Returns the layout of stored bytes [64, piece] in which a thread has the words that it
    multiplies: of each 16 columns one word, of the rows i and i + 8 of its warp."""
    registers = [[0, 1], [0, 2], [8, 0]]
    column = 16
    while column < piece:
        registers.append([0, column])
        column *= 2
    lanes = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, piece])


@gluon.constexpr_function
def _exchange_layout(tokens):
    return gl.SwizzledSharedLayout(4, 1, min(8, tokens // 4), [1, 0])


@gluon.jit
def _unpack(w, add, HIGH: gl.constexpr, layout: gl.constexpr):
    """Returns q - zero of one half of the bytes w [64, piece], as a left side with columns in their
    order. add: -zero and the magic number, see `triton_int4`."""
    OPERANDS: gl.constexpr = _OPERANDS
    if add.dtype == gl.bfloat16:
        CODE: gl.constexpr = _HIGH_BF16 if HIGH else _LOW_BF16
        a = gl.inline_asm_elementwise(CODE, OPERANDS, [w, add], gl.bfloat16, True, 4)
    else:
        CODE_FP16: gl.constexpr = _HIGH_FP16 if HIGH else _LOW_FP16
        a = gl.inline_asm_elementwise(CODE_FP16, OPERANDS, [w, add], gl.float16, True, 4)
    # Places 4 t + 2 i + j are columns 8 i + 2 t + j: other names of the same registers.
    a = a.reshape([w.shape[0], w.shape[1] // 16, 4, 2, 2]).permute((0, 1, 3, 2, 4))
    return gl.convert_layout(a.reshape([w.shape[0], w.shape[1]]), layout)


@gluon.jit
def _fetch_weight(
    w_desc, w_smem, full, stage, first_row, pair, GROUP: gl.constexpr, BYTES: gl.constexpr
):
    """Begins to copy a pair of the weight into a stage, which is full after BYTES bytes."""
    PIECE: gl.constexpr = w_desc.block_type.shape[1]
    PIECES: gl.constexpr = GROUP // PIECE
    mbarrier.expect(full.index(stage), BYTES)
    for i in gl.static_range(PIECES):
        at = [first_row, pair * GROUP + i * PIECE]
        async_load(w_desc, at, full.index(stage), w_smem.index(stage * PIECES + i))


@gluon.jit
def _fetch(
    x_desc, w_desc, x_smem, w_smem, full, empty, begin, end, first_row, first_token,
    GROUP: gl.constexpr, STAGES: gl.constexpr, OVERLAPPED: gl.constexpr,
):  # fmt: skip
    """Fills the stages with pairs of groups: of the weight, then of the tokens, which an earlier
    kernel may still write."""
    PIECE: gl.constexpr = x_desc.block_type.shape[1]
    PIECES: gl.constexpr = GROUP // PIECE
    ROWS: gl.constexpr = w_desc.block_type.shape[0]
    TOKENS: gl.constexpr = x_desc.block_type.shape[0]
    BYTES: gl.constexpr = GROUP * (ROWS + 4 * TOKENS)
    for ahead in gl.static_range(STAGES):
        if begin + ahead < end:
            _fetch_weight(w_desc, w_smem, full, ahead, first_row, begin + ahead, GROUP, BYTES)
    wait_for_inputs(OVERLAPPED)
    for pair in range(begin, end):
        count = pair - begin
        stage = count % STAGES
        if count >= STAGES:
            mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
            _fetch_weight(w_desc, w_smem, full, stage, first_row, pair, GROUP, BYTES)
        for i in gl.static_range(2 * PIECES):
            at = [first_token, pair * (2 * GROUP) + i * PIECE]
            async_load(x_desc, at, full.index(stage), x_smem.index(stage * (2 * PIECES) + i))


@gluon.jit
def _add_group(
    acc, x_smem, w_smem, stage, zeros, scale, BLOCK: gl.constexpr, HIGH: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """Returns acc [64, tokens] plus the products of one group. zeros: its zero points [64]
    float32; scale: [64]."""
    TYPE: gl.constexpr = x_smem.dtype
    MAGIC: gl.constexpr = 1024.0 if gl.float16 == TYPE else 128.0
    PIECE: gl.constexpr = x_smem.shape[2]
    PIECES: gl.constexpr = GROUP // PIECE
    words: gl.constexpr = _word_layout(PIECE)
    left: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    add = gl.convert_layout((-MAGIC - zeros).to(TYPE), gl.SliceLayout(1, words))
    add = gl.expand_dims(add, 1).broadcast_to(_ROWS, PIECE)
    x_at = stage * (2 * PIECES) + HIGH * PIECES
    w = w_smem.index(stage * PIECES).slice(BLOCK * _ROWS, _ROWS).load(words)
    a = _unpack(w, add, HIGH, left)
    none = gl.zeros_like(acc)
    total = warpgroup_mma(a, x_smem.index(x_at).permute((1, 0)), none, use_acc=False, is_async=True)
    # The left sides are named in the waits: their registers are not free until the products end.
    if PIECES == 2:
        w = w_smem.index(stage * PIECES + 1).slice(BLOCK * _ROWS, _ROWS).load(words)
        b = _unpack(w, add, HIGH, left)
        total = warpgroup_mma(b, x_smem.index(x_at + 1).permute((1, 0)), total, is_async=True)
        total, a, b = warpgroup_mma_wait(0, [total, a, b])
    else:
        total, a = warpgroup_mma_wait(0, [total, a])
    return acc + total * scale[:, None]


@gluon.jit
def _read_words(scales_ptr, zeros_ptr, pair, rows, N: gl.constexpr, HAS_ZEROS: gl.constexpr):
    """Returns the words with the scales, and with the zero points, of a pair's rows."""
    scales = gl.load(scales_ptr + pair * N + rows, mask=rows < N, other=0)
    zeros = scales
    if HAS_ZEROS:
        zeros = gl.load(zeros_ptr + pair // 4 * N + rows, mask=rows < N, other=0) >> (pair % 4 * 8)
    return scales, zeros


@gluon.jit
def _zero(word, HIGH: gl.constexpr, HAS_ZEROS: gl.constexpr):
    if HAS_ZEROS:
        zero = ((word >> (4 * HIGH)) & 15).to(gl.float32)
    else:
        zero = gl.full(word.shape, 8.0, gl.float32, word.type.layout)
    return zero


@gluon.jit
def _multiply(
    WARPGROUP: gl.constexpr, x_smem, w_smem, sums_smem, full, empty, done, scales_ptr, zeros_ptr,
    bias_ptr, y_ptr, num_tokens, begin, end, first_row, first_token, split, N: gl.constexpr,
    HAS_BIAS: gl.constexpr, GROUP: gl.constexpr, HAS_ZEROS: gl.constexpr, IN_HALF: gl.constexpr,
    SHARES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Adds up one warpgroup's part and, if it is the first of its rows, all parts of the rows."""
    BLOCKS: gl.constexpr = _WARPGROUPS // SHARES  # of rows
    BLOCK: gl.constexpr = WARPGROUP % BLOCKS
    SHARE: gl.constexpr = WARPGROUP // BLOCKS
    STRIDE: gl.constexpr = 2 if SHARES == 4 else 1  # pairs
    HIGH: gl.constexpr = SHARE % 2
    TOKENS: gl.constexpr = x_smem.shape[1]
    layout: gl.constexpr = _sum_layout(TOKENS)
    rows = first_row + BLOCK * _ROWS + gl.arange(0, _ROWS, gl.SliceLayout(1, layout))
    acc = gl.zeros([_ROWS, TOKENS], gl.float32, layout)
    count = SHARE // 2
    first = gl.minimum(begin + count, end - 1)
    scale_word, zero_word = _read_words(scales_ptr, zeros_ptr, first, rows, N, HAS_ZEROS)
    for pair in range(begin + count, end, STRIDE):
        stage = count % STAGES
        even, odd = scales_of(scale_word, IN_HALF)
        zeros = zero_word
        ahead = gl.minimum(pair + STRIDE, end - 1)
        scale_word, zero_word = _read_words(scales_ptr, zeros_ptr, ahead, rows, N, HAS_ZEROS)
        mbarrier.wait(full.index(stage), (count // STAGES) & 1)
        if HIGH == 0:
            zero = _zero(zeros, 0, HAS_ZEROS)
            acc = _add_group(acc, x_smem, w_smem, stage, zero, even, BLOCK, 0, GROUP)
        if HIGH == 1 or SHARES == 1:
            zero = _zero(zeros, 1, HAS_ZEROS)
            acc = _add_group(acc, x_smem, w_smem, stage, zero, odd, BLOCK, 1, GROUP)
        barrier()
        mbarrier.arrive(empty.index(stage), count=1)
        count += STRIDE
    if SHARE > 0:
        sums_smem.index((SHARE - 1) * BLOCKS + BLOCK).store(acc)
        barrier()
        mbarrier.arrive(done.index(BLOCK), count=1)
    else:
        if SHARES > 1:
            mbarrier.wait(done.index(BLOCK), 0)
            for share in gl.static_range(SHARES - 1):
                acc += sums_smem.index(share * BLOCKS + BLOCK).load(layout)
        if HAS_BIAS:
            bias = gl.load(bias_ptr + rows, mask=rows < N, other=0.0).to(gl.float32)
            acc += bias[:, None]
        tokens = first_token + gl.arange(0, TOKENS, gl.SliceLayout(0, layout))
        at = (split.to(gl.int64) * num_tokens + tokens)[None, :] * N + rows[:, None]
        mask = (tokens < num_tokens)[None, :] & (rows < N)[:, None]
        gl.store(y_ptr + at, acc.to(y_ptr.dtype.element_ty), mask=mask)


@gluon.jit(do_not_specialize=["num_tokens"])
def _int4_wide_kernel(
    y_ptr,  # [T, N]; with SPLITS [SPLITS, T, N] float32
    x_desc,  # of x [T, K], columns in the order of the weight's: boxes [TOKENS, PIECE]
    w_desc,  # of values [N, pairs * GROUP]: boxes [rows, PIECE]
    scales_ptr,  # [pairs, N] words
    zeros_ptr,  # [words, N]
    bias_ptr,  # [N]
    num_tokens,
    K: gl.constexpr,
    N: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    GROUP: gl.constexpr,
    HAS_ZEROS: gl.constexpr,
    IN_HALF: gl.constexpr,
    TOKENS: gl.constexpr,
    SHARES: gl.constexpr,
    SPLITS: gl.constexpr,
    STAGES: gl.constexpr,
    OVERLAPPED: gl.constexpr,
):
    start_dependents(OVERLAPPED)
    PAIRS: gl.constexpr = (K + 2 * GROUP - 1) // (2 * GROUP)
    PIECE: gl.constexpr = x_desc.block_type.shape[1]
    PIECES: gl.constexpr = GROUP // PIECE
    BLOCKS: gl.constexpr = _WARPGROUPS // SHARES
    ROWS: gl.constexpr = BLOCKS * _ROWS
    x_smem = gl.allocate_shared_memory(
        x_desc.dtype, [STAGES * 2 * PIECES, TOKENS, PIECE], x_desc.layout
    )
    w_smem = gl.allocate_shared_memory(gl.uint8, [STAGES * PIECES, ROWS, PIECE], w_desc.layout)
    sums_smem = x_smem
    if SHARES > 1:
        sums_smem = gl.allocate_shared_memory(
            gl.float32, [(SHARES - 1) * BLOCKS, _ROWS, TOKENS], _exchange_layout(TOKENS)
        )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [BLOCKS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2 if SHARES == 4 else 4)
    for i in gl.static_range(BLOCKS):
        mbarrier.init(done.index(i), count=max(1, SHARES - 1))
    fence_async_shared()
    split = gl.program_id(2)
    first_token = gl.program_id(0) * TOKENS
    first_row = gl.program_id(1) * ROWS
    begin = split * PAIRS // SPLITS
    end = (split + 1) * PAIRS // SPLITS
    # Written out: constants in a tuple that a variable holds would be values.
    gl.warp_specialize(
        [
            (_multiply, (0, x_smem, w_smem, sums_smem, full, empty, done, scales_ptr, zeros_ptr,
                         bias_ptr, y_ptr, num_tokens, begin, end, first_row, first_token, split, N,
                         HAS_BIAS, GROUP, HAS_ZEROS, IN_HALF, SHARES, STAGES)),
            (_multiply, (1, x_smem, w_smem, sums_smem, full, empty, done, scales_ptr, zeros_ptr,
                         bias_ptr, y_ptr, num_tokens, begin, end, first_row, first_token, split, N,
                         HAS_BIAS, GROUP, HAS_ZEROS, IN_HALF, SHARES, STAGES)),
            (_multiply, (2, x_smem, w_smem, sums_smem, full, empty, done, scales_ptr, zeros_ptr,
                         bias_ptr, y_ptr, num_tokens, begin, end, first_row, first_token, split, N,
                         HAS_BIAS, GROUP, HAS_ZEROS, IN_HALF, SHARES, STAGES)),
            (_multiply, (3, x_smem, w_smem, sums_smem, full, empty, done, scales_ptr, zeros_ptr,
                         bias_ptr, y_ptr, num_tokens, begin, end, first_row, first_token, split, N,
                         HAS_BIAS, GROUP, HAS_ZEROS, IN_HALF, SHARES, STAGES)),
            (_fetch, (x_desc, w_desc, x_smem, w_smem, full, empty, begin, end, first_row,
                      first_token, GROUP, STAGES, OVERLAPPED)),
        ],
        [4, 4, 4, 1],
        [112, 112, 112, 32],
    )  # fmt: skip


def launch_int4_wide(
    x: torch.Tensor,  # [T, K] in 16 bits, columns in the order of the weight's
    weight: Int4Rows,  # [N, K]
    bias: torch.Tensor | None,
    tile: WideTile | None = None,
) -> torch.Tensor:
    """Returns y [T, N] in x's type."""
    (num_tokens, width), height = x.shape, weight.shape[0]
    group = weight.group_size
    tile = tile or tile_for(height, width)
    tokens = min(MAX_TILE, max(8, 1 << (num_tokens - 1).bit_length()))
    rows, piece = 256 // tile.shares, min(group, 64)
    # Even with four shares: of an odd number a warpgroup, which takes every other pair, would skip
    # every other fill of a stage and take the parity of an earlier one for that of its own.
    stages = min(_STAGE_BYTES // (group * (rows + 4 * tokens)), _MAX_STAGES * 128 // group)
    y = x.new_empty((num_tokens, height))
    sums = y
    if tile.splits > 1:
        shape = (tile.splits, num_tokens, height)
        sums = torch.empty(shape, dtype=torch.float32, device=x.device)
    values, scales, zeros = pointers(weight)
    x_layout = gl.NVMMASharedLayout(2 * piece, 16, 2)
    launch(
        _int4_wide_kernel,
        (-(-num_tokens // tokens), -(-height // rows), tile.splits),
        sums,
        TensorDescriptor.from_tensor(x, [tokens, piece], x_layout),
        TensorDescriptor.from_tensor(values, [rows, piece], gl.NVMMASharedLayout(piece, 8, 2)),
        scales,
        zeros,
        y if bias is None else bias,
        num_tokens,
        K=width,
        N=height,
        HAS_BIAS=bias is not None and tile.splits == 1,
        GROUP=group,
        HAS_ZEROS=weight.zeros is not None,
        IN_HALF=weight.scales.dtype == torch.float16,
        TOKENS=tokens,
        SHARES=tile.shares,
        SPLITS=tile.splits,
        STAGES=stages,
        OVERLAPPED=OVERLAPS,
        num_warps=4,
        launch_pdl=True,
    )
    if tile.splits > 1:
        add_splits(sums, bias, y)
    return y


def tile_for(height: int, width: int) -> WideTile:
    """Returns the tile of a weight [height, width]: the one whose programs, in as many rounds as
    they need, are done first."""

    def cost(shares: int) -> float:
        rows = 256 // shares
        rounds = -(-height // (rows * _MULTIPROCESSORS))
        return rounds * rows * _COST[shares]

    shares = min(_COST, key=cost)
    programs = -(-height * shares // 256)
    splits = 1
    while 2 * splits * programs <= _MULTIPROCESSORS and width >= 2 * splits * _LEAST_COLUMNS:
        splits *= 2
    return WideTile(shares, splits)

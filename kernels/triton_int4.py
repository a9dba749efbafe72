"""The shared parts of the kernels that read 4-bit rows, and the kernel that writes them out.

A nibble becomes a float of 16 bits without a conversion: behind the bits of 128 (bfloat16) or 1024
(float16) it is the last bits of that number plus q, of which one fused multiply-add takes 128 or
1024 and the zero point. All of it is exact. Conversions from integers are 16 a clock of a
multiprocessor, and at the bandwidth of an H100 a clock brings 29 weights.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.int4 import Int4Rows
from kernels.triton_launch import OVERLAPS, Launcher, start_dependents, wait_for_inputs

_ONE_AND_MAGIC = {"bf16x2": ("0x3F803F80", "0x43004300"), "f16x2": ("0x3C003C00", "0x64006400")}


def unpacking(kind: str, halves: tuple[int, ...]) -> str:
    """Returns the code that turns a word of four bytes into pairs of columns, those in the low
    halves (0), in the high ones (1) or both. Its operands: two outputs for each half, the word, and
    two numbers to add for each."""
    one, magic = _ONE_AND_MAGIC[kind]
    count = 2 * len(halves)
    code = [
        ".reg .b32 a, one, mask, magic;",
        f"mov.b32 one, {one};",
        "mov.b32 mask, 0x000F000F;",
        f"mov.b32 magic, {magic};",
    ]
    for number in range(count):
        shift = 4 * halves[number // 2] + 8 * (number % 2)
        code += [
            f"shr.u32 a, ${count}, {shift};",
            "lop3.b32 a, a, mask, magic, 0xEA;",
            f"fma.rn.{kind} ${number}, a, one, ${count + 1 + number};",
        ]
    return "{" + " ".join(code) + "}"


_BF16 = tl.constexpr(unpacking("bf16x2", (0, 1)))
_FP16 = tl.constexpr(unpacking("f16x2", (0, 1)))
_OPERANDS = tl.constexpr("=&r,=&r,=&r,=&r,r,r,r,r,r")


@triton.jit
def unpack_pair(w, zero_0, zero_1, TYPE: tl.constexpr, UPCAST: tl.constexpr):
    """Returns q - zero of the low and of the high halves of w [b, n, k] uint8, in TYPE, bfloat16 or
    float16, the columns in the order of `thread_order`. zero_0, zero_1: [b, n, 1] float32, 0 to
    15."""
    if UPCAST:
        low = _paired(((w & 15).to(tl.float32) - zero_0).to(TYPE))
        high = _paired(((w >> 4).to(tl.float32) - zero_1).to(TYPE))
    elif tl.bfloat16 == TYPE:
        add_0 = tl.broadcast_to((-128.0 - zero_0).to(TYPE), w.shape)
        add_1 = tl.broadcast_to((-128.0 - zero_1).to(TYPE), w.shape)
        low, high = tl.inline_asm_elementwise(
            _BF16, _OPERANDS, [w, add_0, add_1], (tl.bfloat16, tl.bfloat16), True, 4
        )
    else:
        add_0 = tl.broadcast_to((-1024.0 - zero_0).to(TYPE), w.shape)
        add_1 = tl.broadcast_to((-1024.0 - zero_1).to(TYPE), w.shape)
        low, high = tl.inline_asm_elementwise(
            _FP16, _OPERANDS, [w, add_0, add_1], (tl.float16, tl.float16), True, 4
        )
    return low, high


@triton.jit
def _paired(w):
    """Returns the numbers of each word [b, n, k] as the assembly does: neighbouring columns in
    pairs."""
    B: tl.constexpr = w.shape[0]
    ROWS: tl.constexpr = w.shape[1]
    K: tl.constexpr = w.shape[2]
    words = tl.reshape(w, [B, ROWS, K // 4, 2, 2])
    return tl.reshape(tl.permute(words, (0, 1, 2, 4, 3)), [B, ROWS, K])


@triton.jit
def thread_order(x):
    """Returns x [b, k, tokens] with its columns in the order of unpacked ones: of 16, those that a
    thread of an mma multiplies are neighbours. It moves values between registers' names only."""
    B: tl.constexpr = x.shape[0]
    K: tl.constexpr = x.shape[1]
    TOKENS: tl.constexpr = x.shape[2]
    words = tl.reshape(x, [B, K // 16, 2, 4, 2, TOKENS])
    return tl.reshape(tl.permute(words, (0, 1, 3, 2, 4, 5)), [B, K, TOKENS])


@triton.jit
def _in_columns(w):
    """Returns stored numbers [rows, pairs, GROUP] in the order of their columns."""
    ROWS: tl.constexpr = w.shape[0]
    PAIRS: tl.constexpr = w.shape[1]
    GROUP: tl.constexpr = w.shape[2]
    words = tl.reshape(w, [ROWS, PAIRS, GROUP // 16, 4, 2, 2])
    return tl.reshape(tl.permute(words, (0, 1, 2, 5, 3, 4)), [ROWS, PAIRS, GROUP])


@triton.jit
def scales_of(word, IN_HALF: tl.constexpr):
    """Returns the scales of the even and the odd group, float32, from words. IN_HALF: they are
    float16, not bfloat16."""
    TYPE: tl.constexpr = tl.float16 if IN_HALF else tl.bfloat16
    even = (word & 0xFFFF).to(tl.uint16).to(TYPE, bitcast=True).to(tl.float32)
    return even, (word >> 16).to(tl.uint16).to(TYPE, bitcast=True).to(tl.float32)


@triton.jit
def read_scales(at, mask, IN_HALF: tl.constexpr):
    """Returns the scales of the even and the odd group, float32, from addresses of words."""
    return scales_of(tl.load(at, mask=mask, other=0), IN_HALF)


@triton.jit
def read_zeros(at, pair, mask):
    """Returns the zero points of the even and the odd group of a pair, float32, from addresses of
    the words of four pairs."""
    word = tl.load(at, mask=mask, other=0) >> (pair % 4 * 8)
    return (word & 15).to(tl.float32), ((word >> 4) & 15).to(tl.float32)


@triton.jit(do_not_specialize=["first", "end"])
def _write_out_kernel(
    values_ptr,  # [N, PAIRS * GROUP]
    scales_ptr,  # [PAIRS, N] int32
    zeros_ptr,  # [words, N] int32
    out_ptr,  # [end - first, K]
    first,  # row
    end,
    K: tl.constexpr,
    N: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    IN_HALF: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    PAIRS: tl.constexpr = (K + 2 * GROUP - 1) // (2 * GROUP)
    start_dependents(OVERLAPPED)
    rows = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    names = first + rows
    pairs = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)[None, :]
    mask = (names < end) & (pairs < PAIRS)
    places = tl.arange(0, GROUP)[None, None, :]
    at = (names * PAIRS + pairs)[:, :, None] * GROUP + places
    w = _in_columns(tl.load(values_ptr + at, mask=mask[:, :, None], other=0))
    even, odd = read_scales(scales_ptr + pairs * N + names, mask, IN_HALF)
    zero_0, zero_1 = tl.full(mask.shape, 8.0, tl.float32), tl.full(mask.shape, 8.0, tl.float32)
    if HAS_ZEROS:
        zero_0, zero_1 = read_zeros(zeros_ptr + pairs // 4 * N + names, pairs, mask)
    # The magic numbers again, in float32.
    low = ((w & 15).to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    high = ((w >> 4).to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    low = (low - zero_0[:, :, None]) * even[:, :, None]
    high = (high - zero_1[:, :, None]) * odd[:, :, None]
    column = pairs[:, :, None] * 2 * GROUP + places
    out_at = out_ptr + rows[:, :, None] * K + column
    wait_for_inputs(OVERLAPPED)  # an earlier product may still read the memory that is written
    live = (names < end)[:, :, None]
    type = out_ptr.dtype.element_ty
    tl.store(out_at, low.to(type), mask=live & (column < K))
    tl.store(out_at + GROUP, high.to(type), mask=live & (column + GROUP < K))


_launch = Launcher(_write_out_kernel, launch_pdl=OVERLAPS)
_WRITE_N, _WRITE_COLUMNS = 16, 512


def pointers(weight: Int4Rows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns values, scales and zero points as the kernels read them, the latter two as words."""
    assert weight.values.is_contiguous()
    assert weight.scales.is_contiguous()
    scales = weight.scales.view(torch.int32)
    return weight.values, scales, scales if weight.zeros is None else weight.zeros.view(torch.int32)


def launch_write_out(
    weight: Int4Rows, dtype: torch.dtype, first: int = 0, end: int | None = None
) -> torch.Tensor:
    """Returns the values of the rows from `first` to `end`, None: the last, rounded once to
    `dtype`; columns stay sorted by their groups."""
    height, width = weight.shape
    end = height if end is None else end
    out = torch.empty((end - first, width), dtype=dtype, device=weight.device)
    block_p = max(1, _WRITE_COLUMNS // (2 * weight.group_size))
    pairs = weight.scales.shape[0]
    _launch(
        (-(-pairs // block_p), -(-(end - first) // _WRITE_N), 1),
        (*pointers(weight), out),
        (),
        (
            first,
            end,
            width,
            height,
            weight.group_size,
            weight.zeros is not None,
            weight.scales.dtype == torch.float16,
            _WRITE_N,
            block_p,
            OVERLAPS,
        ),
        4,
    )
    return out

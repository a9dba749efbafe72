"""Integers of 8 bits as floats, exactly and without conversions.

A conversion from an integer is one instruction of 16 a clock of a multiprocessor. Here the byte
becomes the last bits of a float: behind the bits of 128 in bfloat16, of 1024 in float16 and of 2^23
in float32 it adds itself to that number, and a sum takes the number away: two instructions for each
float.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.backend import IS_INTERPRETED

_INTERPRETED = tl.constexpr(IS_INTERPRETED)
# The four bytes in the register `word` become floats of 16 bits in `low` and `high`, or of 32 bits
# in `f0` to `f3`.
#
# Seven bits of the byte follow the bits of 128. Its sign's bit makes -256 of -128, which is added.
_BF16 = """
    .reg .b32 less, more, one;
    mov.b32 one, 0x3F803F80;
    prmt.b32 low, word, 0, 0x4140;
    prmt.b32 high, word, 0, 0x4342;
    lop3.b32 less, low, 0x00800080, 0xC300C300, 0x6A;
    lop3.b32 more, high, 0x00800080, 0xC300C300, 0x6A;
    lop3.b32 low, low, 0x007F007F, 0x43004300, 0xEA;
    lop3.b32 high, high, 0x007F007F, 0x43004300, 0xEA;
    fma.rn.bf16x2 low, low, one, less;
    fma.rn.bf16x2 high, high, one, more;
"""
# The byte with its sign flipped is 128 more: 1024 + 128 is taken away.
_FP16 = """
    .reg .b32 less;
    mov.b32 less, 0xE480E480;
    xor.b32 word, word, 0x80808080;
    prmt.b32 low, word, 0x64646464, 0x4140;
    prmt.b32 high, word, 0x64646464, 0x4342;
    add.rn.f16x2 low, low, less;
    add.rn.f16x2 high, high, less;
"""
# Likewise 2^23 + 128.
_FP32 = "xor.b32 word, word, 0x80808080;" + "".join(
    f"prmt.b32 f{i}, word, 0x4B000000, 0x744{i}; add.rn.f32 f{i}, f{i}, 0fCB000080;"
    for i in range(4)
)


def _assembly(body: str, source: str, end: str) -> tl.constexpr:
    """Returns the code that converts the word in `source`; `end` moves the floats to the
    outputs."""
    registers = ".reg .b32 word, low, high, f0, f1, f2, f3;"
    return tl.constexpr(f"{{ {registers} mov.b32 word, {source}; {body} {end} }}")


_FOUR_MOVES = "mov.b32 $0, f0; mov.b32 $1, f1; mov.b32 $2, f2; mov.b32 $3, f3;"
_TWO_MOVES = "mov.b32 $0, low; mov.b32 $1, high;"
_FOUR_HALVES = "mov.b32 {$0, $1}, low; mov.b32 {$2, $3}, high;"
_BYTES_BF16 = _assembly(_BF16, "$2", _TWO_MOVES)
_BYTES_FP16 = _assembly(_FP16, "$2", _TWO_MOVES)
_WORDS_BF16 = _assembly(_BF16, "$4", _FOUR_HALVES)
_WORDS_FP16 = _assembly(_FP16, "$4", _FOUR_HALVES)
_FP32_OF = _assembly(_FP32, "$4", _FOUR_MOVES)
_PAIRS = tl.constexpr("=r,=r,r")
_HALVES = tl.constexpr("=h,=h,=h,=h,r")
_FLOATS = tl.constexpr("=r,=r,=r,=r,r")


@triton.jit
def widen(x, TYPE: tl.constexpr):
    """Returns x [...] in TYPE, a float type. Of int8, every thread has a multiple of four; words of
    four int8 [n, groups, words] become [n, columns]."""
    if x.dtype == tl.int32:
        wide = _widen_words(x, TYPE)
    elif x.dtype != tl.int8 or _INTERPRETED:
        wide = x.to(TYPE)
    elif tl.bfloat16 == TYPE:
        wide = tl.inline_asm_elementwise(_BYTES_BF16, _PAIRS, [x], tl.bfloat16, True, 4)
    elif tl.float16 == TYPE:
        wide = tl.inline_asm_elementwise(_BYTES_FP16, _PAIRS, [x], tl.float16, True, 4)
    else:
        wide = tl.inline_asm_elementwise(_FP32_OF, _FLOATS, [x], tl.float32, True, 4)
    return wide


@triton.jit
def _widen_words(x, TYPE: tl.constexpr):
    if _INTERPRETED:
        x_0, x_1 = (x << 24 >> 24).to(TYPE), (x << 16 >> 24).to(TYPE)
        x_2, x_3 = (x << 8 >> 24).to(TYPE), (x >> 24).to(TYPE)
    elif tl.bfloat16 == TYPE:
        x_0, x_1, x_2, x_3 = tl.inline_asm_elementwise(
            _WORDS_BF16, _HALVES, [x], (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), True, 1
        )
    elif tl.float16 == TYPE:
        x_0, x_1, x_2, x_3 = tl.inline_asm_elementwise(
            _WORDS_FP16, _HALVES, [x], (tl.float16, tl.float16, tl.float16, tl.float16), True, 1
        )
    else:
        x_0, x_1, x_2, x_3 = tl.inline_asm_elementwise(
            _FP32_OF, _FLOATS, [x], (tl.float32, tl.float32, tl.float32, tl.float32), True, 1
        )
    pairs = tl.join(tl.join(x_0, x_2), tl.join(x_1, x_3))  # [n, groups, words, 2, 2]
    return tl.reshape(pairs, [x.shape[0], 4 * x.shape[1] * x.shape[2]])
